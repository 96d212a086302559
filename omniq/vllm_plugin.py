"""omniq in every vLLM process: registers models that vLLM itself does not bring.

vLLM loads the entry points of the group ``vllm.general_plugins`` in the process that starts it, in
its engine process and in every worker, in each maybe several times; omniq's is
:meth:`OmniPlugin.register`. Models come from the entry point group ``omniq.vllm_models``: the name
is the architecture as ``config.json`` spells it, the value ``package.module:Class``::

    [project.entry-points."omniq.vllm_models"]
    MyTalkerForCausalLM = "my_package.talker:MyTalkerForCausalLM"

The class is imported by vLLM only when a model of that architecture is loaded.
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import EntryPoint, entry_points

from omniq import vllm_orphans

logger = logging.getLogger(__name__)

ENTRY_POINTS = "omniq.vllm_models"
#: omniq's own; no model's config.json names them, stages do.
BUILTIN = {
    "OmniqQwenVLTextEncoder": "omniq.engines.vllm.text_encoder:QwenVLTextEncoder",
}


class OmniPlugin:
    """The plugin that vLLM calls."""

    @staticmethod
    def register() -> None:
        """Register every declared model; what has been registered already stays as it is.

        An engine process of an omniq worker also begins to watch that worker.

        An entry point that is wrong is skipped with a warning: it must not keep vLLM from serving
        other models.
        """
        vllm_orphans.end_with_parent()
        models = OmniPlugin.models()
        if "vllm" in sys.modules:  # which it is where vLLM calls this
            models |= BUILTIN
        if not models:
            return
        from omniq.engines.vllm import contract  # noqa: PLC0415 - vLLM's own processes only

        registry = contract.names().ModelRegistry
        for architecture, target in models.items():
            module, _, name = target.partition(":")
            present = registry.models.get(architecture)
            if (
                getattr(present, "module_name", None) == module
                and getattr(present, "class_name", None) == name
            ):
                continue
            if present is not None:
                logger.warning("%s replaces vLLM's own model %s", target, architecture)
            registry.register_model(architecture, target)

    @staticmethod
    def models() -> dict[str, str]:
        """Declared models: architecture -> ``module:Class``; of two with one name the first."""
        found: dict[str, str] = {}
        for point in entry_points(group=ENTRY_POINTS):
            if not (point.module and point.attr):
                logger.warning("ignored %s: it must be package.module:Class", _named(point))
            elif point.name in found:
                logger.warning(
                    "ignored %s: the name is taken by %s", _named(point), found[point.name]
                )
            else:
                found[point.name] = f"{point.module}:{point.attr}"
        return found


def _named(point: EntryPoint) -> str:
    owner = f" of {point.dist.name}" if point.dist else ""
    return f"entry point {point.name!r} = {point.value!r}{owner} in {ENTRY_POINTS}"

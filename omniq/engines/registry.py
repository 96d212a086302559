"""Finding an engine by (engine type, name); implementations are imported only when used.

A name is ``auto``, one of the built-in names, the name of an entry point in the group
``omniq.engines`` (``AR.fancy = package.module:Class`` provides the AR engine ``fancy``), or
``package.module:Class`` itself.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec

from omniq.config import EngineType, OmniStageConfig
from omniq.engines.base import Engine
from omniq.errors import ConfigError

logger = logging.getLogger(__name__)

ENTRY_POINTS = "omniq.engines"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Where an engine's class lives and which packages it needs."""

    engine_type: EngineType
    name: str
    target: str
    requires: tuple[str, ...] = ()
    extra: str | None = None
    origin: str = "omniq"

    def missing(self) -> str | None:
        """Why the engine cannot be used here; None if it can."""
        needed = self.requires or (self.target.partition(":")[0].partition(".")[0],)
        absent = [package for package in needed if find_spec(package) is None]
        if not absent:
            return None
        remedy = f"; install the extra omniq[{self.extra}]" if self.extra else ""
        return f"not installed: {', '.join(absent)}{remedy}"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One line of ``omniq engines``; ``reason`` says why an engine is not available."""

    name: str
    engine_type: str
    available: bool
    reason: str | None = None
    origin: str = field(default="omniq")


_TORCH = ("torch", "transformers")
#: Engines of types that have one.
_ONLY = {EngineType.TALK: "omni-talker", EngineType.VOCODE: "omni-token2wav"}
BUILTIN = (
    EngineSpec(
        EngineType.AR,
        "transformers",
        "omniq.engines.ar_transformers:TransformersAREngine",
        _TORCH,
        "diffusion",
    ),
    *(
        EngineSpec(of_type, name, f"omniq.engines.omni.{target}", _TORCH, "diffusion")
        for of_type, name, target in (
            (EngineType.AR, "omni-thinker", "thinker:ThinkerEngine"),
            (EngineType.TALK, "omni-talker", "talker:TalkerEngine"),
            (EngineType.VOCODE, "omni-token2wav", "token2wav:Token2WavEngine"),
            (EngineType.VOCODE, "omni-code2wav", "code2wav:Code2WavEngine"),
        )
    ),
    EngineSpec(EngineType.AR, "vllm", "omniq.engines.ar_vllm:VLLMAREngine", ("vllm",), "vllm"),
    EngineSpec(
        EngineType.AR,
        "omni-thinker-vllm",
        "omniq.engines.omni.vllm_thinker:VLLMThinkerEngine",
        ("vllm", "torchvision"),
        "vllm",
    ),
    EngineSpec(
        EngineType.AR,
        "glm_image",
        "omniq.engines.ar_glm_image:GlmImageAREngine",
        _TORCH,
        "diffusion",
    ),
    EngineSpec(EngineType.AR, "csm", "omniq.engines.ar_csm:CsmAREngine", _TORCH, "diffusion"),
    EngineSpec(EngineType.DECODE, "codec", "omniq.engines.codec:CodecEngine", _TORCH, "diffusion"),
    EngineSpec(
        EngineType.ENCODE,
        "vllm",
        "omniq.engines.encode_vllm:VLLMPromptEncoder",
        ("vllm", "diffusers", "greenlet"),
        "vllm",
    ),
    *(
        EngineSpec(
            part,
            "diffusers",
            "omniq.engines.diffusion.executor:DiffusersPipelineExecutor",
            ("torch", "diffusers", "greenlet"),
            "diffusion",
        )
        for part in (EngineType.ENCODE, EngineType.DIT, EngineType.DECODE)
    ),
)


def create_engine(stage: OmniStageConfig, device: str = "cpu") -> Engine:
    """The engine of a stage, not loaded yet.

    Raises:
        ConfigError: no such engine for the stage's type (the message lists the allowed names), it
            is not installed, or its class is no :class:`Engine`.
    """
    spec = resolve(stage.engine_type, stage.engine, device)
    if (reason := spec.missing()) is not None:
        raise ConfigError(f"stage {stage.stage_id!r}: engine {spec.name!r} is {reason}")
    return _load(spec)(stage, device)


def describe() -> list[EngineInfo]:
    """All engines known here, by type, and whether each can be used."""
    found = []
    taken: dict[tuple[EngineType, str], EngineSpec] = {}
    for spec in _all_specs():
        first = taken.setdefault((spec.engine_type, spec.name), spec)
        reason = spec.missing() if first is spec else f"the name is taken by {first.origin}"
        found.append(
            EngineInfo(spec.name, spec.engine_type.value, reason is None, reason, spec.origin)
        )
    return sorted(found, key=lambda info: (info.engine_type, info.name))


def resolve(engine_type: EngineType, name: str, device: str = "cpu") -> EngineSpec:
    """Which implementation a name means for that type on that device (``cpu``, ``cuda:0``).

    ``auto`` for AR is vLLM on a CUDA device when it is installed, else transformers.

    Raises:
        ConfigError: no such engine; the message lists the allowed names.
    """
    if name == AUTO:
        name = _default_name(engine_type, device)
    elif ":" in name:
        return EngineSpec(engine_type, name, name, origin=name)
    specs = [s for s in _all_specs() if s.engine_type is engine_type]
    for spec in specs:
        if spec.name == name:
            return spec
    allowed = ", ".join([AUTO, *dict.fromkeys(s.name for s in specs)])
    raise ConfigError(
        f"no {engine_type.value} engine {name!r}; allowed: {allowed}, or package.module:Class"
    )


def vllm_installed() -> bool:
    """Whether vLLM can be imported, whatever its distribution is called."""
    return find_spec("vllm") is not None


def reason(engine_type: EngineType, device: str) -> str:
    """For people: why ``auto`` is what :func:`resolve` says."""
    if engine_type is not EngineType.AR:
        return "the only one of its type"
    if not vllm_installed():
        return "vLLM is not installed"
    if device.startswith("cuda"):
        return "vLLM is installed, and this is a CUDA device"
    return "vLLM is taken by itself on CUDA devices only; `engine: vllm` takes it here"


def _default_name(engine_type: EngineType, device: str) -> str:
    if engine_type is EngineType.AR:
        return "vllm" if vllm_installed() and device.startswith("cuda") else "transformers"
    return _ONLY.get(engine_type, "diffusers")


def _all_specs() -> list[EngineSpec]:
    """Built-in engines first, so that no installed package replaces one silently."""
    specs = list(BUILTIN)
    for point in entry_points(group=ENTRY_POINTS):
        type_name, _, name = point.name.partition(".")
        origin = point.dist.name if point.dist else point.value
        if (
            type_name not in list(EngineType) or not name
        ):  # must not break the engines that are right
            allowed = ", ".join(EngineType)
            logger.warning(
                "ignored entry point %r of %s in %s: it must be called TYPE.NAME, TYPE one of %s",
                point.name, origin, ENTRY_POINTS, allowed,
            )  # fmt: skip
            continue
        specs.append(EngineSpec(EngineType(type_name), name, point.value, origin=origin))
    return specs


def _load(spec: EngineSpec) -> type[Engine]:
    module, _, attribute = spec.target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"engine {spec.name!r} ({spec.target}) cannot be loaded: {exc}") from exc
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise ConfigError(f"engine {spec.name!r}: {spec.target} is no omniq.engines.base.Engine")
    return found

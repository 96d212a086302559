"""What diffusers has to make a transformer faster or smaller, by a DiT stage's ``engine_args``.

``attention_backend`` is a name of diffusers' ``AttentionBackendName``, ``compile_repeated_blocks``
true or ``torch.compile``'s own arguments, ``quantization_config`` the arguments of diffusers'
``PipelineQuantizationConfig``. Each may need a package that omniq does not install.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from omniq.config import OmniStageConfig
from omniq.errors import ConfigError

ACCELERATION_ARGS = frozenset(
    {"attention_backend", "compile_repeated_blocks", "quantization_config"}
)


def quantization(stage: OmniStageConfig) -> Any:
    """What ``from_pretrained`` takes as ``quantization_config``, or None.

    Raises:
        ConfigError: it is no mapping, or diffusers cannot do this here.
    """
    given = stage.engine_args.get("quantization_config")
    if given is None:
        return None
    from diffusers import PipelineQuantizationConfig  # noqa: PLC0415 - slow import

    with _explained(stage, "quantization_config"):
        if not isinstance(given, dict):
            raise TypeError("must be a mapping, such as {quant_backend: …, quant_kwargs: {…}}")
        # JSON cannot hold what quant_mapping takes.
        return PipelineQuantizationConfig(**given)


def accelerate(stage: OmniStageConfig, transformers: Sequence[Any]) -> None:
    """Set attention backend and compilation of loaded transformers.

    Raises:
        ConfigError: diffusers cannot do this here, or not for this model.
    """
    backend = stage.engine_args.get("attention_backend")
    if backend is not None:
        with _explained(stage, "attention_backend"):
            for transformer in transformers:
                transformer.set_attention_backend(str(backend))
    compiled = stage.engine_args.get("compile_repeated_blocks") or None
    if compiled is not None:
        with _explained(stage, "compile_repeated_blocks"):
            if compiled is not True and not isinstance(compiled, dict):
                raise TypeError("must be true, or a mapping of torch.compile's arguments")
            for transformer in transformers:
                transformer.compile_repeated_blocks(**({} if compiled is True else compiled))


@contextmanager
def _explained(stage: OmniStageConfig, name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, ImportError, RuntimeError) as exc:
        raise ConfigError(f"stage {stage.stage_id!r}: engine_args {name}: {exc}") from exc

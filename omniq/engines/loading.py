"""From a stage's configuration to model files: folders, dtype, engine arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from omniq.config import OmniStageConfig
from omniq.errors import ConfigError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "tokenizer.model",
    "tekken.json",
)
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_SAFETENSORS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def model_folder(stage: OmniStageConfig, patterns: Sequence[str] | None = None) -> Path:
    """Local folder of the stage's whole model (without ``subfolder``).

    A hub name is downloaded (or found in the hub cache) first; ``patterns`` limits which files.

    Raises:
        ConfigError: neither a folder nor a model the hub or its cache has.
    """
    path = Path(stage.model_path)
    if path.is_dir():
        return path
    if stage.model != stage.model_path or path.is_absolute() or stage.model.startswith("."):
        raise ConfigError(f"stage {stage.stage_id!r}: no model folder {path}")
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only models from a hub need it

    try:
        return Path(snapshot_download(stage.model, allow_patterns=list(patterns or []) or None))
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"stage {stage.stage_id!r}: model {stage.model!r} is no folder and cannot be "
            f"downloaded: {exc}"
        ) from exc


def part_folder(stage: OmniStageConfig, patterns: Sequence[str] | None = None) -> Path:
    """Local folder of the part the stage loads: :func:`model_folder` / ``subfolder``.

    Raises:
        ConfigError: it does not exist.
    """
    root = model_folder(stage, patterns)
    folder = root / stage.subfolder if stage.subfolder else root
    if not folder.is_dir():
        raise ConfigError(f"stage {stage.stage_id!r}: no folder {folder}")
    return folder


def tokenizer_folder(model: Path) -> Path:
    """Where the tokenizer of the model in folder ``model`` is: there, or in ``../tokenizer``.

    Raises:
        ConfigError: neither has tokenizer files.
    """
    for folder in (model, model.parent / "tokenizer"):
        if any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return folder
    raise ConfigError(f"no tokenizer files in {model} or {model.parent / 'tokenizer'}")


def torch_dtype(stage: OmniStageConfig) -> torch.dtype | str:
    """The stage's dtype as transformers takes it; ``"auto"`` keeps that of the checkpoint."""
    return "auto" if stage.dtype == "auto" else _DTYPES[stage.dtype]


def diffusers_dtype(stage: OmniStageConfig, folder: Path) -> torch.dtype:
    """The stage's dtype as diffusers takes it, which has no "auto" and would take float32.

    ``auto`` is the dtype of the first floating-point tensor of the weights in ``folder``.
    """
    if stage.dtype != "auto":
        return _DTYPES[stage.dtype]
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - no mapping
                if (found := _SAFETENSORS.get(weights.get_slice(name).get_dtype())) is not None:
                    return found
    return torch.float32


def check_engine_args(stage: OmniStageConfig, allowed: Collection[str]) -> dict[str, Any]:
    """The stage's ``engine_args``, all of them known.

    Raises:
        ConfigError: naming the unknown one and what is allowed.
    """
    unknown = sorted(set(stage.engine_args) - set(allowed))
    if unknown:
        raise ConfigError(
            f"stage {stage.stage_id!r}: unknown engine_args {', '.join(map(repr, unknown))}; "
            f"allowed: {', '.join(sorted(allowed)) or 'none'}"
        )
    return dict(stage.engine_args)


def whole_arg(stage: OmniStageConfig, name: str, default: int, least: int = 1) -> int:
    """Engine argument ``name``, a whole number of at least ``least``.

    Raises:
        ConfigError: it is something else.
    """
    value = stage.engine_args.get(name, default)
    if type(value) is not int or value < least:
        raise ConfigError(
            f"stage {stage.stage_id!r}: engine_args.{name} must be a whole number of at least "
            f"{least}, got {value!r}"
        )
    return value


@contextlib.contextmanager
def loading(stage: OmniStageConfig, folder: Path) -> Iterator[None]:
    """Inside, what ``from_pretrained`` raises for wrong files leaves as :class:`ConfigError`."""
    try:
        yield
    except (OSError, ValueError, KeyError, AttributeError, ImportError) as exc:
        raise ConfigError(
            f"stage {stage.stage_id!r}: cannot load {folder}: {type(exc).__name__}: {exc}"
        ) from exc

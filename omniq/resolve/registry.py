"""The families known here: built in, and of other packages."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from importlib.metadata import entry_points

from pydantic import ValidationError

from omniq.config import PipelineConfig
from omniq.errors import ConfigError
from omniq.resolve.base import BuildOptions, ModelFamily
from omniq.resolve.files import CONFIG, MODEL_INDEX, ModelFiles

logger = logging.getLogger(__name__)

ENTRY_POINTS = "omniq.models"
#: The first that matches serves a model, so what is particular stands before what is general.
BUILTIN = (
    "omniq.resolve.glm_image:GlmImage",
    "omniq.resolve.csm:Csm",
    "omniq.resolve.diffusion:QwenImage",
    "omniq.resolve.diffusion:QwenImageEdit",
    "omniq.resolve.diffusion:QwenImageEditPlus",
    "omniq.resolve.diffusion:ZImage",
    "omniq.resolve.diffusion:Flux",
    "omniq.resolve.diffusion:Flux2",
    "omniq.resolve.diffusion:StableDiffusion3",
    "omniq.resolve.diffusion:Wan5B",
    "omniq.resolve.diffusion:Wan",
    "omniq.resolve.diffusion:WanImageToVideo",
    "omniq.resolve.diffusion:OtherDiffusion",
    "omniq.resolve.qwen_omni:Qwen25Omni",
    "omniq.resolve.qwen_omni:Qwen3Omni",
    "omniq.resolve.language_model:EmbeddingModel",
    "omniq.resolve.language_model:LanguageModel",
)


def families() -> tuple[ModelFamily, ...]:
    """All families, in the order in which they are asked: of other packages first, so that a
    package can serve what would otherwise be taken for a plain language model.

    A package whose family cannot be loaded is passed over with a warning.
    """
    return tuple(family for family, _ in with_origins())


@cache
def with_origins() -> tuple[tuple[ModelFamily, str], ...]:
    """:func:`families`, each with the name of the distribution that brings it."""
    found = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
        try:
            family = _family(point.value)
        except ConfigError as exc:
            logger.warning("ignored entry point %r in %s: %s", point.name, ENTRY_POINTS, exc)
            continue
        found.append((family, point.dist.name if point.dist else point.value))
    return (*found, *((_family(target), "omniq") for target in BUILTIN))


def pipeline_for(files: ModelFiles, options: BuildOptions) -> PipelineConfig:
    """The pipeline that serves a model.

    Raises:
        ConfigError: there is no such model, none of the families knows it, or the options do
            not fit.
    """
    for family in families():
        if family.matches(files):
            mapping = {"name": files.pipeline_name, **family.build(files, options)}
            try:
                return PipelineConfig.model_validate(mapping)
            except ValidationError as exc:
                raise ConfigError(f"{files.given} as {family.name}: {exc}") from exc
    config, index = files.json(CONFIG), files.json(MODEL_INDEX)
    if index is not None:
        is_a = f"a diffusers folder ({files.diffusers_class or 'of no class'})"
    elif config is None:
        raise ConfigError(f"{files.model}: no {CONFIG}, so this is no model folder")
    elif not files.architectures:
        raise ConfigError(f"{files.model}: {CONFIG} names no architectures")
    else:
        is_a = f"a model of {', '.join(files.architectures)}"
    raise ConfigError(
        f"{files.given} is {is_a}, and no model family knows it; "
        f"known: {', '.join(f.name for f in families())}",
        hint="write a pipeline file with its stages and pass that: docs/pipelines.md",
    )


def _family(target: str) -> ModelFamily:
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"{target} cannot be loaded: {exc}") from exc
    if not (isinstance(found, type) and issubclass(found, ModelFamily)):
        raise ConfigError(f"{target} is no omniq.resolve.ModelFamily")
    return found()

"""From a diffusers folder or hub name to the parts of the pipeline that a stage needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from omniq.config import OmniStageConfig
from omniq.engines.families import Family, family_of
from omniq.engines.faults import engine_faults
from omniq.engines.loading import diffusers_dtype, loading, model_folder
from omniq.errors import ConfigError
from omniq.json_file import read_json

INDEX = "model_index.json"


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """What a pipeline folder says it holds."""

    folder: Path
    class_name: str
    components: dict[str, tuple[str | None, str | None]]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        """The family of the pipeline class."""
        return family_of(self.class_name, self.settings)


def read_index(folder: Path) -> ModelIndex:
    """The pipeline's index.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    index = read_json(folder / INDEX)
    components = {
        name: (value[0], value[1])
        for name, value in index.items()
        if isinstance(value, list) and len(value) == 2 and not name.startswith("_")
    }
    class_name = index.get("_class_name")
    if not isinstance(class_name, str) or not components:
        raise ConfigError(f"{folder / INDEX}: names no pipeline class with components")
    settings = {n: v for n, v in index.items() if n not in components and not n.startswith("_")}
    return ModelIndex(folder, class_name, components, settings)


def pipeline_folder(stage: OmniStageConfig, parts: tuple[str, ...]) -> Path:
    """The pipeline's folder; of a model on a hub only ``parts`` and the VAE's geometry.

    Raises:
        ConfigError: there is none.
    """
    patterns = [INDEX, "vae/config.json", *(p if "/" in p else f"{p}/*" for p in parts)]
    root = model_folder(stage, patterns)
    folder = root / stage.subfolder if stage.subfolder else root
    if not folder.is_dir():
        raise ConfigError(f"stage {stage.stage_id!r}: no folder {folder}")
    return folder


def load_pipeline(
    stage: OmniStageConfig,
    index: ModelIndex,
    keep: Callable[[str], bool],
    device: str,
    quantization: Any = None,
) -> Any:
    """The stock pipeline with only the components that ``keep`` accepts, on ``device``.

    Without its VAE a pipeline still knows the VAE's geometry. ``quantization`` is diffusers'
    ``PipelineQuantizationConfig``.

    Raises:
        ConfigError: a component is missing or does not load.
    """
    from diffusers import DiffusionPipeline  # noqa: PLC0415 - slow import

    folder = index.folder
    # Absent components are named None one by one: left out, pipelines load or refuse them.
    components: dict[str, Any] = {name: None for name in index.components if not keep(name)}
    geometry = "vae" in components and index.components["vae"][1] is not None
    if geometry:
        components["vae"] = _vae_without_weights(index)
    kept = [n for n, (_, name) in index.components.items() if n not in components and name]
    dtype = next(
        (
            diffusers_dtype(stage, folder / name)
            for name in kept
            if any((folder / name).glob("*.safetensors"))
        ),
        torch.float32,
    )
    with loading(stage, folder):
        pipeline: Any = DiffusionPipeline.from_pretrained(
            str(folder), dtype=dtype, quantization_config=quantization, **components
        )
    if geometry:
        pipeline.vae = None
    pipeline.set_progress_bar_config(disable=True)
    with engine_faults(f"loading {folder}"):
        for component in pipeline.components.values():
            if isinstance(component, torch.nn.Module):
                component.to(device).eval()
    return pipeline


def _vae_without_weights(index: ModelIndex) -> Any:
    """The pipeline's VAE on the meta device: its whole geometry in no memory.

    Pipelines read scale factor and channel count from ``vae`` in ``__init__`` and silently assume
    8 without one.
    """
    import diffusers  # noqa: PLC0415 - slow import, already loaded here

    config = read_json(index.folder / "vae" / "config.json")
    name = str(index.components["vae"][1] or config.get("_class_name"))
    if not hasattr(diffusers, name):
        raise ConfigError(f"{index.folder / INDEX}: diffusers has no VAE class {name!r}")
    with torch.device("meta"):
        return getattr(diffusers, name).from_config(config)

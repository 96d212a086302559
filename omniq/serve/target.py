"""What MODEL of ``omniq serve`` means: a pipeline, with the given flags on its AR stage."""

from __future__ import annotations

import re
from pathlib import Path

from omniq_workers.devices import visible_gpus

from omniq.config import (
    EngineType,
    OmniStageConfig,
    PipelineConfig,
    available_pipelines,
    load_pipeline,
)
from omniq.config.loader import SUFFIXES
from omniq.engines.registry import vllm_installed
from omniq.errors import ConfigError
from omniq.resolve import BuildOptions, ModelFiles, pipeline_for
from omniq.resolve.files import MAX_NAME
from omniq.serve.flags import ServeFlags
from omniq.serve.overrides import overridden

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SERVED = "-served"


def resolve_model(flags: ServeFlags) -> PipelineConfig:
    """The pipeline that serves ``flags.model``, which is (first that fits)

    - the name of a known pipeline, or a pipeline's YAML file,
    - a folder that a known pipeline is made for,
    - a model of a known family (``omniq.resolve``), in a folder or by its name on the hub.

    ``--stage-overrides`` then change its stages.

    Raises:
        ConfigError: none of these, or flags that its stages cannot take.
    """
    pipeline = _resolved(flags)
    if not flags.stage_overrides:
        return pipeline
    known = available_pipelines().get(pipeline.name) == pipeline
    stages = overridden(pipeline, flags.stage_overrides)
    return _with_stages(pipeline, stages, _served_name(pipeline) if known else pipeline.name)


def _resolved(flags: ServeFlags) -> PipelineConfig:
    known = available_pipelines()
    if flags.model in known:
        return _with_flags(known[flags.model], flags)
    path = Path(flags.model)
    if path.suffix in SUFFIXES:
        return _with_flags(load_pipeline(path), flags)
    if path.is_dir() and (made := _made_for(path, known)) is not None:
        return _with_flags(made, flags)
    if path.is_dir() or HUB_NAME.fullmatch(flags.model):
        gpus = visible_gpus() if flags.gpus is None else flags.gpus
        options = BuildOptions(flags.engine, flags.engine_args, flags.encoder, gpus)
        return pipeline_for(ModelFiles(flags.model), options)
    raise ConfigError(
        f"MODEL {flags.model!r} is no pipeline, no folder and no hub name",
        hint=f"known pipelines: {', '.join(known)}",
    )


def _made_for(folder: Path, known: dict[str, PipelineConfig]) -> PipelineConfig | None:
    """The known pipeline whose stages load that very folder."""
    for pipeline in known.values():
        if any(Path(s.model_path).resolve() == folder.resolve() for s in pipeline.stages):
            return pipeline
    return None


def _with_flags(pipeline: PipelineConfig, flags: ServeFlags) -> PipelineConfig:
    """``pipeline``, or a copy under another name whose AR stage has the given arguments."""
    if not flags.engine_args and flags.engine == "auto":
        return pipeline
    ar = [s for s in pipeline.stages if s.engine_type is EngineType.AR]
    if len(ar) != 1:
        have = ", ".join(f"{s.stage_id} ({s.engine_type})" for s in pipeline.stages)
        raise ConfigError(
            f"engine flags are for one AR stage, and pipeline {pipeline.name!r} has {len(ar)}: "
            f"{have}",
            hint="give each stage its engine_args in a pipeline file",
        )
    changed = _stage_with(ar[0], flags)
    stages = [changed if s is ar[0] else s for s in pipeline.stages]
    return _with_stages(pipeline, stages, _served_name(pipeline))


def _with_stages(
    pipeline: PipelineConfig, stages: list[OmniStageConfig], name: str
) -> PipelineConfig:
    """Made anew: a copy would keep what the pipeline has looked up in its old stages."""
    mapping = pipeline.model_dump(by_alias=True, exclude_unset=True)
    mapping["stages"] = [stage.model_dump(exclude_unset=True) for stage in stages]
    return PipelineConfig.model_validate({**mapping, "name": name})


def _served_name(pipeline: PipelineConfig) -> str:
    return pipeline.name[: MAX_NAME - len(SERVED)] + SERVED


def numbered(pipeline: PipelineConfig, number: int) -> PipelineConfig:
    """``pipeline``, from number 2 on made anew with the number in its name."""
    if number == 1:
        return pipeline
    end = f"-{number}"
    mapping = pipeline.model_dump(by_alias=True, exclude_unset=True)
    name = pipeline.name[: MAX_NAME - len(end)] + end
    return PipelineConfig.model_validate({**mapping, "name": name})


def _stage_with(stage: OmniStageConfig, flags: ServeFlags) -> OmniStageConfig:
    args = dict(flags.engine_args)
    engine = stage.engine
    if flags.engine != "auto":
        engine = flags.engine
    elif vllm_installed():  # the flags were vLLM's
        engine = "vllm"
    update = {
        "engine": engine,
        "dtype": args.pop("dtype", stage.dtype),
        "max_in_flight": args.pop("max_num_seqs", stage.max_in_flight),
        "engine_args": {**stage.engine_args, **args},
    }
    return OmniStageConfig.model_validate({**stage.model_dump(), **update})

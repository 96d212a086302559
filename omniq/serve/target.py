"""What MODEL of ``omniq serve`` means: a pipeline, with the given flags on its AR stage."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
from omniq.json_file import read_json
from omniq.serve.flags import ServeFlags

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
DIFFUSERS = "model_index.json"
#: Requests in flight when ``--max-num-seqs`` says nothing: vLLM's own default on small machines.
MAX_NUM_SEQS = 256
MAX_INPUT = 1 << 31
SERVED = "-served"


def resolve_model(flags: ServeFlags) -> PipelineConfig:
    """The pipeline that serves ``flags.model``, which is (first that fits)

    - the name of a known pipeline, or a pipeline's YAML file,
    - a diffusers folder that a known pipeline is made for,
    - a language model's folder, or its name on the hub.

    Raises:
        ConfigError: none of these, or flags that its stages cannot take.
    """
    known = available_pipelines()
    if flags.model in known:
        return _with_flags(known[flags.model], flags)
    path = Path(flags.model)
    if path.suffix in SUFFIXES:
        return _with_flags(load_pipeline(path), flags)
    if (path / DIFFUSERS).is_file():
        return _with_flags(_made_for(path, known), flags)
    if path.is_dir() or HUB_NAME.fullmatch(flags.model):
        return language_model(flags)
    raise ConfigError(
        f"MODEL {flags.model!r} is no pipeline, no folder and no hub name",
        hint=f"known pipelines: {', '.join(known)}",
    )


def language_model(flags: ServeFlags) -> PipelineConfig:
    """A pipeline of one AR stage around a language model.

    Its inputs are ``prompt`` (as it is), ``messages`` (by the chat template) or
    ``token_ids``; its outputs ``text``, ``finish_reason`` and ``choices``.

    Raises:
        ConfigError: there is no such model, or it is no language model.
    """
    path = Path(flags.model)
    model = str(path.resolve()) if path.is_dir() else flags.model
    config = _json_file(model, "config.json")
    if config is None:
        raise ConfigError(f"{model}: no config.json, so this is no model folder")
    if not config.get("architectures"):
        raise ConfigError(f"{model}: config.json names no architectures")
    args = dict(flags.engine_args)
    engine = flags.engine
    if engine == "auto":
        engine = "vllm" if vllm_installed() else "transformers"
    stage: dict[str, Any] = {
        "stage_id": "ar",
        "engine_type": "AR",
        "engine": engine,
        "model": model,
        "input_modalities": ["text"],
        "output_modalities": ["text"],
        "dtype": args.pop("dtype", "auto"),
        "max_in_flight": args.pop("max_num_seqs", MAX_NUM_SEQS),
        # A prompt is text to go on from; what is to be answered are messages.
        "engine_args": {"chat_template": False, **args},
    }
    inputs = {
        "prompt": {"type": "text", "required": False, "max_length": MAX_INPUT},
        "messages": {"type": "messages", "required": False, "max_length": MAX_INPUT},
        "token_ids": {"type": "token_ids", "required": False, "max_length": MAX_INPUT},
    }
    return PipelineConfig.model_validate(
        {
            "name": _name(path.name),
            "description": f"{flags.model}, served by itself.",
            "inputs": inputs,
            "stages": [stage],
            "edges": [{"from": f"input.{name}", "to": f"ar.{name}"} for name in inputs],
            "outputs": {
                "text": {"from": "ar.text", "type": "text"},
                "finish_reason": {"from": "ar.finish_reason", "type": "text"},
                "choices": {"from": "ar.choices", "type": "json"},
            },
        }
    )


def _made_for(folder: Path, known: dict[str, PipelineConfig]) -> PipelineConfig:
    """The known pipeline whose stages load that very folder."""
    for pipeline in known.values():
        if any(Path(s.model_path).resolve() == folder.resolve() for s in pipeline.stages):
            return pipeline
    index = read_json(folder / DIFFUSERS)
    models = ", ".join(f"{p.name} ({p.stages[0].model})" for p in known.values())
    raise ConfigError(
        f"{folder} is a diffusers folder ({index.get('_class_name', 'of no class')}) and no known "
        f"pipeline is made for it; known: {models}",
        hint="write a pipeline file with its stages and pass that: docs/pipelines.md",
    )


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
    name = pipeline.name[: 64 - len(SERVED)] + SERVED
    return pipeline.model_copy(update={"name": name, "stages": stages})


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


def _json_file(model: str, name: str) -> dict[str, Any] | None:
    """A JSON file of a model in a folder or on the hub; None if the model has no such file.

    Raises:
        ConfigError: there is no such model, or the file holds no JSON object.
    """
    path = Path(model) / name
    if not Path(model).is_dir():
        path_or_none = _from_hub(model, name)
        if path_or_none is None:
            return None
        path = path_or_none
    return read_json(path) if path.is_file() else None


def _from_hub(model: str, name: str) -> Path | None:
    from huggingface_hub import (  # noqa: PLC0415 - only models from a hub need it
        hf_hub_download,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (  # noqa: PLC0415
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
    )

    try:
        return Path(hf_hub_download(model, name))
    except RemoteEntryNotFoundError:
        return None
    except LocalEntryNotFoundError as exc:
        # Without a network the cache is all there is; a model is there with its config.json.
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return None
        raise _unreachable(model, exc) from exc
    except (OSError, ValueError) as exc:
        raise _unreachable(model, exc) from exc


def _unreachable(model: str, exc: Exception) -> ConfigError:
    first = str(exc).strip().partition("\n")[0]
    return ConfigError(
        f"MODEL {model!r} is no pipeline and no folder, and the hub cannot be asked for it: {first}"
    )


def _name(text: str) -> str:
    """A pipeline name made of a model's name."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).lstrip("._-")[:64]
    return name or "model"

"""Pipelines as clients see them: what goes in, what comes out, which parameters, with limits."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from omniq.config import EngineType, Limit, Modality, OmniStageConfig, PipelineConfig


class InputView(BaseModel):
    """One input of a request."""

    type: str
    required: bool
    min_length: int = Field(description="Characters; of token_ids, how many.")
    max_length: int = Field(description="Characters; of token_ids, how many.")
    max_items: int = Field(1, description="Files.")
    max_pixels: int | None = Field(None, description="Of one picture, or frame of a video.")
    max_seconds: float | None = Field(None, description="Of one sound or video.")
    max_frames: int | None = Field(None, description="Of one video, those that are taken.")
    sample_rate: int | None = Field(None, description="Hertz at which stages get a sound.")
    fps: float | None = Field(None, description="Frames of a second taken of a video; null: all.")
    description: str = ""


class OutputView(BaseModel):
    """One result."""

    type: Modality | str
    format: str | None = Field(None, description="Encoding; null: the type's usual one.")
    sample_rate: int | None = Field(None, description="Of type audio: samples a second.")


class ParameterView(BaseModel):
    """One request parameter, with what every stage that takes it allows."""

    type: str = Field(description="JSON type, or several: 'string or array'.")
    description: str = ""
    stages: list[str] = Field(description="Stages that take it.")
    default: Any = Field(None, description="Null: none, or the stages' defaults differ.")
    minimum: float | None = None
    exclusive_minimum: float | None = None
    maximum: float | None = None
    multiple_of: int | None = None
    choices: list[Any] | None = None


class StageView(BaseModel):
    """One stage."""

    id: str
    engine_type: EngineType
    after: list[str] = Field(description="Stages that feed it.")
    output_modalities: list[Modality]
    max_in_flight: int
    time_limit: float | None = Field(None, description="Seconds one run may take.")


class PipelineView(BaseModel):
    """One pipeline."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "tiny-omni",
                    "version": 1,
                    "description": "Draws coloured shapes from a short prompt; runs on any CPU.",
                    "inputs": {
                        "prompt": {
                            "type": "text",
                            "required": True,
                            "min_length": 1,
                            "max_length": 2000,
                            "description": "What to draw.",
                        }
                    },
                    "outputs": {"image": {"type": "image", "format": None}},
                    "parameters": {
                        "num_inference_steps": {
                            "type": "integer",
                            "description": "",
                            "stages": ["dit"],
                            "default": 20,
                            "minimum": 1,
                            "maximum": 100,
                        }
                    },
                    "stages": [
                        {
                            "id": "dit",
                            "engine_type": "DiT",
                            "after": ["ar"],
                            "output_modalities": ["latents"],
                            "max_in_flight": 8,
                            "time_limit": 300,
                        }
                    ],
                }
            ]
        }
    )

    name: str
    version: int
    description: str
    inputs: dict[str, InputView]
    outputs: dict[str, OutputView]
    parameters: dict[str, ParameterView]
    stages: list[StageView]


class PipelineList(BaseModel):
    """All configured pipelines."""

    pipelines: list[PipelineView]


def pipeline_view(pipeline: PipelineConfig, max_text: int) -> PipelineView:
    """Describe a pipeline; no input may be longer than ``max_text`` characters."""
    return PipelineView(
        name=pipeline.name,
        version=pipeline.version,
        description=pipeline.description,
        inputs={
            name: InputView(
                type=i.type,
                required=i.required,
                min_length=i.min_length,
                max_length=i.max_length if i.type == "token_ids" else min(i.max_length, max_text),
                max_items=i.max_items,
                max_pixels=i.max_pixels if i.type in ("image", "video") else None,
                max_seconds=i.max_seconds if i.type in ("audio", "video") else None,
                max_frames=i.max_frames if i.type == "video" else None,
                sample_rate=i.sample_rate if i.type == "audio" else None,
                fps=i.fps if i.type == "video" else None,
                description=i.description,
            )
            for name, i in pipeline.inputs.items()
        },
        outputs={
            n: OutputView(type=o.type, format=o.format, sample_rate=o.sample_rate)
            for n, o in pipeline.outputs.items()
        },
        parameters=_parameters(pipeline.stages),
        stages=[
            StageView(
                id=s.stage_id,
                engine_type=s.engine_type,
                after=pipeline.upstream(s.stage_id),
                output_modalities=s.output_modalities,
                max_in_flight=s.max_in_flight,
                time_limit=s.time_limit,
            )
            for s in pipeline.stages
        ],
    )


def _parameters(stages: list[OmniStageConfig]) -> dict[str, ParameterView]:
    found: dict[str, ParameterView] = {}
    for stage in stages:
        for name, schema in stage.parameter_model.model_json_schema()["properties"].items():
            own = _parameter(stage, name, schema)
            found[name] = _both(found[name], own) if name in found else own
    return found


def _parameter(stage: OmniStageConfig, name: str, schema: dict[str, Any]) -> ParameterView:
    """One stage's parameter: the engine type's bounds, narrowed by the stage's limits."""
    # Every parameter is optional, so its schema is "this type or null".
    kinds = [b for b in schema.get("anyOf", [schema]) if b.get("type") != "null"]
    bounds = kinds[0]
    limit = stage.limits.get(name, Limit())
    return ParameterView(
        type=" or ".join(k.get("type", "object") for k in kinds),  # a reference is to an object
        description=schema.get("description", ""),
        stages=[stage.stage_id],
        default=stage.defaults.get(name),
        minimum=_tighter(max, bounds.get("minimum"), limit.min),
        exclusive_minimum=bounds.get("exclusiveMinimum"),
        maximum=_tighter(min, bounds.get("maximum"), limit.max),
        multiple_of=limit.multiple_of,
        choices=limit.choices or bounds.get("enum"),
    )


def _both(a: ParameterView, b: ParameterView) -> ParameterView:
    """A parameter that two stages take: a shared value must please both."""
    choices = a.choices if b.choices is None else b.choices
    if a.choices is not None and b.choices is not None:
        choices = [c for c in a.choices if c in b.choices]
    return ParameterView(
        type=a.type,
        description=a.description or b.description,
        stages=[*a.stages, *b.stages],
        default=a.default if a.default == b.default else None,
        minimum=_tighter(max, a.minimum, b.minimum),
        exclusive_minimum=_tighter(max, a.exclusive_minimum, b.exclusive_minimum),
        maximum=_tighter(min, a.maximum, b.maximum),
        multiple_of=_common_multiple(a.multiple_of, b.multiple_of),
        choices=choices,
    )


def _tighter(pick: Any, a: float | None, b: float | None) -> float | None:
    present: list[float] = [v for v in (a, b) if v is not None]
    return pick(present) if present else None


def _common_multiple(a: int | None, b: int | None) -> int | None:
    return math.lcm(a, b) if a and b else a or b

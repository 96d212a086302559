"""Configuration of one stage: its engine type, model, devices, admission window and limits."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from omniq.config.params import PARAMS

BUILTIN = "builtin:"


class ConfigModel(BaseModel):
    """Base of all configuration models: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineType(StrEnum):
    """What a stage computes."""

    AR = "AR"
    DIT = "DiT"
    DECODE = "decode"


class Modality(StrEnum):
    """Kinds of data on a stage's inputs and outputs."""

    TEXT = "text"
    IMAGE = "image"
    TEXT_IMAGE = "text+image"
    AUDIO = "audio"
    VIDEO = "video"
    LATENTS = "latents"
    HIDDEN_STATES = "hidden_states"
    POOLING = "pooling"
    JSON = "json"


class Limit(ConfigModel):
    """What a stage accepts for one parameter, narrower than its engine type's own bounds."""

    min: float | None = None
    max: float | None = None
    multiple_of: int | None = Field(None, ge=1)
    choices: list[Any] | None = Field(None, min_length=1)


class RetryPolicy(ConfigModel):
    """How often and when a stage is tried again after a retryable error."""

    max_retries: int = Field(3, ge=0, le=100)
    backoff: float = Field(1.0, gt=0, description="Seconds before the first retry; doubles.")
    backoff_max: float = Field(60.0, gt=0)
    max_deliveries: int = Field(
        10, ge=1, description="Deliveries (crashes included) before the job fails as poison."
    )


class DiTCacheConfig(ConfigModel):
    """Cache acceleration of a DiT (diffusers' cache hooks); off by default."""

    method: Literal["none", "first_block"] = "none"
    threshold: float = Field(0.08, gt=0, description="FirstBlockCache residual threshold.")


class DiTConfig(ConfigModel):
    """What a DiT stage needs beyond :class:`OmniStageConfig`."""

    null_condition: Literal["none", "zeros"] = Field(
        "none",
        description="Negative prompt embeds for classifier-free guidance when no stage sends any: "
        "'zeros' is a single all-zero row, as tiny-omni was trained.",
    )
    cache: DiTCacheConfig = DiTCacheConfig()


class OmniStageConfig(ConfigModel):
    """One stage: one engine type, one model, one queue, its resources."""

    stage_id: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$", description="Name in the pipeline.")
    engine_type: EngineType
    engine: str = Field(
        "auto",
        description="Implementation: 'auto', or a name `omniq engines` lists.",
    )
    model: str = Field(
        min_length=1,
        description="Folder, hub name, or 'builtin:NAME' for a model shipped inside omniq.",
    )
    subfolder: str | None = Field(None, description="Part of the model to load, as in diffusers.")
    input_modalities: list[Modality] = Field(default_factory=list)
    output_modalities: list[Modality] = Field(default_factory=list)
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="Passed on to the engine by the engine's own names."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    devices: list[str] = Field(
        default_factory=list,
        description="Default devices of a worker of this stage; --devices overrides. "
        "Empty: one GPU if there is one, else the CPU.",
    )
    max_in_flight: int = Field(1, ge=1, le=4096, description="Admission window of the engine.")
    time_limit: float | None = Field(None, gt=0, description="Seconds one run may take.")
    defaults: dict[str, Any] = Field(default_factory=dict, description="Parameter defaults.")
    limits: dict[str, Limit] = Field(default_factory=dict, description="Parameter bounds.")
    retry: RetryPolicy = RetryPolicy()
    dit: DiTConfig | None = None

    @field_validator("defaults", "limits")
    @classmethod
    def _known_parameters(cls, value: dict[str, Any], info: Any) -> dict[str, Any]:
        engine_type = info.data.get("engine_type")
        if engine_type is None:  # already reported
            return value
        allowed = PARAMS[engine_type].model_fields
        if unknown := sorted(set(value) - set(allowed)):
            raise ValueError(
                f"unknown parameter {unknown[0]!r} of a {engine_type} stage; "
                f"allowed: {', '.join(allowed)}"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> OmniStageConfig:
        if self.dit is not None and self.engine_type is not EngineType.DIT:
            raise ValueError(f"'dit' belongs to DiT stages, not to a {self.engine_type} stage")
        PARAMS[self.engine_type].model_validate(self.defaults)
        return self

    @property
    def model_path(self) -> str:
        """``model`` with ``builtin:`` resolved to the installed folder; else unchanged."""
        if not self.model.startswith(BUILTIN):
            return self.model
        name = self.model.removeprefix(BUILTIN)
        return str(Path(__file__).resolve().parent.parent / "models" / name)

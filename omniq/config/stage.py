"""Configuration of one stage: its engine type, model, devices, admission window and limits."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from omniq.config.params import StageParams, parameter_model

BUILTIN = "builtin:"
MODELS_DIR = Path(__file__).resolve().parent.parent / "models"


class ConfigModel(BaseModel):
    """Base of all configuration models: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineType(StrEnum):
    """What a stage computes."""

    AR = "AR"
    DIT = "DiT"
    DECODE = "decode"
    ENCODE = "encode"
    TALK = "talk"
    VOCODE = "vocode"


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

    def fault(self, value: Any) -> str | None:
        """What is wrong with a value, if it is; types are the parameter models' business."""
        if self.choices is not None and value not in self.choices:
            return f"must be one of {', '.join(map(str, self.choices))}; got {value!r}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if self.min is not None and value < self.min:
            return f"must be at least {self.min:g}; got {value!r}"
        if self.max is not None and value > self.max:
            return f"must be at most {self.max:g}; got {value!r}"
        if self.multiple_of is not None and value % self.multiple_of:
            return f"must be a multiple of {self.multiple_of}; got {value!r}"
        return None


class RetryPolicy(ConfigModel):
    """How often and when a stage is tried again after a retryable error."""

    max_retries: int = Field(3, ge=0, le=100)
    backoff: float = Field(1.0, gt=0, description="Seconds before the first retry; doubles.")
    backoff_max: float = Field(60.0, gt=0)
    max_deliveries: int = Field(
        10, ge=1, description="Deliveries (crashes included) before the job fails as poison."
    )


class DiTCacheConfig(ConfigModel):
    """Cache acceleration of a DiT (diffusers' cache hooks, or cache-dit); off by default.

    A ``preset`` sets what is not given: ``balanced`` is first_block at 0.1, ``fast`` at 0.2.
    """

    preset: Literal["balanced", "fast"] | None = None
    method: Literal["none", "first_block", "taylorseer", "magcache", "cache_dit"] = "none"
    threshold: float = Field(
        0.08,
        gt=0,
        description="first_block, cache_dit: residual change; magcache: accumulated error.",
    )
    interval: int = Field(4, ge=2, description="taylorseer: steps from one computed to the next.")
    warmup_steps: int = Field(
        3, ge=2, description="taylorseer, cache_dit: first steps, all computed."
    )
    first_blocks: int = Field(
        8, ge=1, description="cache_dit: blocks that every step computes; their change decides."
    )
    order: int = Field(1, ge=0, le=4, description="taylorseer: order of the expansion.")
    mag_ratios: list[float] = Field(
        default_factory=list, description="magcache: the model's calibrated ratios."
    )
    num_inference_steps: int = Field(
        28, ge=1, description="magcache: steps of the requests that use it; others compute all."
    )
    max_bytes: int = Field(2 << 30, ge=1, description="State of all requests; then eviction.")
    max_requests: int = Field(64, ge=1, description="Requests with state; then eviction.")
    eviction: Literal["lru", "fifo"] = "lru"

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("preset") is None:
            return given
        presets = {"balanced": 0.1, "fast": 0.2}
        threshold = presets.get(given["preset"])
        return {"method": "first_block", "threshold": threshold, **given} if threshold else given

    @model_validator(mode="after")
    def _calibrated(self) -> DiTCacheConfig:
        if self.method == "magcache" and not self.mag_ratios:
            raise ValueError("method 'magcache' needs the model's mag_ratios")
        return self


class DiTBatchingConfig(ConfigModel):
    """Step-level continuous batching of a DiT stage."""

    max_rows: int = Field(
        8, ge=1, description="Most samples in one forward; guidance takes two each."
    )
    when: Literal["pays", "always"] = Field(
        "pays", description="'pays' batches as far as measured times say it saves any."
    )
    scheduler: str = Field(
        "fair", description="'fair', or an entry point in the group omniq.dit_schedulers."
    )


class DiTConfig(ConfigModel):
    """What a DiT stage needs beyond :class:`OmniStageConfig`."""

    null_condition: Literal["none", "zeros"] = Field(
        "none",
        description="Negative prompt embeds for classifier-free guidance when no stage sends any: "
        "'zeros' are all-zero embeds, as tiny-omni was trained.",
    )
    batching: DiTBatchingConfig = DiTBatchingConfig()
    cache: DiTCacheConfig = DiTCacheConfig()
    loras: dict[str, str] = Field(
        default_factory=dict, description="LoRA files or folders that requests may name."
    )
    preview_every: int = Field(
        0,
        ge=0,
        description="Steps between previews where a request does not say; 0: none. Needs the "
        "model's VAE at start.",
    )


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
    max_waiting: int | None = Field(
        None,
        ge=1,
        description="Messages in its queue at which no more jobs are accepted; default "
        "OMNIQ_MAX_WAITING.",
    )
    time_limit: float | None = Field(
        None, gt=0, description="Seconds one run may take; then its request is cancelled and fails."
    )
    stop_limit: float = Field(
        30.0,
        gt=0,
        description="Seconds an engine may take to stop a request that was cancelled or is late. "
        "Then it is stuck: its worker ends, and what ran there is delivered again.",
    )
    more_parameters: list[str] = Field(
        default_factory=list,
        description="Parameters of other engine types that this stage's engine takes too.",
    )
    shared_parameters: list[str] | None = Field(
        None,
        description="Of a request's flat parameters only these reach the stage; others are given "
        "under its id. Default: all that it knows.",
    )
    defaults: dict[str, Any] = Field(default_factory=dict, description="Parameter defaults.")
    limits: dict[str, Limit] = Field(default_factory=dict, description="Parameter bounds.")
    retry: RetryPolicy = RetryPolicy()
    dit: DiTConfig | None = None

    @field_validator("model")
    @classmethod
    def _shipped(cls, value: str) -> str:
        name = value.removeprefix(BUILTIN)
        if name != value and not (shipped := MODELS_DIR / name).is_dir():
            names = sorted(p.name for p in shipped.parent.iterdir() if p.is_dir())
            allowed = ", ".join(BUILTIN + n for n in names if not n.startswith("_"))
            raise ValueError(f"omniq ships no such model; allowed: {allowed}")
        return value

    @field_validator("more_parameters")
    @classmethod
    def _parameters_of_some_type(cls, value: list[str], info: Any) -> list[str]:
        if (engine_type := info.data.get("engine_type")) is not None:
            parameter_model(engine_type, value)
        return value

    @field_validator("defaults", "limits", "shared_parameters")
    @classmethod
    def _known_parameters(cls, value: Any, info: Any) -> Any:
        engine_type, more = (info.data.get(name) for name in ("engine_type", "more_parameters"))
        if engine_type is None or more is None or value is None:  # already reported, or not given
            return value
        allowed = parameter_model(engine_type, more).model_fields
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
        self.parameter_model.model_validate(self.defaults)
        for name, limit in self.limits.items():
            if name in self.defaults and (fault := limit.fault(self.defaults[name])) is not None:
                raise ValueError(f"default of {name!r} {fault}")
        return self

    @property
    def parameter_model(self) -> type[StageParams]:
        """What a request may say to this stage, before its ``limits``."""
        return parameter_model(self.engine_type, self.more_parameters)

    @property
    def model_path(self) -> str:
        """``model`` with ``builtin:`` resolved to the installed folder; else unchanged."""
        if not self.model.startswith(BUILTIN):
            return self.model
        return str(MODELS_DIR / self.model.removeprefix(BUILTIN))

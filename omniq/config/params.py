"""Request parameters of each engine type, by the field's standard names.

A job's ``parameters`` are one flat object; every stage takes the names it knows, so that ``seed``
reaches the AR and the DiT stage alike. Bounds here are what the engine type can ever accept; a
stage's configuration narrows them (:class:`omniq.config.stage.Limit`) and sets defaults.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class StageParams(BaseModel):
    """Base of the per-stage parameter models."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ARParams(StageParams):
    """Sampling parameters of an autoregressive stage (vLLM ``SamplingParams`` names)."""

    max_tokens: int | None = Field(None, ge=1, le=1_000_000, description="New tokens at most.")
    temperature: float | None = Field(
        None, ge=0.0, le=100.0, description="0 is greedy decoding.", allow_inf_nan=False
    )
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="-1 or 0 keeps all tokens.")
    # Below a hundredth a token's score can overflow.
    repetition_penalty: float | None = Field(None, ge=0.01, le=10.0, allow_inf_nan=False)
    stop: list[str] | None = Field(None, max_length=16)
    seed: Seed | None = Field(None, description="Same seed, same output.")


class DiTParams(StageParams):
    """Parameters of a denoising stage (diffusers pipeline argument names)."""

    height: int | None = Field(None, ge=1, le=16_384, description="Pixels.")
    width: int | None = Field(None, ge=1, le=16_384, description="Pixels.")
    num_inference_steps: int | None = Field(None, ge=1, le=1_000)
    guidance_scale: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    seed: Seed | None = Field(None, description="Same seed, same initial noise.")


class DecodeParams(StageParams):
    """Parameters of a decoder stage: none yet."""


PARAMS: dict[str, type[StageParams]] = {
    "AR": ARParams,
    "DiT": DiTParams,
    "decode": DecodeParams,
}

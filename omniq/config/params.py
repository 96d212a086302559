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


class EncodeParams(StageParams):
    """Parameters of a stage that encodes prompts for a DiT (diffusers argument names)."""

    negative_prompt: str | None = Field(None, max_length=8_000)
    guidance_scale: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    true_cfg_scale: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    max_sequence_length: int | None = Field(None, ge=1, le=8_192, description="Tokens.")


class DiTParams(StageParams):
    """Parameters of a denoising stage (diffusers pipeline argument names).

    What the stage's pipeline does not take is refused by its engine.
    """

    height: int | None = Field(None, ge=1, le=16_384, description="Pixels.")
    width: int | None = Field(None, ge=1, le=16_384, description="Pixels.")
    num_frames: int | None = Field(None, ge=1, le=4_096, description="Frames of a video.")
    num_inference_steps: int | None = Field(None, ge=1, le=1_000)
    sigmas: list[Annotated[float, Field(gt=0.0, le=1_000.0)]] | None = Field(
        None, min_length=1, max_length=1_000, description="Noise levels instead of the default."
    )
    guidance_scale: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    true_cfg_scale: float | None = Field(
        None, ge=0.0, le=100.0, allow_inf_nan=False,
        description="Classifier-free guidance of a guidance-distilled model.",
    )  # fmt: skip
    strength: float | None = Field(
        None, gt=0.0, le=1.0, description="How much of an input picture is made anew."
    )
    num_images_per_prompt: int | None = Field(
        None, ge=1, le=64, description="Image i uses seed + i."
    )
    scheduler: str | None = Field(None, description="euler, heun, unipc or dpmpp.")
    lora: dict[str, Annotated[float, Field(ge=-10.0, le=10.0)]] | None = Field(
        None, max_length=8, description="Weights of LoRAs that the stage has, by name."
    )
    use_cache: bool | None = Field(None, description="False computes every step in full.")
    seed: Seed | None = Field(None, description="Same seed, same initial noise.")


class DecodeParams(StageParams):
    """Parameters of a decoder stage: none yet."""


PARAMS: dict[str, type[StageParams]] = {
    "AR": ARParams,
    "encode": EncodeParams,
    "DiT": DiTParams,
    "decode": DecodeParams,
}

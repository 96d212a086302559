"""Stable Diffusion 3: pooled embeds, guidance as doubled rows of one call."""

from __future__ import annotations

from typing import Any

import torch

from omniq.engines.diffusion.batch import CallForm
from omniq.engines.families.base import Family


class StableDiffusion3(Family):
    """``StableDiffusion3Pipeline`` (diffusers ``pipeline_stable_diffusion_3*.py``).

    Its attention takes no mask, so only requests with equally many text tokens share a forward;
    the encoders pad to a fixed length anyway.
    """

    condition = ("prompt_embeds", "pooled_prompt_embeds")
    # Its last block gives no text, which the other hooks' residuals need.
    caches = ("taylorseer",)
    form = CallForm(
        latents="hidden_states",
        rows=("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections"),
    )

    def encode_options(self) -> dict[str, Any]:
        """The other encoders get the same prompt."""
        return {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}

    def encoded(self, values: tuple[Any, ...]) -> dict[str, torch.Tensor]:
        """Of (embeds, negative, pooled, negative pooled) the positive half."""
        return {"prompt_embeds": values[0][0], "pooled_prompt_embeds": values[2][0]}

    def latent_form(
        self, pipeline: Any, size: tuple[int, int], frames: int
    ) -> tuple[int, ...] | None:
        """As the transformer takes them."""
        factor = pipeline.vae_scale_factor
        return int(pipeline.transformer.config.in_channels), size[0] // factor, size[1] // factor

    def size_multiple(self, pipeline: Any) -> int:
        """Whole patches."""
        return int(pipeline.vae_scale_factor) * int(pipeline.patch_size)

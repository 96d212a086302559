"""Wan: video, latents with frames, CFG by a second call, one or two transformers."""

from __future__ import annotations

from typing import Any

import torch

from omniq.engines.diffusion.batch import CallForm
from omniq.engines.families.base import Family, statistics


class Wan(Family):
    """``WanPipeline`` and its variants (diffusers ``pipeline_wan*.py``).

    Cross-attention takes no mask, so only requests with equally many text tokens share a forward;
    the encoder pads to a fixed length anyway.
    """

    form = CallForm(
        latents="hidden_states",
        rows=("hidden_states", "timestep", "encoder_hidden_states"),
        condition=("encoder_hidden_states",),
    )
    paired = True
    attention_modules = (r"blocks\.\d+\.attn[12]",)

    def size_multiple(self, pipeline: Any) -> int:
        """Whole patches of the transformer."""
        patch = pipeline.transformer.config.patch_size
        return int(pipeline.vae_scale_factor_spatial) * int(patch[1])

    def latent_form(
        self, pipeline: Any, size: tuple[int, int], frames: int
    ) -> tuple[int, ...] | None:
        """With frames behind the channels."""
        factor = pipeline.vae_scale_factor_spatial
        times = (frames - 1) // pipeline.vae_scale_factor_temporal + 1
        channels = pipeline.transformer.config.in_channels
        return int(channels), times, size[0] // factor, size[1] // factor

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Pixels [n, 3, F, H, W]."""
        sample: torch.Tensor = vae.decode(
            statistics(vae, latents.to(vae.dtype)), return_dict=False
        )[0]
        return sample

"""FLUX.1: packed latents, pooled CLIP embeds, distilled guidance, optional true CFG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from omniq.engines.diffusion.batch import CallForm
from omniq.engines.families.base import Family


class Flux(Family):
    """``FluxPipeline`` and its variants (diffusers ``pipeline_flux*.py``).

    ``guidance_scale`` is an input of the distilled model and costs nothing; ``true_cfg_scale``
    above 1 with negative embeds is classifier-free guidance by a second call.
    """

    condition = ("prompt_embeds", "pooled_prompt_embeds")
    form = CallForm(
        latents="hidden_states",
        rows=("hidden_states", "timestep", "guidance", "pooled_projections"),
        text=("encoder_hidden_states",),
        by_text=("txt_ids",),
        condition=("encoder_hidden_states", "pooled_projections", "txt_ids"),
    )
    paired = True
    empty_negative = None
    cfg_argument = "true_cfg_scale"

    def guidance(self, params: Mapping[str, Any], config: Any) -> dict[str, float]:
        """Both scales under their own names."""
        names = ("guidance_scale", "true_cfg_scale")
        return {n: float(params[n]) for n in names if params.get(n) is not None}

    def encode_options(self) -> dict[str, Any]:
        """The second prompt is the first."""
        return {"prompt_2": None}

    def encoded(self, values: tuple[Any, ...]) -> dict[str, torch.Tensor]:
        """Embeds and pooled embeds; the text ids are zeros and made anew."""
        return {"prompt_embeds": values[0][0], "pooled_prompt_embeds": values[1][0]}

    def mask_text(self, kwargs: dict[str, Any], mask: torch.Tensor) -> None:
        """Text comes before the picture in the joint attention; its position ids are all zero."""
        hidden = kwargs["hidden_states"]
        picture = mask.new_ones(mask.shape[0], hidden.shape[1])
        joint = torch.cat([mask, picture], dim=1)[:, None, None, :]
        given = kwargs.get("joint_attention_kwargs") or {}
        kwargs["joint_attention_kwargs"] = {**given, "attention_mask": joint}
        kwargs["txt_ids"] = kwargs["txt_ids"].new_zeros(mask.shape[1], 3)

    def latents(self, pipeline: Any, output: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Unpack 2x2 patches."""
        unpacked: torch.Tensor = pipeline._unpack_latents(output, *size, pipeline.vae_scale_factor)
        return unpacked

    def latent_form(
        self, pipeline: Any, size: tuple[int, int], frames: int
    ) -> tuple[int, ...] | None:
        """Four of the transformer's channels are one before packing."""
        factor, channels = pipeline.vae_scale_factor, pipeline.transformer.config.in_channels // 4
        return int(channels), size[0] // factor, size[1] // factor

    def to_pipeline(self, pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
        """Pack 2x2 patches."""
        packed: torch.Tensor = pipeline._pack_latents(latents, *latents.shape)
        return packed

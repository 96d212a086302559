"""The family interface and its generic form: embeds as one batched tensor, CFG above 1."""

from __future__ import annotations

from typing import Any

import torch

# Names that diffusers' transformer configs use for the width of the text condition.
_EMBED_DIMS = ("cap_feat_dim", "joint_attention_dim", "cross_attention_dim", "caption_channels")


class Family:
    """How one model family takes its text condition and gives its latents.

    This class fits pipelines whose ``__call__`` takes ``prompt_embeds`` [1, tokens, dim] and whose
    ``output_type="latent"`` gives [1, C, h, w]; a family that differs overrides what differs.
    """

    def embed_dim(self, config: Any) -> int | None:
        """Width of the prompt embeds by the transformer's config; None if it does not say."""
        for name in _EMBED_DIMS:
            if isinstance(value := config.get(name), int):
                return value
        return None

    def needs_negative(self, guidance_scale: float) -> bool:
        """Whether the pipeline evaluates the negative condition at this guidance."""
        return guidance_scale > 1.0

    def conditions(self, prompt: torch.Tensor, negative: torch.Tensor | None) -> dict[str, Any]:
        """Pipeline arguments for embeds [tokens, dim] already in the model's dtype and device."""
        arguments: dict[str, Any] = {"prompt_embeds": prompt.unsqueeze(0)}
        if negative is not None:
            arguments["negative_prompt_embeds"] = negative.unsqueeze(0)
        return arguments

    def latents(self, pipeline: Any, output: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        """Latents [1, C, h, w] from what the pipeline returned for ``output_type="latent"``."""
        return output

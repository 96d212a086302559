"""Z-Image: ragged condition lists, classifier-free guidance at any scale above 0."""

from __future__ import annotations

from typing import Any

import torch

from omniq.engines.families.base import Family


class ZImage(Family):
    """``ZImagePipeline`` (diffusers ``pipeline_z_image.py``): one [tokens, dim] per picture."""

    def needs_negative(self, guidance_scale: float) -> bool:
        """CFG runs for any positive scale, ``pos + scale * (pos - neg)``."""
        return guidance_scale > 0.0

    def conditions(self, prompt: torch.Tensor, negative: torch.Tensor | None) -> dict[str, Any]:
        """Lists, since prompts of one batch need not have the same length."""
        return {
            "prompt_embeds": [prompt],
            "negative_prompt_embeds": None if negative is None else [negative],
        }

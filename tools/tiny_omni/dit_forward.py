"""A batched forward of `ZImageTransformer2DModel` for equal picture sizes and short captions.

The stock forward takes lists and loops over samples in Python. For captions of up to 32 rows it
computes exactly this: image tokens and caption rows are each padded to 32 with learnt pad tokens
(which are attended to), refined apart, and then run through the main layers together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiny_omni.dataset import MAX_ROWS

PATCH = 2
TOKEN_MULTIPLE = 32


class BatchedForward:
    """Callable (latents, time, rows, lengths) -> velocity, for one latent height and width."""

    def __init__(self, model: Any, height: int, width: int, device: str) -> None:
        self._model = model
        self._grid = (height // PATCH, width // PATCH)
        count = self._grid[0] * self._grid[1]
        self._padding = -count % TOKEN_MULTIPLE
        axes = torch.tensor([MAX_ROWS + 1]), *(torch.arange(n) for n in self._grid)
        image = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 2)
        image = torch.cat([image, torch.zeros(self._padding, 3, dtype=image.dtype)])
        caption = torch.zeros(MAX_ROWS, 3, dtype=image.dtype)
        caption[:, 0] = torch.arange(1, MAX_ROWS + 1)
        self._image_rope = model.rope_embedder(image.int().to(device))[None]
        self._caption_rope = model.rope_embedder(caption.int().to(device))[None]
        self._row = torch.arange(MAX_ROWS, device=device)[None]

    def _tokens(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, tokens, 4 * C]."""
        (h, w), channels = self._grid, x.shape[1]
        x = x.view(-1, channels, h, PATCH, w, PATCH).permute(0, 2, 4, 3, 5, 1)
        return x.reshape(len(x), h * w, PATCH * PATCH * channels)

    def _latents(self, tokens: Tensor) -> Tensor:
        """[B, tokens, 4 * C] -> [B, C, H, W]."""
        h, w = self._grid
        x = tokens.reshape(len(tokens), h, w, PATCH, PATCH, -1).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(len(tokens), -1, h * PATCH, w * PATCH)

    def __call__(self, latents: Tensor, time: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
        """Velocity [B, C, H, W] towards the picture.

        latents [B, C, H, W]; time [B] in 0 (noise) .. 1 (picture); rows [B, MAX_ROWS, hidden],
        of which the first lengths [B] are real.
        """
        model, size = self._model, len(latents)
        condition = model.t_embedder(time * model.t_scale).type_as(latents)
        image = model.all_x_embedder["2-1"](self._tokens(latents))
        image_rope = self._image_rope.expand(size, -1, -1)
        if self._padding:
            pad = model.x_pad_token.to(image.dtype).expand(size, self._padding, -1)
            image = torch.cat([image, pad], 1)
        for layer in model.noise_refiner:
            image = layer(image, None, image_rope, condition)
        caption = model.cap_embedder(rows)
        real = (self._row < lengths[:, None])[..., None]
        caption = torch.where(real, caption, model.cap_pad_token[None].to(caption.dtype))
        caption_rope = self._caption_rope.expand(size, -1, -1)
        for layer in model.context_refiner:
            caption = layer(caption, None, caption_rope)
        joint = torch.cat([image, caption], 1)
        joint_rope = torch.cat([image_rope, caption_rope], 1)
        for layer in model.layers:
            joint = layer(joint, None, joint_rope, condition)
        out = model.all_final_layer["2-1"](joint, c=condition)
        return self._latents(out[:, : self._grid[0] * self._grid[1]])

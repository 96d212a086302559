"""Cheap previews: latents to small pictures by one matrix, fitted to the model's own VAE."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch

PICTURES = 48
#: Positions along each side of the latents that are fitted to.
POSITIONS = 8
#: Longest side of a preview in pixels.
LARGEST = 256
#: Previews of one request; they come less often where there would be more.
MOST = 64


class Previewer:
    """RGB from latents by least squares, fitted on smooth coloured pictures.

    Args:
        vae: the model's autoencoder; needed only here.
        device: where it works.
    """

    def __init__(self, vae: Any, device: str) -> None:
        latents, colours = _samples(vae, device)
        ones = torch.ones(len(latents), 1)
        solution = torch.linalg.lstsq(torch.cat([latents, ones], dim=1), colours).solution
        self._matrix, self._offset = solution[:-1], solution[-1]
        residual = colours - latents @ self._matrix - self._offset
        #: Share of the colours' variance that the matrix explains, 0 to 1.
        self.fit = 1.0 - float(residual.var() / colours.var())

    def picture(self, latents: torch.Tensor) -> torch.Tensor:
        """uint8 [h, w, 3] from latents [1, C, h, w] or [1, C, f, h, w] (its middle frame)."""
        one = latents[0].detach().to("cpu", torch.float32)
        if one.ndim == 4:
            one = one[:, one.shape[1] // 2]
        rgb = one.permute(1, 2, 0) @ self._matrix + self._offset
        return ((rgb.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)

    def message(self, latents: torch.Tensor, step: int) -> dict[str, Any]:
        """The preview after ``step`` as JSON: a WebP data URL, width, height."""
        from PIL import Image  # noqa: PLC0415 - only previews need it

        picture = Image.fromarray(self.picture(latents).numpy())
        picture.thumbnail((LARGEST, LARGEST))
        file = io.BytesIO()
        picture.save(file, "webp", quality=80)
        return {
            "step": step,
            "content_type": "image/webp",
            "width": picture.width,
            "height": picture.height,
            "url": "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode("ascii"),
        }


@torch.no_grad()
def _samples(vae: Any, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents as pipelines leave them [m, C], and the colours in [-1, 1] [m, 3] they stand for."""
    config = vae.config
    video = "latent_channels" not in config
    generator = torch.Generator("cpu").manual_seed(0)
    coarse = torch.rand(PICTURES, 3, 4, 4, generator=generator) * 2 - 1
    size = (POSITIONS * _factor(config),) * 2
    pictures = torch.nn.functional.interpolate(coarse, size, mode="bicubic").clamp(-1, 1)
    rows, colours = [], []
    for picture in pictures.split(1):
        given = picture.to(device, vae.dtype)
        encoded = vae.encode(given.unsqueeze(2) if video else given).latent_dist.mode()
        encoded = _scaled(config, encoded.float().cpu())
        flat = encoded[:, :, 0] if video else encoded
        small = torch.nn.functional.interpolate(picture, flat.shape[-2:], mode="area")
        rows.append(flat[0].flatten(1).T)
        colours.append(small[0].flatten(1).T)
    return torch.cat(rows), torch.cat(colours)


def _factor(config: Any) -> int:
    """Pixels along each side of a latent position."""
    for name in ("scale_factor_spatial", "spatial_compression_ratio"):
        if isinstance(factor := config.get(name), int):
            return factor
    if "temperal_downsample" in config:
        return int(2 ** len(config.temperal_downsample))
    return int(2 ** (len(config.block_out_channels) - 1))


def _scaled(config: Any, latents: torch.Tensor) -> torch.Tensor:
    if "latents_mean" in config and config.latents_mean is not None:
        shape = (1, latents.shape[1], *[1] * (latents.ndim - 2))
        mean = torch.tensor(config.latents_mean).view(shape)
        return (latents - mean) / torch.tensor(config.latents_std).view(shape)
    # FLUX.2's have no factor: its pipeline's end has scaled them back already.
    return (latents - (config.get("shift_factor") or 0.0)) * config.get("scaling_factor", 1.0)

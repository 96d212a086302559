"""FLUX.2: layers of a language model as the condition, latents normalised by the VAE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from omniq.engines.diffusion.batch import CallForm
from omniq.engines.families.base import Family

#: Pixels of a reference picture above which the pipeline scales it down.
PICTURE_AREA = 1024 * 1024


class Flux2(Family):
    """``Flux2Pipeline`` (diffusers ``pipeline_flux2.py``).

    Guidance is an input of the distilled model, there is no negative prompt. The encoder pads to
    a fixed length and the transformer takes no mask, so equally long texts share a forward. The
    pipeline's end scales latents back by statistics in the VAE, whatever its output type.
    """

    form = CallForm(
        latents="hidden_states",
        rows=("hidden_states", "timestep", "guidance", "encoder_hidden_states"),
        condition=("encoder_hidden_states", "txt_ids"),
    )
    paired = True
    empty_negative: ClassVar[str | None] = None
    most_pictures = 16
    pictures_optional = True
    denoises_with_vae = True

    def needs_negative(self, arguments: Mapping[str, Any], default: float) -> bool:
        """Never."""
        return False

    def encode_options(self) -> dict[str, Any]:
        """None."""
        return {}

    def picture_size(self, pipeline: Any, arguments: Mapping[str, Any]) -> tuple[int, int] | None:
        """Where none is asked for, that of the first picture, at most a megapixel."""
        if (given := arguments.get("image")) is None:
            return None
        image = given[0] if isinstance(given, list) else given
        if image.width * image.height > PICTURE_AREA:
            image = pipeline.image_processor._resize_to_target_area(image, PICTURE_AREA)
        multiple = self.size_multiple(pipeline)
        height, width = (n // multiple * multiple for n in (image.height, image.width))
        return arguments.get("height", height), arguments.get("width", width)

    def latent_form(
        self, pipeline: Any, size: tuple[int, int], frames: int
    ) -> tuple[int, ...] | None:
        """Four of the transformer's channels are one before packing."""
        factor, channels = pipeline.vae_scale_factor, pipeline.transformer.config.in_channels // 4
        return int(channels), size[0] // factor, size[1] // factor

    def latents(self, pipeline: Any, output: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """As they are at the pipeline's end; within its steps they are packed and normalised."""
        if output.ndim == 4:
            return output
        multiple = self.size_multiple(pipeline)
        rows, columns = size[0] // multiple, size[1] // multiple
        grid = output.transpose(1, 2).unflatten(2, (rows, columns))
        mean, deviation = _statistics(pipeline.vae, grid)
        plain: torch.Tensor = pipeline._unpatchify_latents(grid * deviation + mean)
        return plain

    def to_pipeline(self, pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
        """Patches of 2x2, normalised; the pipeline packs them."""
        grid = pipeline._patchify_latents(latents)
        mean, deviation = _statistics(pipeline.vae, grid)
        normalised: torch.Tensor = (grid - mean) / deviation
        return normalised

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Pixels [n, 3, H, W] of latents that are scaled back already."""
        sample: torch.Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return sample


class Flux2Klein(Flux2):
    """``Flux2KleinPipeline``: classifier-free guidance, unless the model is step-distilled."""

    empty_negative = ""

    def needs_negative(self, arguments: Mapping[str, Any], default: float) -> bool:
        """A step-distilled model ignores the scale."""
        if self.index.get("is_distilled"):
            return False
        return Family.needs_negative(self, arguments, default)


def _statistics(vae: Any, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation a channel, [1, C, 1, 1], as the pipeline computes them."""
    mean = vae.bn.running_mean.view(1, -1, 1, 1).to(like)
    deviation = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    return mean, deviation.to(like)

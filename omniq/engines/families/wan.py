"""Wan: video, latents with frames, CFG by a second call, one or two transformers."""

from __future__ import annotations

from collections.abc import Mapping
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
        rows=(
            *("hidden_states", "timestep", "encoder_hidden_states"),
            "encoder_hidden_states_image",
        ),
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
        channels = pipeline.transformer.config.out_channels
        return int(channels), times, size[0] // factor, size[1] // factor

    def image_pipeline(self) -> str | None:
        """Wan 2.2's 5B model takes a first frame too, or none."""
        return "WanImageToVideoPipeline" if self.index.get("expand_timesteps") else None

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Pixels [n, 3, F, H, W]."""
        sample: torch.Tensor = vae.decode(
            statistics(vae, latents.to(vae.dtype)), return_dict=False
        )[0]
        return sample


#: Text tokens that the transformer of Wan 2.1 I2V expects; what is before them is the picture.
TEXT_TOKENS = 512
#: Patches of CLIP's picture of 224 pixels, and its class token.
IMAGE_TOKENS = 257


class WanImageToVideo(Wan):
    """``WanImageToVideoPipeline``: the first frame is given.

    The first frame's latents are channels beside the noise. Wan 2.1 also shows its transformer the
    picture as CLIP sees it (``image_embeds`` [257, 1280]), which the encode stage makes; Wan 2.2
    has no such encoder.
    """

    beside = ("image_embeds",)
    packages = ("ftfy",)

    def needed(self, config: Any) -> tuple[str, ...]:
        """The picture's embeds where the transformer reads them."""
        seen = () if config.get("image_dim") is None else self.beside
        return (*super().needed(config), *seen)

    def example(self, config: Any) -> dict[str, torch.Tensor]:
        """As long as the transformer takes the text for."""
        made = {"prompt_embeds": torch.zeros(TEXT_TOKENS, config.text_dim)}
        if config.get("image_dim") is not None:
            made["image_embeds"] = torch.zeros(IMAGE_TOKENS, config.image_dim)
        return made

    def sees_pictures(self, pipeline: Any) -> bool:
        """Where the model has an image encoder."""
        return getattr(pipeline, "image_encoder", None) is not None

    def encode(
        self, pipeline: Any, prompt: str, images: list[Any], options: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """The prompt, and beside it the picture."""
        made = super().encode(pipeline, prompt, images, options)
        if images:
            made["image_embeds"] = pipeline.encode_image(images[0], options.get("device"))[0]
        return made

    def prepared(self, pipeline: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """``__call__`` takes the picture or its embeds, not both, and makes the embeds itself."""
        given = dict(arguments)
        embeds = given.pop("image_embeds", None)
        pipeline.encode_image = lambda *_: embeds
        return given

"""Qwen-Image and Qwen-Image-Edit: packed latents, masked text, CFG by a second call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from omniq.engines.diffusion.batch import CallForm
from omniq.engines.families.base import Family, statistics

#: Area of the picture that the vision encoder of Qwen-Image-Edit sees, in pixels.
EDIT_AREA = 1024 * 1024


class QwenImage(Family):
    """``QwenImagePipeline`` and its variants (diffusers ``pipeline_qwenimage*.py``).

    The request's ``guidance_scale`` is the pipeline's ``true_cfg_scale``, unless the model is
    guidance-distilled. Guidance needs a negative prompt, and there is none by default.
    """

    condition = ("prompt_embeds", "prompt_embeds_mask")
    form = CallForm(
        latents="hidden_states",
        rows=("hidden_states", "timestep", "guidance"),
        text=("encoder_hidden_states",),
        text_mask="encoder_hidden_states_mask",
        repeated=("img_shapes",),
        condition=("encoder_hidden_states", "encoder_hidden_states_mask"),
    )
    paired = True
    empty_negative = None
    cfg_argument = "true_cfg_scale"

    def guidance(self, params: Mapping[str, Any], config: Any) -> dict[str, float]:
        """``guidance_scale`` goes to a distilled model as it is, else it is the CFG scale."""
        given = {
            n: float(params[n])
            for n in ("guidance_scale", "true_cfg_scale")
            if params.get(n) is not None
        }
        if not config.get("guidance_embeds") and "guidance_scale" in given:
            scale = given.pop("guidance_scale")
            given.setdefault("true_cfg_scale", scale)
        return given

    def arguments(self, condition: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """With masks of ones where a condition has none: the pipeline warns without."""
        masks = {
            f"{name}_mask": tensor.new_ones(len(tensor), dtype=torch.long)
            for name, tensor in condition.items()
            if name.endswith("prompt_embeds")
        }
        return super().arguments({**masks, **condition})

    def encode_options(self) -> dict[str, Any]:
        """None."""
        return {}

    def encoded(self, values: tuple[Any, ...]) -> dict[str, torch.Tensor]:
        """Embeds, and their mask where not every token counts."""
        embeds, mask = values
        made = {"prompt_embeds": embeds[0]}
        return made if mask is None else {**made, "prompt_embeds_mask": mask[0]}

    def mask_text(self, kwargs: dict[str, Any], mask: torch.Tensor) -> None:
        """The model takes the mask itself; text positions do not depend on the padding."""
        kwargs["encoder_hidden_states_mask"] = mask

    def latents(self, pipeline: Any, output: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Unpack 2x2 patches; one frame."""
        unpacked: torch.Tensor = pipeline._unpack_latents(output, *size, pipeline.vae_scale_factor)
        return unpacked

    def to_pipeline(self, pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
        """Pack 2x2 patches of the one frame."""
        n, channels, _, height, width = latents.shape
        packed: torch.Tensor = pipeline._pack_latents(latents, n, channels, height, width)
        return packed

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Pixels [n, 3, H, W] of the only frame."""
        sample = vae.decode(statistics(vae, latents.to(vae.dtype)), return_dict=False)[0]
        pixels: torch.Tensor = sample[:, :, 0]
        return pixels


class QwenImageEdit(QwenImage):
    """``QwenImageEditPipeline``: the text encoder sees the picture too."""

    def encode(
        self, pipeline: Any, prompt: str, images: list[Any], options: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """With the picture resized as ``__call__`` does it."""
        from diffusers.pipelines.qwenimage import (  # noqa: PLC0415 - slow import
            pipeline_qwenimage_edit as edit,
        )

        image = images[0]
        width, height, _ = edit.calculate_dimensions(EDIT_AREA, image.width / image.height)
        image = pipeline.image_processor.resize(image, height, width)
        return self.encoded(pipeline.encode_prompt(prompt=prompt, image=image, **options))

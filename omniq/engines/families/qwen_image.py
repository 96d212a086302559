"""Qwen-Image and Qwen-Image-Edit: packed latents, masked text, CFG by a second call."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from omniq.engines.diffusion.batch import CallForm
from omniq.engines.families.base import Family, statistics

#: Area of the picture that the vision encoder of Qwen-Image-Edit sees, in pixels.
EDIT_AREA = 1024 * 1024
#: The same for Qwen-Image-Edit-Plus, each picture.
EDIT_PLUS_AREA = 384 * 384


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
    encoder_layer: ClassVar[int | None] = -1

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

    def encoder_tokens(
        self, pipeline: Any, prompt: str, most: int | None
    ) -> tuple[list[int], slice]:
        """The pipeline's template around the prompt; its own first tokens are dropped."""
        drop = pipeline.prompt_template_encode_start_idx
        ids = pipeline.tokenizer(
            pipeline.prompt_template_encode.format(prompt),
            max_length=pipeline.tokenizer_max_length + drop,
            truncation=True,
        )["input_ids"]
        return ids, slice(drop, None if most is None else drop + most)

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

    def latent_form(
        self, pipeline: Any, size: tuple[int, int], frames: int
    ) -> tuple[int, ...] | None:
        """Four of the transformer's channels are one before packing; one frame."""
        factor, channels = pipeline.vae_scale_factor, pipeline.transformer.config.in_channels // 4
        return int(channels), 1, size[0] // factor, size[1] // factor

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
    """``QwenImageEditPipeline``, also inside a mask: the text encoder sees the picture too."""

    #: The encoder sees pictures, in the pipeline's own way.
    encoder_layer = None
    #: Module of the stock pipeline, for how it scales pictures.
    module: ClassVar[str] = "pipeline_qwenimage_edit"

    def encode(
        self, pipeline: Any, prompt: str, images: list[Any], options: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """With the picture resized as ``__call__`` does it."""
        image = self._resized(pipeline, images[0], EDIT_AREA)
        return self.encoded(pipeline.encode_prompt(prompt=prompt, image=image, **options))

    def picture_size(self, pipeline: Any, arguments: Mapping[str, Any]) -> tuple[int, int] | None:
        """A megapixel of the (last) picture's shape, where no size is asked for; inside a mask
        always.
        """
        image = arguments["image"]
        last = image[-1] if isinstance(image, list) else image
        width, height = self._dimensions(EDIT_AREA, last)
        if "mask_image" in arguments:
            return height, width
        return arguments.get("height", height), arguments.get("width", width)

    def _resized(self, pipeline: Any, image: Any, area: int) -> Any:
        width, height = self._dimensions(area, image)
        return pipeline.image_processor.resize(image, height, width)

    def _dimensions(self, area: int, image: Any) -> tuple[int, int]:
        """Width and height of about ``area`` pixels in the picture's shape, as the pipeline."""
        edit = importlib.import_module(f"diffusers.pipelines.qwenimage.{self.module}")
        width, height, *_ = edit.calculate_dimensions(area, image.width / image.height)
        return int(width), int(height)


class QwenImageEditPlus(QwenImageEdit):
    """``QwenImageEditPlusPipeline``: several pictures, smaller ones for the text encoder."""

    module = "pipeline_qwenimage_edit_plus"
    most_pictures = 16

    def encode(
        self, pipeline: Any, prompt: str, images: list[Any], options: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """With all pictures, resized as ``__call__`` does it."""
        pictures = [self._resized(pipeline, image, EDIT_PLUS_AREA) for image in images]
        return self.encoded(pipeline.encode_prompt(prompt=prompt, image=pictures, **options))

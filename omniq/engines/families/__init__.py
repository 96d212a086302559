"""What differs between model families, one small file each; everything else is common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omniq.engines.families.base import Family
from omniq.engines.families.flux import Flux
from omniq.engines.families.flux2 import Flux2, Flux2Klein
from omniq.engines.families.glm_image import GlmImage
from omniq.engines.families.qwen_image import QwenImage, QwenImageEdit, QwenImageEditPlus
from omniq.engines.families.sd3 import StableDiffusion3
from omniq.engines.families.wan import Wan, WanImageToVideo
from omniq.engines.families.z_image import ZImage

# By the pipeline class that a model's model_index.json names.
FAMILIES: dict[str, type[Family]] = {
    "FluxPipeline": Flux,
    "FluxImg2ImgPipeline": Flux,
    "FluxInpaintPipeline": Flux,
    "Flux2Pipeline": Flux2,
    "Flux2KleinPipeline": Flux2Klein,
    "GlmImagePipeline": GlmImage,
    "QwenImagePipeline": QwenImage,
    "QwenImageImg2ImgPipeline": QwenImage,
    "QwenImageInpaintPipeline": QwenImage,
    "QwenImageEditPipeline": QwenImageEdit,
    "QwenImageEditInpaintPipeline": QwenImageEdit,
    "QwenImageEditPlusPipeline": QwenImageEditPlus,
    "StableDiffusion3Pipeline": StableDiffusion3,
    "StableDiffusion3Img2ImgPipeline": StableDiffusion3,
    "StableDiffusion3InpaintPipeline": StableDiffusion3,
    "WanPipeline": Wan,
    "WanImageToVideoPipeline": WanImageToVideo,
    "ZImagePipeline": ZImage,
    "ZImageImg2ImgPipeline": ZImage,
    "ZImageInpaintPipeline": ZImage,
}


def family_of(pipeline_class: str, index: Mapping[str, Any] | None = None) -> Family:
    """The family of a diffusers pipeline class; :class:`Family` itself for those without a file.

    ``index`` is the model's model_index.json.
    """
    return FAMILIES.get(pipeline_class, Family)(index)


__all__ = ["Family", "family_of"]

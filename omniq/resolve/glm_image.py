"""GLM-Image: an AR model writes the picture in tokens, a DiT draws it from them."""

from __future__ import annotations

from typing import Any, ClassVar

from omniq.resolve.base import BuildOptions, ModelFamily
from omniq.resolve.files import ModelFiles
from omniq.resolve.own_engines import own_options, placed

#: Pixels of one token of the AR model, each way.
PIXELS_PER_TOKEN = 32
LONGEST_SIDE = 2048
DEFAULT_SIDE = 1024
MOST_PICTURES = 8
IN_FLIGHT = 16
#: The AR model (9 B) and the DiT (7 B) are the large ones.
PLANS = {
    2: {"ar": "0", "encode": "0", "dit": "1", "decode": "1"},
    3: {"ar": "0", "encode": "1", "dit": "2", "decode": "1"},
}


class GlmImage(ModelFamily):
    """``GlmImagePipeline`` as four stages; its AR engine is omniq's own, on transformers.

    Inputs: ``prompt``, and ``image`` (one or several) to make the picture of; output ``image``.
    """

    name: ClassVar[str] = "GLM-Image"
    description: ClassVar[str] = "text (and pictures) to picture: AR model, then DiT"
    stages: ClassVar[tuple[str, ...]] = ("ar", "encode", "dit", "decode")

    def matches(self, files: ModelFiles) -> bool:
        """By the pipeline class."""
        return files.diffusers_class == "GlmImagePipeline"

    def build(self, files: ModelFiles, options: BuildOptions) -> dict[str, Any]:
        """Stages ``ar`` and ``encode``, of which ``dit`` takes both, and ``decode``.

        Raises:
            ConfigError: an engine other than its own, or arguments of one, are asked for.
        """
        common = {"model": files.model, **own_options(files, self.name, options, IN_FLIGHT)}
        side = {"min": PIXELS_PER_TOKEN, "max": LONGEST_SIDE, "multiple_of": PIXELS_PER_TOKEN}
        size = {"height": DEFAULT_SIDE, "width": DEFAULT_SIDE}
        limits = {"height": side, "width": side}
        stages: list[dict[str, Any]] = [
            {
                "stage_id": "ar",
                "engine_type": "AR",
                "engine": "glm_image",
                "input_modalities": ["text", "image"],
                "more_parameters": list(size),
                "defaults": size,
                "limits": limits,
            },
            {
                "stage_id": "encode",
                "engine_type": "encode",
                "input_modalities": ["text"],
                "output_modalities": ["hidden_states"],
                "defaults": {"guidance_scale": 1.5},
            },
            {
                "stage_id": "dit",
                "engine_type": "DiT",
                "input_modalities": ["hidden_states", "image"],
                "output_modalities": ["latents"],
                "defaults": {**size, "num_inference_steps": 50, "guidance_scale": 1.5},
                "limits": {**limits, "num_inference_steps": {"max": 100}},
            },
            {
                "stage_id": "decode",
                "engine_type": "decode",
                "input_modalities": ["latents"],
                "output_modalities": ["image"],
            },
        ]
        return {
            "description": f"{files.given} ({self.name})",
            "inputs": {
                "prompt": {"type": "text"},
                "image": {"type": "image", "required": False, "max_items": MOST_PICTURES},
            },
            "stages": placed([{**stage, **common} for stage in stages], options.gpus, PLANS),
            "edges": [
                {"from": "input.prompt", "to": "ar.prompt"},
                {"from": "input.image", "to": "ar.image"},
                {"from": "input.prompt", "to": "encode.prompt"},
                {"from": "ar.prior", "to": "dit.prior"},
                {"from": "encode.condition", "to": "dit.condition"},
                {"from": "input.image", "to": "dit.image"},
                {"from": "dit.latents", "to": "decode.latents"},
            ],
            "outputs": {"image": {"from": "decode.image", "type": "image"}},
        }

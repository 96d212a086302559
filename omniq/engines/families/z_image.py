"""Z-Image: ragged condition lists, classifier-free guidance at any scale above 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from omniq.engines.diffusion.batch import CallForm
from omniq.engines.families.base import Family


class ZImage(Family):
    """``ZImagePipeline`` (diffusers ``pipeline_z_image.py``): one [tokens, dim] per picture.

    The transformer takes lists and pads and masks by itself; guidance doubles the rows of a call.
    """

    form = CallForm(latents="x", rows=("t",), lists=("x",), ragged=("cap_feats",))
    attention_modules = (r"layers\.\d+\.attention",)
    encoder_layer = -2

    def needs_negative(self, arguments: Mapping[str, Any], default: float) -> bool:
        """CFG runs for any positive scale, ``pos + scale * (pos - neg)``."""
        return float(arguments.get(self.cfg_argument, default)) > 0.0

    def encoder_tokens(
        self, pipeline: Any, prompt: str, most: int | None
    ) -> tuple[list[int], slice]:
        """The prompt as a user turn."""
        text = pipeline.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=True,
        )
        bound = {} if most is None else {"max_length": most, "truncation": True}
        return pipeline.tokenizer(text, **bound)["input_ids"], slice(None)

    def arguments(self, condition: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Lists, since prompts of one batch need not have the same length."""
        return {"negative_prompt_embeds": None, **{k: [v] for k, v in condition.items()}}

    def null(self, condition: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A single all-zero row: lengths need not agree."""
        return {"prompt_embeds": torch.zeros_like(condition["prompt_embeds"][:1])}

    def pictures(
        self, pipeline: Any, given: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        """In the size that is asked for: these pipelines fail on a picture of another one."""
        if "image" not in given:
            return dict(given)
        image = given["image"]
        height, width = arguments.get("height", image.height), arguments.get("width", image.width)
        if (height, width) == (image.height, image.width):
            return dict(given)
        return {**given, "image": pipeline.image_processor.resize(image, height, width)}

    def picture_size(self, pipeline: Any, arguments: Mapping[str, Any]) -> tuple[int, int] | None:
        """Where none is asked for, the picture's own."""
        if (image := arguments.get("image")) is None:
            return None
        return arguments.get("height", image.height), arguments.get("width", image.width)

    def latent_form(
        self, pipeline: Any, size: tuple[int, int], frames: int
    ) -> tuple[int, ...] | None:
        """As the transformer takes them."""
        factor = pipeline.vae_scale_factor
        return int(pipeline.transformer.in_channels), size[0] // factor, size[1] // factor

    def prepare_cache(self) -> None:
        """The blocks call ``x`` what the hooks ask for as ``hidden_states``."""
        from diffusers.hooks import _helpers as known  # noqa: PLC0415 - slow import
        from diffusers.models.transformers.transformer_z_image import (  # noqa: PLC0415
            ZImageTransformerBlock,
        )

        class Metadata(known.TransformerBlockMetadata):
            def _get_parameter_from_args_kwargs(
                self, identifier: str, args: Any = (), kwargs: Any = None
            ) -> Any:
                name = "x" if identifier == "hidden_states" else identifier
                return super()._get_parameter_from_args_kwargs(name, args, kwargs)

        known.TransformerBlockRegistry.register(
            ZImageTransformerBlock, Metadata(return_hidden_states_index=0)
        )

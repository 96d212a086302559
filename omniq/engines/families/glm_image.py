"""GLM-Image: an AR model writes the picture as coarse tokens, a DiT draws it from them.

What lies between the two (Z.ai's GLM-Image, diffusers ``pipeline_glm_image.py``): the AR model
writes a small preview, then the picture, one token for 32 x 32 pixels; the DiT takes one for
16 x 16, and beside them glyph embeds of the texts quoted in the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from omniq.engines.diffusion.batch import CallForm
from omniq.engines.families.base import NEGATIVE, Family
from omniq.engines.inputs import refuse_input
from omniq.errors import EngineError

#: Pixels that one token of the AR model stands for, each way.
PIXELS_PER_TOKEN = 32
#: Tensors of the stage output ``prior``.
PRIOR = "prior_token_ids"
SOURCES, SOURCE_GRIDS = "prior_token_image_ids", "source_image_grid_thw"


@dataclass(frozen=True, slots=True)
class PriorPlan:
    """What the AR model writes for one picture, in tokens.

    ``before`` tokens of the preview come first, then ``height`` x ``width`` of the picture.
    """

    before: int
    height: int
    width: int

    @classmethod
    def of(cls, grids: torch.Tensor, *, from_text: bool) -> PriorPlan:
        """From the processor's ``image_grid_thw`` [grids, 3] of one request.

        A picture from text has two grids to write, the picture's and then the preview's; one that
        is made of others has its own behind theirs.
        """
        sizes = [(int(h), int(w)) for _, h, w in grids.tolist()]
        if from_text:
            return cls(sum(h * w for h, w in sizes[1:]), *sizes[0])
        return cls(0, *sizes[-1])

    @property
    def tokens(self) -> int:
        """Tokens to generate, without the end mark."""
        return self.before + self.height * self.width

    def prior(self, generated: Sequence[int]) -> torch.Tensor:
        """The DiT's tokens int64 [4 * height * width] from all that the AR model wrote.

        Raises:
            EngineError: it ended too early.
        """
        if len(generated) < self.tokens:
            raise EngineError(
                f"the AR model ended its picture after {len(generated)} of {self.tokens} tokens"
            )
        ids = torch.tensor(generated[self.before : self.tokens], dtype=torch.int64)
        return doubled(ids, self.height, self.width)


def doubled(ids: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Tokens int64 [height * width], each one four times: [2 * height * 2 * width]."""
    grid = ids.view(height, width)
    return grid.repeat_interleave(2, 0).repeat_interleave(2, 1).reshape(-1)


def source_tensors(tokens: Sequence[torch.Tensor], grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the DiT must know of the pictures that a request brings.

    Args:
        tokens: of each picture, int64 [h * w].
        grids: (1, h, w) of each, int64 [pictures, 3].
    """
    pairs = zip(tokens, grids.tolist(), strict=True)
    return {
        SOURCES: torch.cat([doubled(ids, h, w) for ids, (_, h, w) in pairs]),
        SOURCE_GRIDS: grids * torch.tensor([1, 2, 2]),
    }


class GlmImage(Family):
    """``GlmImagePipeline``: the tokens of the stage before condition it, and glyph embeds.

    Attention takes no mask that hides (diffusers adds it as a number), so only requests with
    equally many glyph tokens share a forward: all without quoted texts do. A request with pictures
    keeps keys and values of them for itself, and runs alone.
    """

    condition = ("prompt_embeds", PRIOR)
    optional = (SOURCES, SOURCE_GRIDS)
    integers: ClassVar[Mapping[str, int]] = {PRIOR: 1, SOURCES: 1, SOURCE_GRIDS: 2}
    condition_inputs = ("condition", "prior")
    elsewhere = ("vision_language_encoder", "processor")
    pictures_optional = True
    most_pictures = 8
    caches = ()
    attention_modules = (r"transformer_blocks\.\d+\.attn1",)
    form = CallForm(
        latents="hidden_states",
        rows=(
            "hidden_states", "encoder_hidden_states", "prior_token_id", "prior_token_drop",
            "timestep", "target_size", "crop_coords",
        ),
        state={"kv_caches": lambda caches: caches[0].mode in ("read", "write")},
    )  # fmt: skip

    def embed_dim(self, config: Any) -> int | None:
        """Of the glyph encoder."""
        width = config.get("text_embed_dim")
        return None if width is None else int(width)

    def arguments(self, condition: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Pictures' tensors are lists, an entry for each prompt."""
        of_pictures = {n: [t] for n, t in condition.items() if n in (SOURCES, SOURCE_GRIDS)}
        rest = {n: t for n, t in condition.items() if n not in of_pictures}
        return {**super().arguments(rest), **of_pictures}

    def null(self, condition: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Zeros for the glyphs; the pipeline drops the tokens by itself."""
        return {"prompt_embeds": torch.zeros_like(condition["prompt_embeds"])}

    def prepared(self, pipeline: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Hand both embeds to the pipeline as if it had encoded them: given as arguments, it takes
        only pairs of one length, which its own seldom have.
        """
        rest = dict(arguments)
        negative = rest.pop(NEGATIVE + "prompt_embeds", None)
        embeds = rest["prompt_embeds"]
        pipeline.__dict__["encode_prompt"] = lambda *_, **__: (embeds, negative)
        return rest

    def example_tokens(self, pipeline: Any, size: tuple[int, int]) -> dict[str, torch.Tensor]:
        """The same token everywhere."""
        return {PRIOR: torch.zeros(self._tokens(pipeline, size), dtype=torch.int64)}

    def check(self, pipeline: Any, arguments: Mapping[str, Any], size: tuple[int, int]) -> None:
        """The stage before planned a picture of that size, out of tokens that there are."""
        prior, wanted = arguments[PRIOR], self._tokens(pipeline, size)
        if prior.shape[1] != wanted:
            refuse_input(
                PRIOR,
                f"must be {wanted} tokens for {size[0]} x {size[1]} pixels (height x width), "
                f"is {prior.shape[1]}; both stages need the same size",
            )
        known = int(pipeline.transformer.config.prior_vq_quantizer_codebook_size)
        if not 0 <= int(prior.min()) <= int(prior.max()) < known:
            refuse_input(PRIOR, f"tokens must be 0 to {known - 1}, are up to {int(prior.max())}")

    def _tokens(self, pipeline: Any, size: tuple[int, int]) -> int:
        side = int(pipeline.vae_scale_factor) * int(pipeline.transformer.config.patch_size)
        return (size[0] // side) * (size[1] // side)

    def image_pipeline(self) -> str | None:
        """The same."""
        return "GlmImagePipeline"

    def pictures(
        self, pipeline: Any, given: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Always a list."""
        if (image := given.get("image")) is None:
            return dict(given)
        return {**given, "image": image if isinstance(image, list) else [image]}

    def size_multiple(self, pipeline: Any) -> int:
        """Whole tokens of the AR model."""
        return PIXELS_PER_TOKEN

    def latent_form(
        self, pipeline: Any, size: tuple[int, int], frames: int
    ) -> tuple[int, ...] | None:
        """As the transformer takes them."""
        factor = pipeline.vae_scale_factor
        return int(pipeline.transformer.config.in_channels), size[0] // factor, size[1] // factor

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Scaled back by mean and deviation of each channel, not by the scaling factor."""
        latents = latents.to(vae.dtype)
        mean, deviation = (
            torch.tensor(values).view(1, -1, 1, 1).to(latents)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        sample: torch.Tensor = vae.decode(latents * deviation + mean, return_dict=False)[0]
        return sample

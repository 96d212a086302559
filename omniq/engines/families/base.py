"""The family interface and its generic form: embeds as batched tensors, CFG above 1."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from omniq.engines.diffusion.batch import CallForm

# Names that diffusers' transformer configs use for the width of the text condition.
_EMBED_DIMS = (
    "cap_feat_dim", "joint_attention_dim", "cross_attention_dim", "caption_channels", "text_dim",
    "text_embed_dim",
)  # fmt: skip
NEGATIVE = "negative_"
EXAMPLE_TOKENS = 8


class Family:
    """How one model family takes its condition, guides, batches and gives its latents.

    This class fits pipelines whose ``__call__`` takes ``prompt_embeds`` [1, tokens, dim] and whose
    ``output_type="latent"`` gives [n, C, h, w]; a family that differs overrides what differs.
    Conditions travel between stages by the pipeline's own argument names, without batch axis:
    embeds [tokens, dim], pooled embeds [dim], masks [tokens].
    """

    #: Names of condition tensors; each may come with a ``negative_`` twin.
    condition: ClassVar[tuple[str, ...]] = ("prompt_embeds",)
    #: Condition tensors that a request may lack.
    optional: ClassVar[tuple[str, ...]] = ()
    #: Those that are integers, with their number of axes.
    integers: ClassVar[Mapping[str, int]] = {}
    #: Stage inputs that hold several condition tensors.
    condition_inputs: ClassVar[tuple[str, ...]] = ("condition",)
    #: Components that no stage of diffusers loads, because a stage before does their work.
    elsewhere: ClassVar[tuple[str, ...]] = ()
    #: Names of condition tensors [tokens, dim] without a twin, of models that need them.
    beside: ClassVar[tuple[str, ...]] = ()
    #: How transformer calls join; None: requests of this family never share a forward.
    form: ClassVar[CallForm | None] = None
    #: Whether a guided step is two calls (contexts ``cond``, ``uncond``) on the same latents.
    paired: ClassVar[bool] = False
    #: Regular expressions of the attention modules' full names.
    attention_modules: ClassVar[tuple[str, ...]] = (r"(single_)?transformer_blocks\.\d+\.attn",)
    #: Cache methods whose hooks fit the transformer's blocks.
    caches: ClassVar[tuple[str, ...]] = ("first_block", "taylorseer", "magcache", "cache_dit")
    #: What the pipeline takes for a missing negative prompt; None: then there is no guidance.
    empty_negative: ClassVar[str | None] = ""
    #: Pictures that one request may bring.
    most_pictures: ClassVar[int] = 1
    #: Whether the pipeline that takes pictures also works without any.
    pictures_optional: ClassVar[bool] = False
    #: Packages that the pipeline's text encoding imports only when it runs.
    packages: ClassVar[tuple[str, ...]] = ()
    #: Whether denoising needs the VAE, even from text alone.
    denoises_with_vae: ClassVar[bool] = False
    #: The argument of ``__call__`` that is the scale of classifier-free guidance.
    cfg_argument: ClassVar[str] = "guidance_scale"

    #: Layer of the text encoder, as transformers counts ``hidden_states``, whose states are the
    #: prompt embeds, so that an AR engine can encode; None: the pipeline itself has to.
    encoder_layer: ClassVar[int | None] = None

    def __init__(self, index: Mapping[str, Any] | None = None) -> None:
        #: Settings of the pipeline in the model's model_index.json, such as ``is_distilled``.
        self.index = dict(index or {})

    def embed_dim(self, config: Any) -> int | None:
        """Width of the prompt embeds by the transformer's config; None if it does not say."""
        for name in _EMBED_DIMS:
            if isinstance(value := config.get(name), int):
                return value
        return None

    def guidance(self, params: Mapping[str, Any], config: Any) -> dict[str, float]:
        """Guidance arguments of ``__call__`` for a request's parameters.

        ``config`` is the transformer's. ``true_cfg_scale``, where given, is the scale of
        classifier-free guidance in every family; ``guidance_scale`` is it in most.
        """
        scale = params.get("true_cfg_scale", params.get("guidance_scale"))
        return {} if scale is None else {self.cfg_argument: float(scale)}

    def needs_negative(self, arguments: Mapping[str, Any], default: float) -> bool:
        """Whether the pipeline evaluates the negative condition.

        ``arguments`` are those of :meth:`guidance`, ``default`` the scale if they name none.
        """
        return float(arguments.get(self.cfg_argument, default)) > 1.0

    def arguments(self, condition: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Pipeline arguments for condition tensors, already in dtype and on the device."""
        return {name: tensor.unsqueeze(0) for name, tensor in condition.items()}

    def null(self, condition: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The all-zero condition beside ``condition``."""
        return {n: torch.zeros_like(t) for n, t in condition.items() if not n.endswith("mask")}

    def needed(self, config: Any) -> tuple[str, ...]:
        """Condition tensors without which the pipeline cannot run; ``config``: transformer's."""
        return tuple(n for n in self.condition if not n.endswith("mask"))

    def example(self, config: Any) -> dict[str, torch.Tensor]:
        """A zero condition to warm up with, without twins; ``config`` is the transformer's."""
        made = {"prompt_embeds": torch.zeros(EXAMPLE_TOKENS, self.embed_dim(config) or 1)}
        if "pooled_prompt_embeds" in self.condition:
            made["pooled_prompt_embeds"] = torch.zeros(config.pooled_projection_dim)
        return made

    def image_pipeline(self) -> str | None:
        """The diffusers class for a picture, where ``AutoPipelineForImage2Image`` knows none."""
        return None

    def prepared(self, pipeline: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of ``__call__`` of ``pipeline``, which is this request's own copy."""
        return dict(arguments)

    def prepare_cache(self) -> None:
        """Tell diffusers' cache hooks about the blocks, where it does not know them right."""

    def sees_pictures(self, pipeline: Any) -> bool:
        """Whether the encode stage looks at pictures; ``pipeline`` has only its encoders."""
        call, encode = pipeline.__call__, pipeline.encode_prompt
        return all("image" in inspect.signature(f).parameters for f in (call, encode))

    def encode(
        self, pipeline: Any, prompt: str, images: list[Any], options: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Condition tensors of one prompt by the pipeline's own ``encode_prompt``.

        Args:
            pipeline: the pipeline with only its encoders.
            prompt: positive or negative prompt.
            images: pictures (PIL) that the encoder sees, for families that look at them.
            options: more arguments of ``encode_prompt`` that the request names.
        """
        made = pipeline.encode_prompt(prompt=prompt, **options, **self.encode_options())
        values = made if isinstance(made, tuple) else (made,)
        return self.encoded(values)

    def encoder_tokens(
        self, pipeline: Any, prompt: str, most: int | None
    ) -> tuple[list[int], slice]:
        """What an AR engine is to encode, for families with an ``encoder_layer``.

        Args:
            pipeline: the pipeline with its tokenizers.
            prompt: positive or negative prompt.
            most: ``max_sequence_length``; None: the pipeline's own bound.

        Returns:
            Token ids, and which of their states are the prompt embeds.
        """
        raise NotImplementedError(f"{type(self).__name__} is encoded by its pipeline only")

    def encode_options(self) -> dict[str, Any]:
        """Further arguments of ``encode_prompt`` that this family needs."""
        return {"do_classifier_free_guidance": False}

    def encoded(self, values: tuple[Any, ...]) -> dict[str, torch.Tensor]:
        """What ``encode_prompt`` returned, by name and without batch axis."""
        return {"prompt_embeds": values[0][0]}

    def mask_text(self, kwargs: dict[str, Any], mask: torch.Tensor) -> None:
        """Make the transformer ignore padding: ``mask`` bool [rows, tokens], True for tokens."""
        raise NotImplementedError(f"{type(self).__name__} pads no text")

    def size_multiple(self, pipeline: Any) -> int:
        """Pixels that height and width must be multiples of."""
        return int(pipeline.vae_scale_factor) * 2

    def pictures(
        self, pipeline: Any, given: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Picture arguments of ``__call__``.

        Args:
            pipeline: the stock pipeline.
            given: ``image`` and ``mask_image`` (PIL), as far as the request brings them.
            arguments: its other arguments.
        """
        return dict(given)

    def example_tokens(self, pipeline: Any, size: tuple[int, int]) -> dict[str, torch.Tensor]:
        """Made-up integers of the condition, for warming up.

        ``size`` is (height, width) in pixels.
        """
        return {}

    def check(self, pipeline: Any, arguments: Mapping[str, Any], size: tuple[int, int]) -> None:
        """Whether the condition fits what is asked for.

        Args:
            pipeline: the stock pipeline.
            arguments: of its call.
            size: (height, width) in pixels of what will be made.

        Raises:
            InvalidRequest: it does not.
        """

    def picture_size(self, pipeline: Any, arguments: Mapping[str, Any]) -> tuple[int, int] | None:
        """Height and width of what is made, where a request's pictures decide; else None."""
        return None

    def latent_form(
        self, pipeline: Any, size: tuple[int, int], frames: int
    ) -> tuple[int, ...] | None:
        """Shape of one picture's or video's latents in the form of :meth:`latents`; None: unknown.

        ``size`` is (height, width) in pixels.
        """
        return None

    def latents(self, pipeline: Any, output: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Latents [n, C, h, w] or [n, C, f, h, w] from what ``output_type="latent"`` gave.

        ``size`` is the picture's (height, width) in pixels.
        """
        return output

    def to_pipeline(self, pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`latents`, for latents that a request brings."""
        return latents

    def decode(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Pixels in [-1, 1], [n, 3, H, W] or [n, 3, F, H, W], as the pipeline's end makes them."""
        latents = latents.to(vae.dtype) / vae.config.scaling_factor
        if vae.config.shift_factor is not None:
            latents = latents + vae.config.shift_factor
        sample: torch.Tensor = vae.decode(latents, return_dict=False)[0]
        return sample


def statistics(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents [n, C, f, h, w] scaled back by the VAE's mean and standard deviation per channel."""
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents)
    # Division by the inverse, as the pipelines do it, to get the same last bits.
    inverse = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents)
    return latents / inverse + mean

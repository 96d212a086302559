"""AR engine of GLM-Image: the tokens that its DiT draws a picture from, by transformers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omniq.engines.base import Emit, Engine, NullEmit, StageInput, StageOutput, StageRequest
from omniq.engines.diffusion.inputs import image_input
from omniq.engines.families.glm_image import (
    PIXELS_PER_TOKEN,
    PRIOR,
    GlmImage,
    PriorPlan,
    source_tensors,
)
from omniq.engines.faults import engine_faults
from omniq.engines.inputs import refuse_input, text_input
from omniq.engines.loading import check_engine_args, loading, model_folder, torch_dtype
from omniq.engines.sampling import (
    Sampler,
    Sampling,
    generation_defaults,
    refuse_parameters,
)
from omniq.engines.stepping import Generation, Past, StepLoop
from omniq.errors import ConfigError, InvalidRequest

MODEL, PROCESSOR = "vision_language_encoder", "processor"
ENGINE_ARGS = frozenset({"attn_implementation"})
#: Parameters of text, which has no length of its own here.
MEANINGLESS = (
    *("n", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs"),
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
)
WARMUP_SIDE = 2 * PIXELS_PER_TOKEN


@dataclass(eq=False, slots=True, kw_only=True)
class _Picture(Generation):
    """A picture in progress."""

    inputs: Mapping[str, Any]
    from_text: bool
    sampler: Sampler
    emit: Emit
    tokens: list[int] = field(default_factory=list)
    plan: PriorPlan | None = None
    #: int64 [3, tokens]: time, row and column of each token to be written.
    positions: torch.Tensor | None = None
    sources: dict[str, torch.Tensor] = field(default_factory=dict)


class GlmImageAREngine(Engine):
    """Writes a picture's tokens, by one forward pass a step for all requests in flight.

    Inputs: ``prompt`` (text), and ``image`` (uint8 [H, W, 3], one or several) for a picture made
    of others. Parameters, beside those of sampling: ``height`` and ``width`` in pixels, which the
    stage lists in its ``more_parameters``. Output ``prior``, which the DiT takes:
    ``prior_token_ids`` int64 [height / 16 * width / 16], and of pictures ``prior_token_image_ids``
    int64 [all their tokens] and ``source_image_grid_thw`` int64 [pictures, 3]; and ``token_ids``
    int64 [n], as they were written.

    Sampling that a request leaves open is as ``generate(do_sample=True)`` has it of the model's
    generation config; the same seed gives the same tokens as ``GlmImagePipeline``.

    The stage's ``model`` is a pipeline folder. Engine argument ``attn_implementation``.
    """

    name = "glm_image"

    async def load(self) -> None:
        """Load the AR model and its processor.

        Raises:
            ConfigError: the folder is no GLM-Image pipeline, or an engine argument is wrong.
        """
        await self.in_thread(self._load)
        self._loop: StepLoop[_Picture] = StepLoop(self, self)

    def _load(self) -> None:
        from transformers import (  # noqa: PLC0415 - slow import
            GlmImageForConditionalGeneration,
            GlmImageProcessor,
        )

        args = check_engine_args(self.stage, ENGINE_ARGS)
        root = model_folder(self.stage, [f"{MODEL}/*", f"{PROCESSOR}/*"])
        for name in (MODEL, PROCESSOR):
            if not (root / name).is_dir():
                raise ConfigError(f"stage {self.stage.stage_id!r}: no folder {root / name}")
        with loading(self.stage, root):
            self._processor: Any = GlmImageProcessor.from_pretrained(root / PROCESSOR)
            model = GlmImageForConditionalGeneration.from_pretrained(
                root / MODEL, dtype=torch_dtype(self.stage), **args
            )
        with engine_faults(f"loading {root}"):
            self._model: Any = model.to(self.device).eval()
        self._defaults = generation_defaults(model.generation_config)
        ends = model.generation_config.eos_token_id
        self._ends = frozenset(ends if isinstance(ends, list) else [ends])
        self._context = int(model.config.text_config.max_position_embeddings)

    async def warmup(self) -> None:
        """Write one small picture."""
        params = {"height": WARMUP_SIDE, "width": WARMUP_SIDE, "seed": 0}
        await self.run(StageRequest("warmup", params), {"prompt": StageInput("a")}, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Write one picture's tokens."""
        started = time.perf_counter()
        picture = await self.in_thread(self._read, request.params, inputs, emit)
        await self._loop.run(picture)
        assert picture.plan is not None, "a picture that has finished was planned"
        tensors = {PRIOR: picture.plan.prior(picture.tokens), **picture.sources}
        written = torch.tensor(picture.tokens, dtype=torch.int64)
        return StageOutput(
            tensors={"prior": tensors, "token_ids": {"token_ids": written}},
            metrics={
                "prompt_tokens": int(picture.inputs["input_ids"].shape[1]),
                "completion_tokens": len(picture.tokens),
                "generation_seconds": time.perf_counter() - started,
            },
        )

    async def unload(self) -> None:
        """Free the model."""
        await self._loop.close()
        await super().unload()
        self._model = None

    # -- one request -------------------------------------------------------------------------

    def _read(
        self, params: Mapping[str, Any], inputs: Mapping[str, StageInput], emit: Emit
    ) -> _Picture:
        """The request as the processor gives it to the model."""
        given = dict(params)
        height, width = (_side(given.pop(name, None), name) for name in ("height", "width"))
        deterministic = bool(given.pop("deterministic", False))
        refuse_parameters(given, MEANINGLESS, "a picture has as many tokens as its size says")
        sampling = Sampling.from_params({**self._defaults, **_set(given)})
        pictures = image_input(inputs)
        if len(pictures) > GlmImage.most_pictures:
            refuse_input("image", f"at most {GlmImage.most_pictures}; got {len(pictures)}")
        content = [{"type": "image", "image": picture} for picture in pictures]
        content.append({"type": "text", "text": text_input(inputs, "prompt")})
        with engine_faults(f"stage {self.stage.stage_id!r}"):
            made = self._processor.apply_chat_template(
                [[{"role": "user", "content": content}]],
                tokenize=True,
                padding=False,
                target_h=height,
                target_w=width,
                return_dict=True,
                return_tensors="pt",
            ).to(self.device)
        plan = PriorPlan.of(made["image_grid_thw"], from_text=not pictures)
        room = self._context - int(made["input_ids"].shape[1])
        if plan.tokens > room:
            refuse_input(
                "prompt",
                f"it leaves room for {room} of the {plan.tokens} tokens of such a picture",
            )
        return _Picture(
            deterministic=deterministic,
            inputs=made,
            from_text=not pictures,
            sampler=Sampler(sampling, [], end_ids=self._ends),
            emit=emit,
            plan=plan,
        )

    # -- steps, on the model thread ------------------------------------------------------------

    def prefill(self, generation: _Picture) -> tuple[Any, int]:
        """The prompt with the pictures in it, and the first token."""
        from transformers import DynamicCache  # noqa: PLC0415 - slow import, done by load

        inputs = dict(generation.inputs)
        if not generation.from_text:
            grids = inputs["image_grid_thw"][:-1]
            seen = self._model.get_image_features(inputs.pop("pixel_values"), grids)
            tokens = [self._model.get_image_tokens([state]) for state in seen.pooler_output]
            generation.sources = source_tensors([t.cpu() for t in tokens], grids.cpu())
            inputs["mm_encoder_outputs"] = {"image": seen}
        cache = DynamicCache(config=self._model.config)
        out = self._model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        # The model keeps the places of the tokens to come, of the request it saw last.
        generation.positions = self._model.model._cached_decode_position_ids[0].clone()
        self._take(generation, out.logits[0, -1])
        return cache, int(inputs["input_ids"].shape[1])

    def decode(self, generations: Sequence[_Picture], past: Past) -> None:
        """One more token for each."""
        ids = torch.tensor([[g.tokens[-1]] for g in generations], device=self.device)
        places = [_place(g) for g in generations]
        out = self._model(
            input_ids=ids,
            past_key_values=past.cache,
            attention_mask=past.attention_mask,
            position_ids=torch.stack(places, dim=1),
            use_cache=True,
            logits_to_keep=1,
        )
        for row, generation in enumerate(generations):
            self._take(generation, out.logits[row, -1])

    def _take(self, generation: _Picture, logits: torch.Tensor) -> None:
        assert generation.plan is not None, "pictures are planned before they are written"
        token = generation.pick(generation.sampler, logits)
        if generation.fault is not None:
            return
        generation.tokens.append(token)
        total = generation.plan.tokens
        generation.finished = token in self._ends or len(generation.tokens) >= total
        generation.emit.progress(len(generation.tokens), total)


def _place(generation: _Picture) -> torch.Tensor:
    """int64 [3, 1]: where the newest token stands."""
    assert generation.positions is not None, "known since the prompt"
    at = len(generation.tokens) - 1
    return generation.positions[:, at : at + 1]


def _side(given: Any, name: str) -> int:
    message = f"must be a multiple of {PIXELS_PER_TOKEN} for this model, is {given}"
    if not isinstance(given, int) or given < 1 or given % PIXELS_PER_TOKEN:
        raise InvalidRequest(
            f"{name}: {message}", fields=[{"field": f"parameters.{name}", "message": message}]
        )
    return given


def _set(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}

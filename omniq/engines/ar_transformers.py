"""AR engine on Hugging Face transformers: runs everywhere, one sequence a forward."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from omniq.config import Modality
from omniq.engines.base import Emit, Engine, NullEmit, StageInput, StageOutput, StageRequest
from omniq.engines.faults import engine_faults
from omniq.engines.loading import (
    check_engine_args,
    loading,
    part_folder,
    tokenizer_folder,
    torch_dtype,
)
from omniq.engines.sampling import Sampler, Sampling
from omniq.engines.text import PromptEncoder, TextStream

ENGINE_ARGS = frozenset({"chat_template", "attn_implementation", "max_model_len"})
WARMUP_TOKENS = 4


@dataclass(slots=True)
class _Generation:
    """One request in progress."""

    prompt_tokens: int
    budget: int
    sampler: Sampler
    stream: TextStream
    cache: Any
    want_hidden: bool
    tokens: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)  # each CPU [1, hidden]
    finish_reason: str | None = None
    started: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0


class TransformersAREngine(Engine):
    """Autoregressive generation with a KV cache and seeded sampling.

    Input: one of ``prompt`` (text), ``messages`` (a conversation) and ``token_ids``. Outputs:
    values ``text``, ``finish_reason`` (``stop`` or ``length``) and ``usage``; tensors ``token_ids``
    (int64 [n]) and, when the stage's output modalities contain ``hidden_states``, ``hidden_states``
    ([n, hidden] in the model's dtype): row i is the last hidden state behind the final norm at the
    position whose logits gave generated token i. Row 0
    therefore belongs to the last prompt token; an end token has its row but is never fed itself.

    Every decode step is one call on the model thread, whose queue is first in, first out: requests
    in flight take turns token by token, and each one's result is independent of the others.

    Engine arguments: ``chat_template`` (default true: the prompt is a user turn in the tokenizer's
    chat template), ``attn_implementation``, ``max_model_len`` (tokens; below the model's own).
    """

    name = "transformers"

    async def load(self) -> None:
        """Load weights and tokenizer.

        Raises:
            ConfigError: folder, tokenizer or engine arguments are wrong.
        """
        await self.in_thread(self._load)

    def _load(self) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow import

        args = check_engine_args(self.stage, ENGINE_ARGS)
        folder = part_folder(self.stage)
        options: dict[str, Any] = {"dtype": torch_dtype(self.stage)}
        if "attn_implementation" in args:
            options["attn_implementation"] = args["attn_implementation"]
        with loading(self.stage, folder):
            self._encoder = PromptEncoder(
                tokenizer_folder(folder), chat_template=bool(args.get("chat_template", True))
            )
            model = AutoModelForCausalLM.from_pretrained(folder, **options)
        with engine_faults(f"loading {folder}"):
            self._model: Any = model.to(self.device).eval()
        text_config = model.config.get_text_config()
        self._context = int(text_config.max_position_embeddings)
        if (limit := args.get("max_model_len")) is not None:
            self._context = min(self._context, int(limit))
        self._end_ids = _end_ids(model, self._encoder.tokenizer)
        self._want_hidden = Modality.HIDDEN_STATES in self.stage.output_modalities

    async def warmup(self) -> None:
        """Generate a few tokens."""
        request = StageRequest("warmup", {"max_tokens": WARMUP_TOKENS, "temperature": 0.0})
        await self.run(request, {"prompt": StageInput("a")}, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Generate until an end token, a stop string, ``max_tokens`` or the context's end."""
        generation, piece = await self.in_thread(self._prefill, inputs, request.params)
        _tell(emit, generation, piece)
        while generation.finish_reason is None:
            piece = await self.in_thread(self._decode, generation)
            _tell(emit, generation, piece)
        return _output(generation)

    async def unload(self) -> None:
        """Free the model."""
        await super().unload()
        self._model = None

    @torch.no_grad()
    def _prefill(
        self, inputs: Mapping[str, StageInput], params: Mapping[str, Any]
    ) -> tuple[_Generation, str]:
        from transformers import DynamicCache  # noqa: PLC0415 - slow import, done by load

        with engine_faults(f"stage {self.stage.stage_id!r}"):
            ids = self._encoder.read(inputs, params, self._context)
            sampling = Sampling.from_params(params)
            room = self._context - len(ids)
            generation = _Generation(
                prompt_tokens=len(ids),
                budget=min(sampling.max_tokens or room, room),
                sampler=Sampler(sampling, ids),
                stream=TextStream(self._encoder.tokenizer, sampling.stop),
                cache=DynamicCache(config=self._model.config),
                want_hidden=self._want_hidden,
            )
            piece = self._forward(generation, ids)
            generation.first_token = time.perf_counter() - generation.started
            return generation, piece

    @torch.no_grad()
    def _decode(self, generation: _Generation) -> str:
        with engine_faults(f"stage {self.stage.stage_id!r}"):
            return self._forward(generation, generation.tokens[-1:])

    def _forward(self, generation: _Generation, ids: list[int]) -> str:
        """Feed ``ids``, take one more token; returns the text it completes."""
        out = self._model(
            input_ids=torch.tensor([ids], device=self.device),
            past_key_values=generation.cache,
            use_cache=True,
            logits_to_keep=1,
            output_hidden_states=generation.want_hidden,
        )
        if generation.want_hidden:
            generation.rows.append(out.hidden_states[-1][0, -1:].to("cpu", copy=True))
        token = generation.sampler.pick(out.logits[0, -1])
        generation.tokens.append(token)
        if token in self._end_ids:
            generation.finish_reason = "stop"
            return generation.stream.finish()
        piece = generation.stream.push(token)
        if generation.stream.stopped:
            generation.finish_reason = "stop"
        elif len(generation.tokens) >= generation.budget:
            piece += generation.stream.finish()
            generation.finish_reason = "stop" if generation.stream.stopped else "length"
        return piece


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's and the generation config's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _tell(emit: Emit, generation: _Generation, piece: str) -> None:
    if piece:
        emit.delta("text", {"text": piece})
    emit.progress(len(generation.tokens), generation.budget)


def _output(generation: _Generation) -> StageOutput:
    seconds = time.perf_counter() - generation.started
    prompt, completion = generation.prompt_tokens, len(generation.tokens)
    values: dict[str, Any] = {
        "text": generation.stream.text,
        "finish_reason": generation.finish_reason,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "cached_tokens": 0,
        },
    }
    if generation.stream.stop_string is not None:
        values["stop_reason"] = generation.stream.stop_string
    output = StageOutput(
        values=values,
        tensors={"token_ids": {"token_ids": torch.tensor(generation.tokens, dtype=torch.int64)}},
        metrics={
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "first_token_seconds": generation.first_token,
            "generation_seconds": seconds,
        },
    )
    if generation.want_hidden:
        output.tensors["hidden_states"] = {"hidden_states": torch.cat(generation.rows)}
    return output

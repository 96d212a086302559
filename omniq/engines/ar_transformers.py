"""AR engine on Hugging Face transformers: runs everywhere, one forward a step for all in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

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
    whole_arg,
)
from omniq.engines.rows import Rows, settle
from omniq.engines.sampling import Sampler, Sampling
from omniq.engines.text import PromptEncoder, TextStream
from omniq.errors import ConfigError, OmniqError

ENGINE_ARGS = frozenset(
    {
        *("chat_template", "custom_chat_template", "chat_template_content_format"),
        *("default_chat_template_kwargs", "attn_implementation", "generation_config"),
        "max_model_len",
    }
)
#: Names in a generation config that are sampling parameters, as vLLM takes them from there.
RECOMMENDED = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
WARMUP_TOKENS = 4


@dataclass(eq=False, slots=True)
class _Sequence:
    """One answer in progress: a row of the batch."""

    budget: int
    sampler: Sampler
    stream: TextStream
    tokens: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)  # each CPU [1, hidden]
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the first forward pass of a request gets.

    ``more`` are arguments beside the ids (pixels, positions). A token at place *i* behind the
    prompt has position *i* + ``shift`` (media take fewer positions than tokens, and a video's may
    lie between whole numbers).
    """

    ids: list[int]
    more: Mapping[str, Any] = field(default_factory=dict)
    shift: float = 0


@dataclass(eq=False, slots=True)
class Generation:
    """One request in progress."""

    prompt: Prompt
    sampling: Sampling
    sequences: list[_Sequence]
    emit: Emit
    done: asyncio.Future[None]
    started: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    deterministic: bool = False
    unwanted: bool = False
    #: [prompt tokens, hidden], kept by engines that hand them on.
    prompt_states: torch.Tensor | None = None
    #: Set after each step that was for it.
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return all(s.finish_reason is not None for s in self.sequences)


class TransformersAREngine(Engine):
    """Autoregressive generation with a KV cache and seeded sampling.

    Inputs, one of: ``prompt`` (text), ``messages`` (a conversation, as in OpenAI's API),
    ``token_ids`` (list of int). Outputs: values ``text`` and ``finish_reason`` (``stop`` or
    ``length``) of the first answer, and ``choices``, one object for each answer (parameter ``n``);
    tensors ``token_ids`` (int64 [tokens]) and, when the stage's output modalities contain
    ``hidden_states``, ``hidden_states`` ([tokens, hidden] in the model's dtype), both of the first
    answer: row i is the last hidden state behind the final norm at the position whose logits gave
    generated token i. Row 0 therefore belongs to the last prompt token; an end token has its row
    but is never fed itself.

    A step is one call on the model thread: the prompt of one new request, then one token for every
    request in flight by one forward pass. Each one's result is independent of the others but for
    rounding, which differs with the rows of a pass. ``deterministic`` requests have a pass each, so
    that not a bit differs; so have all of a model whose cache is no plain one (windows, recurrent
    states).

    Engine arguments: ``chat_template`` (default true: the prompt is a user turn in the tokenizer's
    chat template), ``attn_implementation``, ``max_model_len`` (tokens; below the model's own),
    ``generation_config`` (``auto``: parameters that a request leaves open are those that the model
    recommends; ``vllm``: they are vLLM's defaults).
    """

    name = "transformers"
    #: What ``engine_args`` may name.
    arguments: ClassVar[frozenset[str]] = ENGINE_ARGS

    async def load(self) -> None:
        """Load weights and tokenizer.

        Raises:
            ConfigError: folder, tokenizer or engine arguments are wrong.
        """
        self._waiting: list[Generation] = []
        self._rows: Rows[tuple[Generation, _Sequence]] = Rows()
        self._steps: asyncio.Task[None] | None = None
        await self.in_thread(self._load)

    def _load(self) -> None:
        args = check_engine_args(self.stage, self.arguments)
        folder = part_folder(self.stage)
        options: dict[str, Any] = {"dtype": torch_dtype(self.stage)}
        if "attn_implementation" in args:
            options["attn_implementation"] = args["attn_implementation"]
        with loading(self.stage, folder):
            self._encoder = PromptEncoder(
                tokenizer_folder(folder),
                chat_template=bool(args.get("chat_template", True)),
                template=args.get("custom_chat_template"),
                content_format=args.get("chat_template_content_format", "auto"),
                variables=args.get("default_chat_template_kwargs"),
            )
            model = self._load_model(folder, options)
        with engine_faults(f"loading {folder}"):
            self._model: Any = model.to(self.device).eval()
        text_config = model.config.get_text_config()
        self._context = int(text_config.max_position_embeddings)
        limit = whole_arg(self.stage, "max_model_len", self._context)
        self._context = min(self._context, limit)
        self._end_ids = _end_ids(model, self._encoder.tokenizer)
        self._recommended = self._recommendations(model, args.get("generation_config", "auto"))
        self._want_hidden = Modality.HIDDEN_STATES in self.stage.output_modalities

    def _load_model(self, folder: Path, options: Mapping[str, Any]) -> Any:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow import

        return AutoModelForCausalLM.from_pretrained(folder, **options)

    def _recommendations(self, model: Any, source: str) -> dict[str, Any]:
        if source not in ("auto", "vllm"):
            raise ConfigError(
                f"stage {self.stage.stage_id!r}: engine_args.generation_config: {source!r} is not "
                "allowed; allowed: auto, vllm"
            )
        if source == "vllm":
            return {}
        found = model.generation_config.to_diff_dict()
        return {
            ours: found[theirs]
            for theirs, ours in RECOMMENDED.items()
            if found.get(theirs) is not None
        }

    async def warmup(self) -> None:
        """Generate a few tokens."""
        request = StageRequest("warmup", {"max_tokens": WARMUP_TOKENS, "temperature": 0.0})
        await self.run(request, {"prompt": StageInput("a")}, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Generate until an end token, a stop string, ``max_tokens`` or the context's end."""
        prompt = await self._prompt(inputs, request.params)
        generation = self._generation(prompt, request.params, emit)
        self._waiting.append(generation)
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._step_on())
        try:
            await self._follow(generation)
        finally:
            generation.unwanted = True
        return self._output(generation)

    async def unload(self) -> None:
        """Free the model."""
        if self._steps is not None:
            await asyncio.wait({self._steps})
        await super().unload()
        self._model = None

    # -- one request -------------------------------------------------------------------------

    async def _prompt(self, inputs: Mapping[str, StageInput], params: Mapping[str, Any]) -> Prompt:
        """The request's prompt."""
        return await self.in_thread(self._read, inputs, params)

    def _read(self, inputs: Mapping[str, StageInput], params: Mapping[str, Any]) -> Prompt:
        """The same, on the model thread."""
        return Prompt(self._encoder.read(inputs, params, self._context))

    async def _follow(self, generation: Generation) -> None:
        """Be there while the request is served; raises what ends it."""
        await generation.done

    def _generation(self, prompt: Prompt, params: Mapping[str, Any], emit: Emit) -> Generation:
        given = {k: v for k, v in params.items() if v is not None}
        deterministic = bool(given.pop("deterministic", False))
        sampling = Sampling.from_params({**self._recommended, **given})
        room = self._context - len(prompt.ids)
        ends = () if sampling.ignore_eos else self._end_ids
        sequences = [
            _Sequence(
                budget=min(sampling.max_tokens or room, room),
                sampler=Sampler(sampling, prompt.ids, end_ids=ends, index=i),
                stream=TextStream(self._encoder.tokenizer, sampling.stop),
            )
            for i in range(sampling.n)
        ]
        done = asyncio.get_running_loop().create_future()
        return Generation(prompt, sampling, sequences, emit, done, deterministic=deterministic)

    # -- steps -------------------------------------------------------------------------------

    async def _step_on(self) -> None:
        """Step while anything is in flight; a step that fails ends every request it was for."""
        while self._waiting or self._rows:
            try:
                ended = await self.in_thread(self._step)
            except Exception as exc:  # each request raises it where it is waited for
                for generation in self._in_flight():
                    settle(generation, exc)
                self._rows.clear()
                continue
            for generation, fault in ended:
                settle(generation, fault)
            for generation in self._in_flight():
                generation.news.set()

    def _in_flight(self) -> set[Generation]:
        """Requests that have rows."""
        return {generation for generation, _ in self._rows}

    @torch.no_grad()
    def _step(self) -> list[tuple[Generation, Exception | None]]:
        """One new prompt, then a token for all; returns who has ended, and how."""
        ended: list[tuple[Generation, Exception | None]] = []
        self._drop_ended()
        while self._waiting:
            generation = self._waiting.pop(0)
            if generation.unwanted:
                continue
            try:
                self._prefill(generation)
            except Exception as exc:  # this request's own; the others go on
                ended.append((generation, exc))
            else:
                if generation.finished:
                    ended.append((generation, None))
            break
        self._drop_ended()
        if self._rows:
            with engine_faults(f"stage {self.stage.stage_id!r}"):
                ended += self._decode()
            ended += [(g, None) for g in self._in_flight() if g.finished]
        return ended

    def _drop_ended(self) -> None:
        """Take rows out that have ended or that nobody wants any more."""
        self._rows.keep(lambda row: row[1].finish_reason is None and not row[0].unwanted)

    def _prefill(self, generation: Generation) -> None:
        """The prompt and the first token of each answer."""
        from transformers import DynamicCache  # noqa: PLC0415 - slow import, done by load

        with engine_faults(f"stage {self.stage.stage_id!r}"):
            cache = DynamicCache(config=self._model.config)
            prompt = generation.prompt
            ids = torch.tensor([prompt.ids], device=self.device)
            out = self._forward(ids, cache, **prompt.more)
            self._prompt_done(generation, out)
            for sequence in generation.sequences:
                self._take(generation, sequence, out, 0)
            generation.first_token = time.perf_counter() - generation.started
            left = [(generation, s) for s in generation.sequences if s.finish_reason is None]
            if left:
                self._rows.add(left, cache, len(prompt.ids), apart=generation.deterministic)

    def _prompt_done(self, generation: Generation, out: Any) -> None:
        """``out`` is of the forward pass of the request's prompt."""

    def _decode(self) -> list[tuple[Generation, Exception]]:
        """One more token for every row; returns whose row failed by itself."""
        batched, batch = self._rows.batched, self._rows.batch
        outs: dict[_Sequence, tuple[Any, int]] = {
            sequence: (self._forward_apart(generation, sequence, cache), 0)
            for (generation, sequence), cache in self._rows.apart.items()
        }
        if batch is not None:
            out = self._forward(
                self._last([s for _, s in batched]),
                batch.cache,
                attention_mask=batch.attention_mask(self.device),
                position_ids=self._positions(batch.lengths, [g for g, _ in batched]),
            )
            batch.stepped()
            outs |= {sequence: (out, row) for row, (_, sequence) in enumerate(batched)}
        failed: list[tuple[Generation, Exception]] = []
        for generation, sequence in self._rows:
            out, row = outs[sequence]
            try:
                self._take(generation, sequence, out, row)
            except OmniqError as exc:
                generation.unwanted = True
                failed.append((generation, exc))
        return failed

    def _forward_apart(self, generation: Generation, sequence: _Sequence, cache: Any) -> Any:
        more = {}
        if generation.prompt.more:  # else the model counts by itself, as far as it has positions
            length = len(generation.prompt.ids) + len(sequence.tokens) - 1
            more["position_ids"] = self._positions([length], [generation])
        return self._forward(self._last([sequence]), cache, **more)

    def _positions(self, lengths: list[int], generations: list[Generation]) -> torch.Tensor:
        """Positions of the next token of sequences that are so long: [rows, 1]; int64, or float32
        if one of them is no whole number.
        """
        places = [n + g.prompt.shift for n, g in zip(lengths, generations, strict=True)]
        return torch.tensor(places, device=self.device)[:, None]

    def _last(self, sequences: list[_Sequence]) -> torch.Tensor:
        """int64 [rows, 1]: the newest token of each."""
        return torch.tensor([[s.tokens[-1]] for s in sequences], device=self.device)

    def _forward(self, ids: torch.Tensor, cache: Any, **more: Any) -> Any:
        return self._model(
            input_ids=ids,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            output_hidden_states=self._want_hidden,
            **more,
        )

    def _take(self, generation: Generation, sequence: _Sequence, out: Any, row: int) -> None:
        """The token that row ``row`` of a forward pass gives ``sequence``."""
        if self._want_hidden:
            sequence.rows.append(out.hidden_states[-1][row, -1:].to("cpu", copy=True))
        logits = out.logits[row, -1]
        token = sequence.sampler.pick(logits)
        sequence.tokens.append(token)
        if generation.sampling.logprobs is not None:
            sequence.logprobs.append(self._logprob(sequence, logits, token))
        piece = self._ended(generation.sampling, sequence, token)
        _tell(generation, sequence, piece)

    def _ended(self, sampling: Sampling, sequence: _Sequence, token: int) -> str:
        """Whether ``token`` ends the answer; returns the text it completes."""
        stream = sequence.stream
        if token in self._end_ids and not sampling.ignore_eos:
            sequence.finish_reason = "stop"
            return stream.finish()
        if token in sampling.stop_token_ids:
            sequence.finish_reason, sequence.stop_reason = "stop", token
            return stream.finish()
        piece = stream.push(token)
        if not stream.stopped and len(sequence.tokens) >= sequence.budget:
            sequence.finish_reason = "length"
            piece += stream.finish()
        if stream.stopped:
            sequence.finish_reason, sequence.stop_reason = "stop", stream.stop_string
        return piece

    def _logprob(self, sequence: _Sequence, logits: torch.Tensor, token: int) -> dict[str, Any]:
        decode = self._encoder.tokenizer.decode
        top = [
            {"token_id": i, "token": decode([i]), "logprob": max(value, -9999.0), "rank": rank}
            for i, value, rank in sequence.sampler.logprobs(logits, token)
        ]
        chosen = next(t for t in top if t["token_id"] == token)
        return {**chosen, "top_logprobs": top}

    # -- the end -----------------------------------------------------------------------------

    def _output(self, generation: Generation) -> StageOutput:
        first = generation.sequences[0]
        answers = [_answer(s) for s in generation.sequences]
        prompt, made = len(generation.prompt.ids), sum(len(s.tokens) for s in generation.sequences)
        output = StageOutput(
            values={
                **answers[0],
                "choices": [{"index": i, **a} for i, a in enumerate(answers)],
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": made,
                    "total_tokens": prompt + made,
                    "cached_tokens": 0,
                },
            },
            tensors={"token_ids": {"token_ids": torch.tensor(first.tokens, dtype=torch.int64)}},
            metrics={
                "prompt_tokens": prompt,
                "completion_tokens": made,
                "first_token_seconds": generation.first_token,
                "generation_seconds": time.perf_counter() - generation.started,
            },
        )
        if self._want_hidden:
            output.tensors["hidden_states"] = {"hidden_states": torch.cat(first.rows)}
        return output


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's and the generation config's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)


def _tell(generation: Generation, sequence: _Sequence, piece: str) -> None:
    several = len(generation.sequences) > 1
    if piece:
        which = {"index": generation.sequences.index(sequence)} if several else {}
        generation.emit.delta("text", {"text": piece, **which})
    steps = sum(len(s.tokens) for s in generation.sequences)
    generation.emit.progress(steps, sum(s.budget for s in generation.sequences))


def _answer(sequence: _Sequence) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "text": sequence.stream.text,
        "finish_reason": sequence.finish_reason,
    }
    if sequence.stop_reason is not None:
        answer["stop_reason"] = sequence.stop_reason
    if sequence.logprobs:
        answer["logprobs"] = sequence.logprobs
    return answer

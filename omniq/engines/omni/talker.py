"""The talker of an omni model: the thinker's states in, codes of speech out."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol

import torch

from omniq.engines.base import Emit, Engine, NullEmit, StageInput, StageOutput, StageRequest
from omniq.engines.faults import engine_faults
from omniq.engines.inputs import refuse_input
from omniq.engines.loading import (
    check_engine_args,
    loading,
    part_folder,
    torch_dtype,
    whole_arg,
)
from omniq.engines.omni import reply
from omniq.engines.omni.families import family_of
from omniq.engines.omni.reply import ReplyPart, ThinkerPrompt, parts_of
from omniq.engines.omni.speakers import Speakers
from omniq.engines.rows import hand_on
from omniq.engines.sampling import Sampler, Sampling
from omniq.engines.stepping import Generation, Past, StepLoop

ENGINE_ARGS = frozenset({"attn_implementation", "stream_tokens", "max_model_len"})
#: Codes of a chunk.
STREAM_TOKENS = 12
WARMUP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class TalkerPrompt:
    """What the first forward pass gets."""

    embeds: torch.Tensor
    """[n, hidden] of the talker."""
    positions: torch.Tensor
    """int64 [3, n]."""


class TalkerReply(Protocol):
    """The thinker's answer as rows of which the talker takes one a step."""

    def push(self, part: ReplyPart) -> torch.Tensor:
        """The rows that ``part`` completes: [n, hidden of the thinker]."""

    def end(self) -> torch.Tensor:
        """The rows behind the last one: [n, hidden]; the last of them repeats."""


@dataclass(frozen=True, slots=True)
class TalkerStep:
    """What one request brings to a step."""

    code: int
    """Its newest."""
    state: torch.Tensor
    """[hidden]: the last state of the pass that gave the code."""
    row: torch.Tensor
    """[1, hidden of the thinker]: the answer's row."""
    sampler: Sampler


class Talker(abc.ABC):
    """A family's talker: its model, and what goes in and comes out at each step.

    Attributes:
        model: the decoder; takes ``inputs_embeds``, ``position_ids`` int64 [3, rows, n],
            ``attention_mask`` and ``past_key_values``, gives ``last_hidden_state``.
        config: with ``max_position_embeddings``.
        ends: codes that end the speech.
        seen: codes that the repetition penalty takes for said before.
        groups: codes of a frame; with more than one, the others are made in the step behind, so
            that a code without one makes no frame.
        speakers: the voices.
        thinker_size: width of the thinker's states.
        example: ids of a prompt to warm up with.
    """

    model: Any
    config: Any
    ends: tuple[int, ...]
    seen: tuple[int, ...]
    speakers: Speakers
    thinker_size: int
    example: tuple[int, ...] = (0, 0)
    groups: int = 1

    @abc.abstractmethod
    def prompt(self, prompt: ThinkerPrompt, first: torch.Tensor, speaker: str) -> TalkerPrompt:
        """The first pass; ``first`` [1, hidden] is the answer's first row."""

    @abc.abstractmethod
    def reply(self) -> TalkerReply:
        """The answer of one request, before anything of it is there."""

    @abc.abstractmethod
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 [rows, codes] of ``states`` [rows, hidden]."""

    @abc.abstractmethod
    def step(self, steps: list[TalkerStep]) -> tuple[torch.Tensor, list[list[int]]]:
        """What the next pass gets, [rows, hidden]; and the frames that the newest codes begin."""


@dataclass(eq=False, slots=True, kw_only=True)
class Speech(Generation):
    """One request in progress: a row of the batch."""

    budget: int
    sampler: Sampler
    speaker: str
    reply: TalkerReply
    emit: Emit
    #: Parts of the answer that have come and are not rows yet, and whether it has ended.
    inbox: deque[ReplyPart] = field(default_factory=deque)
    ended: bool = False
    prompt: ThinkerPrompt | None = None
    rows: deque[torch.Tensor] = field(default_factory=deque)
    closed: bool = False
    """The rows behind the last one are among the rows."""
    shift: float = 0
    codes: list[int] = field(default_factory=list)
    #: [hidden], of the pass that gave the newest code.
    state: torch.Tensor | None = None
    frames: list[list[int]] = field(default_factory=list)
    finish_reason: str | None = None
    started: float = field(default_factory=time.perf_counter)
    first_code: float = 0.0

    @property
    def idle(self) -> bool:
        """Whether all that has come is used up."""
        return not (self.inbox or self.rows or (self.ended and not self.closed))

    def take(self) -> torch.Tensor:
        """The answer's next row, [1, hidden]."""
        if self.closed and len(self.rows) == 1:
            return self.rows[0]
        return self.rows.popleft()

    def prepare(self) -> bool:
        """Make rows of what has come; returns whether the next one is there."""
        ended = self.ended  # looked at first: what comes in between is not the end
        while self.inbox:
            part = self.inbox.popleft()
            self.prompt = part.prompt or self.prompt
            self.rows.extend(self.reply.push(part).unsqueeze(1))
        if ended and not self.closed and not self.inbox:
            if not self.codes and not self.rows:
                self.finish("stop")  # an answer without a word
            self.rows.extend(self.reply.end().unsqueeze(1))
            self.closed = True
        return bool(self.rows)

    def finish(self, reason: str) -> None:
        """It has said all."""
        self.finish_reason, self.finished = reason, True


class TalkerEngine(Engine):
    """Speech codes, autoregressively, one forward pass a step for all requests in flight.

    Input: ``reply`` of a thinker (:mod:`omniq.engines.omni.reply`), whole or by chunks: a step
    takes one row of it, and a request whose next row is not there yet sits the step out. Outputs:
    tensor ``codes`` (int64 [n], or [n, groups] where a frame has several, without the end; by
    chunks of ``stream_tokens`` frames), value
    ``finish_reason`` (``stop`` or ``length``). Parameter ``speaker`` is one of the model's voices.

    Results are independent of the other requests but for rounding; ``deterministic`` ones have a
    pass each.

    Engine arguments: ``stream_tokens`` (default 12), ``attn_implementation``, ``max_model_len``.
    """

    name = "omni-talker"
    arguments: ClassVar[frozenset[str]] = ENGINE_ARGS

    async def load(self) -> None:
        """Load the talker.

        Raises:
            ConfigError: folder or engine arguments are wrong.
        """
        await self.in_thread(self._load)
        self._loop: StepLoop[Speech] = StepLoop(self, self)

    def _load(self) -> None:
        args = check_engine_args(self.stage, self.arguments)
        self._every = whole_arg(self.stage, "stream_tokens", STREAM_TOKENS)
        folder = part_folder(self.stage)
        options: dict[str, Any] = {"dtype": torch_dtype(self.stage)}
        if "attn_implementation" in args:
            options["attn_implementation"] = args["attn_implementation"]
        with loading(self.stage, folder), engine_faults(f"loading {folder}"):
            adapter = resolve_name(family_of(folder).talker)
            self._talker: Talker = adapter(folder, self.device, **options)
        self._context = int(self._talker.config.max_position_embeddings)
        limit = whole_arg(self.stage, "max_model_len", self._context)
        self._context = min(self._context, limit)

    async def warmup(self) -> None:
        """Say a few codes."""
        prompt, size = self._talker.example, self._talker.thinker_size
        tensors = {
            "prompt_token_ids": torch.tensor(prompt, dtype=torch.int64),
            "prompt_positions": torch.arange(len(prompt)).expand(3, len(prompt)),
            "prompt_hidden_states": torch.zeros(len(prompt), size),
            "token_ids": torch.zeros(3, dtype=torch.int64),
            "hidden_states": torch.zeros(3, size),
        }
        params = {"max_tokens": WARMUP_TOKENS, "temperature": 0.0}
        inputs = {reply.NAME: StageInput(tensors=tensors)}
        await self.run(StageRequest("warmup", params), inputs, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Speak until an end code or ``max_tokens``."""
        speech = self._speech(request.params, emit)
        reading = asyncio.create_task(self._read(speech, inputs))
        self._loop.start(speech)
        try:
            send = partial(self._send, speech)
            await hand_on(speech, lambda: len(speech.frames), self._every, send)
        finally:
            self._loop.stop(speech)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        return StageOutput(
            values={"finish_reason": speech.finish_reason},
            tensors={"codes": {"codes": self._frames(speech, 0, len(speech.frames))}},
            metrics={
                "completion_tokens": len(speech.codes),
                "first_token_seconds": speech.first_code,
                "generation_seconds": time.perf_counter() - speech.started,
            },
        )

    async def unload(self) -> None:
        """Free the model."""
        await self._loop.close()
        await super().unload()
        del self._talker

    # -- one request -------------------------------------------------------------------------

    def _speech(self, params: Mapping[str, Any], emit: Emit) -> Speech:
        given = {k: v for k, v in params.items() if v is not None}
        deterministic = bool(given.pop("deterministic", False))
        speaker = self._talker.speakers.named(given.pop("speaker", None))
        sampling = Sampling.from_params(given)
        return Speech(
            budget=min(sampling.max_tokens or self._context, self._context),
            sampler=Sampler(sampling, self._talker.seen, end_ids=self._talker.ends),
            speaker=speaker,
            reply=self._talker.reply(),
            emit=emit,
            deterministic=deterministic,
        )

    async def _read(self, speech: Speech, inputs: Mapping[str, StageInput]) -> None:
        try:
            async for part in parts_of(inputs, self._talker.thinker_size):
                speech.inbox.append(part)
                self._loop.wake()
            speech.ended = True
        except Exception as exc:  # raised where the request is waited for
            speech.fault = speech.fault or exc
        self._loop.wake()

    def _frames(self, speech: Speech, start: int, stop: int) -> torch.Tensor:
        frames = torch.tensor(speech.frames[start:stop], dtype=torch.int64)
        groups = self._talker.groups
        return frames.reshape(-1, groups) if groups > 1 else frames.reshape(-1)

    async def _send(self, speech: Speech, start: int, stop: int, last: bool) -> None:
        speech.emit.progress(stop, speech.budget)
        codes = self._frames(speech, start, stop)
        await speech.emit.achunk("codes", tensors={"codes": codes}, last=last)

    # -- steps, on the model thread ------------------------------------------------------------

    def prefill(self, generation: Speech) -> tuple[Any, int]:
        """The thinker's prompt and the first code."""
        from transformers import DynamicCache  # noqa: PLC0415 - slow import, done by load

        speech = generation
        assert speech.prompt is not None, "it comes with the first row"
        prompt = self._talker.prompt(speech.prompt, speech.take(), speech.speaker)
        length = len(prompt.embeds)
        if length >= self._context:
            refuse_input(
                reply.NAME,
                f"must have at most {self._context - 1} tokens for the talker, has {length}",
            )
        speech.budget = min(speech.budget, self._context - length)
        speech.shift = prompt.positions.max().item() + 1 - length
        cache = DynamicCache(config=self._talker.config)
        states = self._forward(prompt.embeds[None], prompt.positions[:, None], cache)
        self._take(speech, states[0], self._talker.logits(states)[0])
        speech.first_code = time.perf_counter() - speech.started
        return cache, length

    def decode(self, generations: Sequence[Speech], past: Past) -> None:
        """One more code for each whose next row is there."""
        made = self._next([generations[i] for i in past.ready])
        embeds = made
        if len(past.ready) < len(generations):
            embeds = made.new_zeros(len(generations), made.shape[1])
            embeds[past.ready] = made
        shifts = torch.tensor([[speech.shift] for speech in generations])
        if past.positions is None:
            places = shifts + past.cache.get_seq_length()
        else:
            places = shifts.to(self.device) + past.positions
        more = {} if past.attention_mask is None else {"attention_mask": past.attention_mask}
        # The same along time, height and width.
        states = self._forward(embeds[:, None], places.expand(3, -1, -1), past.cache, **more)
        logits = self._talker.logits(states)
        for i in past.ready:
            self._take(generations[i], states[i], logits[i])

    def _next(self, speeches: list[Speech]) -> torch.Tensor:
        """What the next pass gets of those whose rows are there: [rows, hidden]."""
        steps = []
        for speech in speeches:
            assert speech.state is not None, "it comes with the code"
            row = speech.take()
            steps.append(TalkerStep(speech.codes[-1], speech.state, row, speech.sampler))
        embeds, frames = self._talker.step(steps)
        if self._talker.groups > 1:
            for speech, frame in zip(speeches, frames, strict=True):
                speech.frames.append(frame)
        return embeds

    def _forward(
        self, embeds: torch.Tensor, positions: torch.Tensor, cache: Any, **more: Any
    ) -> torch.Tensor:
        """The last states [rows, hidden] of ``embeds`` [rows, n, hidden]."""
        out = self._talker.model(
            inputs_embeds=embeds,
            position_ids=positions.to(self.device),
            past_key_values=cache,
            use_cache=True,
            **more,
        )
        states: torch.Tensor = out.last_hidden_state[:, -1]
        return states

    def _take(self, speech: Speech, state: torch.Tensor, logits: torch.Tensor) -> None:
        """The next code of ``speech``."""
        code = speech.pick(speech.sampler, logits)
        if speech.fault is not None:
            return
        if code in self._talker.ends:
            speech.finish("stop")
            return
        speech.codes.append(code)
        speech.state = state
        if self._talker.groups == 1:
            speech.frames.append([code])
        if len(speech.codes) >= speech.budget:
            speech.finish("length")

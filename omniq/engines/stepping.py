"""Generation in steps: one new prompt, then one more unit for every request in flight.

A unit is what a model appends at a time: a token, or a frame of several codes. The loop knows who
is in flight and whose keys and values stand in which row; a :class:`StepModel` computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from omniq.engines.base import Engine
from omniq.engines.faults import engine_faults
from omniq.engines.rows import Rows, settle
from omniq.engines.sampling import Sampler
from omniq.errors import OmniqError


@dataclass(eq=False, slots=True, kw_only=True)
class Generation:
    """One request in progress.

    The model thread sets ``finished``, or ``fault`` for what is wrong with this request alone.
    ``news`` is set on the loop after each step.
    """

    done: asyncio.Future[None] = field(init=False)
    deterministic: bool = False
    finished: bool = False
    fault: Exception | None = None
    unwanted: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def over(self) -> bool:
        """Whether no further unit is wanted."""
        return self.finished or self.unwanted or self.fault is not None

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing for it before :meth:`StepLoop.wake` is called."""
        return False

    def prepare(self) -> bool:
        """On the model thread before each step: take in what has come.

        Returns:
            whether its next unit can be computed; who waits for its input sits the step out.
        """
        return True

    def pick(self, sampler: Sampler, logits: torch.Tensor) -> int:
        """The next code of its row; where there is none (NaN), 0, and it is this request's fault
        alone.
        """
        try:
            return sampler.pick(logits)
        except OmniqError as exc:
            self.fault = self.fault or exc
            return 0


G = TypeVar("G", bound=Generation)
G_contra = TypeVar("G_contra", bound=Generation, contravariant=True)


@dataclass(frozen=True, slots=True)
class Past:
    """Keys and values of some rows, as the model's ``forward`` takes them.

    ``attention_mask`` int64 [rows, columns + 1] and ``positions`` int64 [rows, 1] are None for a
    row alone, whose cache says both. ``ready``: the rows whose next unit is wanted; what the others
    get is a hole that later masks hide.
    """

    cache: Any
    ready: Sequence[int]
    attention_mask: torch.Tensor | None = None
    positions: torch.Tensor | None = None


class StepModel(Protocol[G_contra]):
    """What computes; both methods run on the model thread without gradients."""

    def prefill(self, generation: G_contra) -> tuple[Any, int]:
        """The prompt and the first unit: the transformers cache, and the positions in it."""

    def decode(self, generations: Sequence[G_contra], past: Past) -> None:
        """One more unit for each that is ready, by one forward pass; ``past`` has their rows in
        that order.
        """


class StepLoop(Generic[G]):
    """Steps while anything is in flight, on the engine's model thread.

    Rows of one pass differ from rows alone by rounding; ``deterministic`` requests, and models
    whose cache has windows or recurrent states, have a pass each. A cancelled request is left out
    of the next step; one that waits for more input keeps its row and sits steps out. A pass that
    fails ends all requests in it; what fails between passes ends all requests of the step, as
    nobody knows any more whose rows stand where.
    """

    def __init__(self, engine: Engine, model: StepModel[G]) -> None:
        self._engine, self._model = engine, model
        self._waiting: list[G] = []
        self._rows: Rows[G] = Rows()
        self._new: list[G] = []
        self._steps: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()

    async def run(self, generation: G) -> None:
        """Step until the request has finished.

        Raises:
            Exception: its own fault, or that of a pass it was in.
        """
        self.start(generation)
        try:
            await generation.done
        finally:
            self.stop(generation)

    def start(self, generation: G) -> None:
        """Step for the request from now on; its ``done`` says when it has finished, or how not."""
        generation.done = asyncio.get_running_loop().create_future()
        self._waiting.append(generation)
        self.wake()
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._step_on())

    def stop(self, generation: G) -> None:
        """Nobody waits for the request any more."""
        generation.unwanted = True
        self.wake()

    def wake(self) -> None:
        """A request that was idle is so no more."""
        self._woken.set()

    async def close(self) -> None:
        """Wait for the last step."""
        if self._steps is not None:
            await asyncio.wait({self._steps})

    async def _step_on(self) -> None:
        while self._waiting or self._rows:
            self._woken.clear()
            if all(g.idle and not g.over for g in (*self._waiting, *self._rows)):
                await self._woken.wait()
            else:
                await self._step_and_tell()

    async def _step_and_tell(self) -> None:
        """A step, and word of it to all who wait."""
        waiting, stepping = list(self._waiting), list(self._rows)
        try:
            with engine_faults(f"stage {self._engine.stage.stage_id!r}"):
                await self._engine.in_thread(self._step)
        except Exception as exc:  # each request raises it where it is waited for
            self._rows.clear()
            for generation in (*stepping, *self._new):
                if not generation.over:
                    generation.fault = exc
        new, self._new = self._new, []  # whose prompts nobody keeps
        for generation in {*waiting, *stepping, *new}:
            if generation.fault is not None or generation.finished:
                settle(generation, generation.fault)
            else:
                generation.news.set()

    @torch.no_grad()
    def _step(self) -> None:
        """One new prompt, then a unit for all."""
        self._drop_over()
        for generation in list(self._waiting):
            if (begins := self._is_ready(generation)) or generation.over:
                self._waiting.remove(generation)
                self._new.append(generation)
            if begins:
                self._begin(generation)
                break
        ready = {generation for generation in self._rows if self._is_ready(generation)}
        self._drop_over()
        for generation, cache in self._rows.apart.items():
            if generation in ready:
                self._pass([generation], Past(cache, [0]))
        batched, batch = self._rows.batched, self._rows.batch
        rows = [i for i, generation in enumerate(batched) if generation in ready]
        if batch is not None and rows:
            device = self._engine.device
            mask, positions = batch.attention_mask(device), batch.positions(device)
            self._pass(batched, Past(batch.cache, rows, mask, positions))
            batch.stepped(rows)
        self._drop_over()

    def _is_ready(self, generation: G) -> bool:
        """Whether its next unit can be computed; what fails there is the request's own."""
        if generation.over:
            return False
        try:
            with engine_faults(f"stage {self._engine.stage.stage_id!r}"):
                return generation.prepare() and not generation.over
        except Exception as exc:
            generation.fault = generation.fault or exc
            return False

    def _pass(self, generations: Sequence[G], past: Past) -> None:
        """A forward pass; each request raises what it fails with where it is waited for."""
        try:
            with engine_faults(f"stage {self._engine.stage.stage_id!r}"):
                self._model.decode(generations, past)
        except Exception as exc:
            for generation in generations:
                if not generation.over:
                    generation.fault = exc

    def _begin(self, generation: G) -> None:
        """Prefill; what goes wrong there is the request's own, and the others go on."""
        try:
            with engine_faults(f"stage {self._engine.stage.stage_id!r}"):
                cache, length = self._model.prefill(generation)
        except Exception as exc:
            generation.fault = exc
            return
        if not generation.over:
            self._rows.add([generation], cache, length, apart=generation.deterministic)

    def _drop_over(self) -> None:
        """Take out rows that have ended or that nobody wants any more."""
        self._rows.keep(lambda generation: not generation.over)

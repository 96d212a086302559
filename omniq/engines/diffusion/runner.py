"""Runs transformer calls of many requests in as few forwards as memory allows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omniq.engines.base import Cancelled
from omniq.engines.diffusion.batch import Call, join, joined_rows, rows_of, split
from omniq.engines.diffusion.cache import CacheUse
from omniq.engines.diffusion.devices import Computed, Devices, Share
from omniq.engines.diffusion.step_times import StepTimes
from omniq.engines.families.base import Family
from omniq.engines.faults import engine_faults
from omniq.errors import EngineDead, EngineError, EngineOutOfMemory

Lora = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Work:
    """One request's pending calls.

    ``cached``: the cache policy applies, and the calls run alone. ``deterministic``: each call
    runs alone and is cut always in the same way, so that its bits depend on nothing else.
    ``lora``: names and weights.
    """

    request_id: str
    calls: Sequence[Call]
    lora: Lora = ()
    cached: bool = False
    deterministic: bool = False


class OmniDiffusionModelRunner:
    """The only place that runs the transformers.

    A forward that runs out of memory is halved until single rows are left; only a request whose
    one row does not fit fails. A forward that fails otherwise is repeated request by request, so
    that one request cannot take down its batch mates. Floating point rounds differently in forwards
    of other sizes: what must not depend on that is neither joined nor halved.

    Args:
        family: how calls join.
        times: told what each forward took, and what did not fit.
        devices: compute forwards; with several branches the rows of a forward are spread over them.
        rows_decide: the cache's decisions need all rows of a call in one forward.
        use_lora: makes exactly these adapters active.
    """

    def __init__(
        self,
        family: Family,
        times: StepTimes,
        devices: Devices,
        use_lora: Callable[[Lora], None],
        *,
        rows_decide: bool = False,
    ) -> None:
        self._family, self._times, self._devices = family, times, devices
        self._rows_decide = rows_decide
        self._uses: dict[str, CacheUse] = {}
        self._use_lora, self._active_lora = use_lora, Lora()
        self._timed: list[tuple[Hashable, int, Any, Any]] = []
        #: Forwards (those at the same time count as one), and rows in them, since the start.
        self.forwards = self.rows = 0

    def run(self, works: Sequence[Work], group: Hashable) -> list[list[Any] | Exception]:
        """Outputs of each work's calls, or why there are none.

        Args:
            works: all of one group: equal keys, LoRA and cache policy.
            group: their group, under which times are kept.

        Raises:
            EngineDead: the device can compute nothing more.
        """
        try:
            self._switch_lora(works[0].lora)
            return list(self._together(works, group))
        except EngineDead:
            raise
        except (EngineError, Cancelled) as exc:
            if len(works) == 1:
                return [exc]
        return [self.run([work], group)[0] for work in works]

    def end(self, request_id: str) -> CacheUse:
        """Forget a request that ended, however it did; returns what the cache did for it."""
        self._devices.drop(request_id)
        return self._uses.pop(request_id, CacheUse())

    def _together(self, works: Sequence[Work], group: Hashable) -> list[list[Any]]:
        if works[0].cached or works[0].deterministic:
            assert len(works) == 1, "such a request shares no forward"
            return [self._apart(works[0])]
        calls = [call for work in works for call in work.calls]
        outputs = self._forward(calls, group)
        shares, at = [], 0
        for work in works:
            shares.append(outputs[at : at + len(work.calls)])
            at += len(work.calls)
        return shares

    def _apart(self, work: Work) -> list[Any]:
        """A forward for each call; on several branches also for each row of a call.

        Cache state is of one branch: a guidance pair's second half always goes to the second.
        """
        branches = self._devices.branches
        cut = branches > 1 and not (work.cached and self._rows_decide)
        pieces = [self._rows_of(call) if cut else [call] for call in work.calls]
        waiting: list[list[tuple[int, Call]]] = [[] for _ in range(branches)]
        for number, parts in enumerate(pieces):
            for row, part in enumerate(parts):
                waiting[_place(part, row) % branches].append((number, part))
        outputs: list[list[Any]] = [[] for _ in pieces]
        while any(waiting):
            turn = [queue.pop(0) if queue else None for queue in waiting]
            with engine_faults("denoise step"):
                made = self._devices.forward([self._share(work, item) for item in turn])
            self._count(sum(item[1].rows for item in turn if item))
            self._note_use(work, made)
            for item, computed in zip(turn, made, strict=True):
                if item is not None and computed is not None:
                    outputs[item[0]].append(computed.output)
        return [parts[0] if len(parts) == 1 else joined_rows(parts) for parts in outputs]

    def _share(self, work: Work, item: tuple[int, Call] | None) -> Share | None:
        if item is None:
            return None
        call = item[1]
        state = (work.request_id, call.context) if work.cached else None
        return Share(call.module, call.kwargs, state)

    def _note_use(self, work: Work, made: Sequence[Computed | None]) -> None:
        if work.cached:
            use = self._uses.setdefault(work.request_id, CacheUse())
            use.forwards += sum(c is not None for c in made)
            use.hits += sum(c is not None and c.hit for c in made)

    def _forward(self, calls: Sequence[Call], group: Hashable) -> list[Any]:
        rows = sum(c.rows for c in calls)
        try:
            return self._one_forward(calls, group, rows)
        except EngineOutOfMemory:
            if rows == 1 or self._family.form is None:
                raise
            self._times.ran_out(group, rows)
        if len(calls) > 1:
            half = len(calls) // 2
            return self._forward(calls[:half], group) + self._forward(calls[half:], group)
        singles = rows_of(calls[0], self._family.form)
        return [joined_rows([self._forward([single], group)[0] for single in singles])]

    def _one_forward(self, calls: Sequence[Call], group: Hashable, rows: int) -> list[Any]:
        """One forward for all calls, or one by each branch for its part of their rows."""
        pieces, parts = self._parts(calls)
        with engine_faults("denoise step"):
            shares = [Share(p[0].module, join(p, self._family)) if p else None for p in parts]
            with self._timing(group, rows):
                made = self._devices.forward(shares)
            self._count(rows)
            of_piece: dict[int, Any] = {}
            for part, computed in zip(parts, made, strict=True):
                if computed is not None:
                    output = computed.output
                    outputs = [output] if len(part) == 1 else split(output, part)
                    of_piece |= {id(p): o for p, o in zip(part, outputs, strict=True)}
        answers = []
        for own in pieces:
            outputs = [of_piece[id(piece)] for piece in own]
            answers.append(outputs[0] if len(outputs) == 1 else joined_rows(outputs))
        return answers

    def _parts(self, calls: Sequence[Call]) -> tuple[list[list[Call]], list[list[Call]]]:
        """The pieces of each call, and which of them each branch gets."""
        branches = self._devices.branches
        if branches == 1:
            return [[call] for call in calls], [list(calls)]
        pieces = [self._rows_of(call) for call in calls]
        placed = [(_place(p, row), p) for own in pieces for row, p in enumerate(own)]
        # Conditional rows first: texts of one kind are padded to each other's length.
        placed.sort(key=lambda item: item[0])
        in_order = [piece for _, piece in placed]
        size = -(-len(in_order) // branches)
        return pieces, [in_order[i * size : (i + 1) * size] for i in range(branches)]

    def _rows_of(self, call: Call) -> list[Call]:
        form = self._family.form
        return [call] if call.rows == 1 or form is None else rows_of(call, form)

    def _count(self, rows: int) -> None:
        self.forwards += 1
        self.rows += rows

    def _switch_lora(self, lora: Lora) -> None:
        if lora != self._active_lora:
            with engine_faults("LoRA"):
                self._use_lora(lora)
            self._active_lora = lora

    @contextlib.contextmanager
    def _timing(self, group: Hashable, rows: int) -> Any:
        """Time a forward; on a CUDA device without waiting for it."""
        if not torch.cuda.is_initialized():
            started = time.perf_counter()
            yield
            self._times.record(group, rows, time.perf_counter() - started)
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._timed.append((group, rows, start, end))
        while self._timed and self._timed[0][3].query():
            key, n, begun, ended = self._timed.pop(0)
            self._times.record(key, n, begun.elapsed_time(ended) / 1000)


def _place(piece: Call, row: int) -> int:
    """0 for the conditional half of a guidance pair, 1 for the other one: rows or contexts."""
    return 1 if piece.context == "uncond" else row

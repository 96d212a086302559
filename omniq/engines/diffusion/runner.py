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
from omniq.engines.diffusion.cache import DiTCacheManager
from omniq.engines.diffusion.step_times import StepTimes
from omniq.engines.families.base import Family
from omniq.engines.faults import engine_faults
from omniq.errors import EngineDead, EngineError, EngineOutOfMemory

Lora = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Work:
    """One request's pending calls.

    ``cached``: the cache policy applies, and the calls run alone. ``deterministic``: each call
    runs alone and whole, so that its bits depend on nothing else. ``lora``: names and weights.
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
        cache: cache hooks of the transformers.
        use_lora: makes exactly these adapters active.
    """

    def __init__(
        self,
        family: Family,
        times: StepTimes,
        cache: DiTCacheManager,
        use_lora: Callable[[Lora], None],
    ) -> None:
        self._family, self._times, self._cache = family, times, cache
        self._use_lora, self._active_lora = use_lora, Lora()
        self._timed: list[tuple[Hashable, int, Any, Any]] = []
        #: Forwards, and rows in them, since the start.
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

    def _together(self, works: Sequence[Work], group: Hashable) -> list[list[Any]]:
        if works[0].cached:
            assert len(works) == 1, "cache decisions are made for one request alone"
            return [[self._cached(works[0], call) for call in works[0].calls]]
        if works[0].deterministic:
            assert len(works) == 1, "a deterministic request shares no forward"
            return [[self._one_forward([c], group, c.rows)[0] for c in works[0].calls]]
        calls = [call for work in works for call in work.calls]
        outputs = self._forward(calls, group)
        shares, at = [], 0
        for work in works:
            shares.append(outputs[at : at + len(work.calls)])
            at += len(work.calls)
        return shares

    def _cached(self, work: Work, call: Call) -> Any:
        with engine_faults("denoise step"), self._cache.step(work.request_id, call):
            self._count(1)
            return call.module(**call.kwargs)[0]

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
        with engine_faults("denoise step"):
            arguments = join(calls, self._family)
            with self._timing(group, rows), self._plain():
                output = calls[0].module(**arguments)[0]
            self._count(rows)
            return [output] if len(calls) == 1 else split(output, calls)

    def _plain(self) -> contextlib.AbstractContextManager[None]:
        """Requests without cache, while the transformer has cache hooks, take none of it."""
        return self._cache.unused()

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

"""Measured seconds and memory of a forward by batch size: whether a larger batch pays."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

#: A size's time is the median of so many newest samples: prompts of one group differ in length.
KEPT = 8
#: A size is judged when it has so many.
ENOUGH = 2
#: A larger batch must bring a row at least this much below the best smaller batch's time.
GAIN = 0.97
#: The first forwards of a size compile and allocate; their times are not kept.
UNTIMED = 1
#: Sizes that did not pay are sampled again after so many forwards: load changes, and a few samples
#: may mislead. A forward that pays too little costs far less than never batching.
RETRY_AFTER = 50
#: Sizes that did not fit are tried again after so many.
RETRY_MEMORY_AFTER = 500
MOST_KEYS = 256


@dataclass(slots=True)
class _Size:
    """Samples of one batch size; ``at``: the group's forwards when the newest was taken."""

    runs: int = 0
    at: int = 0
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def seconds(self) -> float | None:
        """Seconds of a forward; None before the first sample."""
        return statistics.median(self.samples) if self.samples else None


@dataclass(slots=True)
class _Group:
    """Samples of one kind of forward."""

    sizes: dict[int, _Size] = field(default_factory=dict)
    forwards: int = 0
    memory_limit: int | None = None
    limited_at: int = 0


class StepTimes:
    """Times by (key, rows); a key stands for calls of one shape.

    Args:
        max_rows: never allow more.
        always: allow ``max_rows`` whatever was measured (but not beyond the memory).
    """

    def __init__(self, max_rows: int, *, always: bool = False) -> None:
        self.max_rows, self._always = max_rows, always
        self._groups: dict[Hashable, _Group] = {}

    def record(self, key: Hashable, rows: int, seconds: float) -> None:
        """One forward of ``rows`` took so long."""
        group = self._group(key)
        size = group.sizes.setdefault(rows, _Size())
        group.forwards += 1
        size.runs += 1
        size.at = group.forwards
        if size.runs > UNTIMED:
            size.samples.append(seconds)

    def ran_out(self, key: Hashable, rows: int) -> None:
        """A forward of ``rows`` ran out of memory: half of it at most, for a while."""
        group = self._group(key)
        group.memory_limit, group.limited_at = max(rows // 2, 1), group.forwards

    def seconds(self, key: Hashable, rows: int) -> float | None:
        """Expected seconds of a forward, by the nearest measured size; None if none is."""
        known = [
            (abs(n - rows), n, s.seconds)
            for n, s in self._group(key).sizes.items()
            if s.seconds is not None
        ]
        if not known:
            return None
        _, n, seconds = min(known)
        return seconds * max(rows / n, 1.0)

    def limit(self, key: Hashable, least: int, available: int) -> int:
        """How many of ``available`` rows the next forward should have, at least ``least``.

        Sizes double from ``least``, the smallest request's, as long as each is measured to take
        less time a row than the smaller ones; a size with too few or old samples is tried.
        """
        group = self._group(key)
        most = max(min(self._room(group), available), least)
        if self._always:
            return most
        allowed, best = least, None
        for rows in _doubling(least, most):
            size = group.sizes.get(rows)
            if size is None or len(size.samples) < ENOUGH:
                return rows
            per_row = statistics.median(size.samples) / rows
            if best is not None and per_row > best * GAIN:
                if group.forwards - size.at >= RETRY_AFTER:
                    return rows
                break
            allowed, best = rows, per_row
        return allowed

    def _room(self, group: _Group) -> int:
        """Most rows by memory; what ran out once is tried again later, twice as large each time."""
        if group.memory_limit is None:
            return self.max_rows
        if group.forwards - group.limited_at >= RETRY_MEMORY_AFTER:
            group.memory_limit, group.limited_at = 2 * group.memory_limit, group.forwards
        return min(self.max_rows, group.memory_limit)

    def _group(self, key: Hashable) -> _Group:
        group = self._groups.pop(key, None) or _Group()
        self._groups[key] = group  # newest last
        while len(self._groups) > MOST_KEYS:
            self._groups.pop(next(iter(self._groups)))
        return group


def _doubling(least: int, most: int) -> list[int]:
    """``least``, twice that and so on below ``most``, then ``most``."""
    sizes = []
    while least < most:
        sizes.append(least)
        least *= 2
    return [*sizes, most]

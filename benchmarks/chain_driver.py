"""How ``chain.py`` drives a system: a window of requests, each answer checked; CPU time of all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import psutil
from common import now


class System(Protocol):
    """Three stages, ready to serve."""

    name: str

    @property
    def processes(self) -> list[int]:
        """Processes whose CPU time, with that of their children, counts beside the driver's."""

    def drive(self, numbers: range, in_flight: int) -> list[float]:
        """Serve these requests, so many at a time; seconds of each."""

    def close(self) -> None:
        """End all processes."""


def drive_window(
    numbers: range,
    in_flight: int,
    submit: Callable[[int], Any],
    wait: Callable[[Any], int],
) -> list[float]:
    """:meth:`System.drive` for a system with a blocking client; answers are taken in order."""
    rest, seconds = iter(numbers), []
    sent: deque[tuple[int, float, Any]] = deque()
    while True:
        while len(sent) < in_flight and (number := next(rest, None)) is not None:
            sent.append((number, now(), submit(number)))
        if not sent:
            return seconds
        number, began, handle = sent.popleft()
        assert wait(handle) == number, "another request's answer"
        seconds.append(now() - began)


def cpu_seconds(processes: list[int]) -> float:
    """CPU time of this process and of these with their children; the dead do not count."""
    total = sum(psutil.Process().cpu_times()[:2])
    for root in processes:
        try:
            family = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for process in family:
            try:
                total += sum(process.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
    return total

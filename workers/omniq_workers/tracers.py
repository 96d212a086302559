"""Celery's tracers, which settle a task whose outcome is known already."""

from __future__ import annotations

import logging
import time
from typing import Any

from celery.app.trace import build_tracer
from celery.app.trace import logger as trace_logger


class _Clock:
    """``monotonic`` for one tracer call: the first reading is the body's start, so that the
    runtimes in events and logs are the body's and not the tracer's.
    """

    start: float | None = None

    def __call__(self) -> float:
        start, self.start = self.start, None
        return start if start is not None else time.monotonic()


class Tracers:
    """Celery's tracers of one thread, by task.

    Args:
        quiet: no line in the log for each task that succeeds.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.clock = _Clock()
        self._quiet = quiet
        self._tracers: dict[str, Any] = {}

    def of(self, task: Any, hostname: str) -> Any:
        """The function that traces a call of ``task``."""
        found = self._tracers.get(task.name)
        if found is None:
            app = task.app
            level = trace_logger.level
            if self._quiet:  # a tracer asks only once whether it has to write
                trace_logger.setLevel(logging.WARNING)
            found = self._tracers[task.name] = build_tracer(
                task.name, task, app.loader, hostname, app=app, monotonic=self.clock
            )
            trace_logger.setLevel(level)
        return found

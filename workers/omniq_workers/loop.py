"""The asyncio loop that owns a worker's engine, on a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import faulthandler
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")
PULSE = 0.25
POLL = 0.1
#: So often, in seconds, the watchdog is told that the loop turns.
REARM = 1.0


class Interrupted(Exception):
    """The process was told to stop while it waited."""


class EngineLoop:
    """Starts with :meth:`start`; every other method may be called from any thread."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="engine-loop", daemon=True)
        self._last_pulse = time.monotonic()
        self._hang_limit: float | None = None
        self._armed = 0.0

    def start(self) -> None:
        """Run the loop."""
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self._pulse()
        self.loop.run_forever()

    def _pulse(self) -> None:
        self._last_pulse = time.monotonic()
        if self._last_pulse > self._armed + REARM:
            self._arm()
        self.loop.call_later(PULSE, self._pulse)

    def watch(self, limit: float) -> None:
        """End the process with status 1, and all threads' stacks on stderr, once the loop has not
        turned for ``limit`` seconds. Works while something holds Python's lock, too.
        """
        self._hang_limit = limit
        self._arm()

    def _arm(self) -> None:
        if self._hang_limit is not None:
            self._armed = time.monotonic()
            faulthandler.dump_traceback_later(self._hang_limit, exit=True)

    @property
    def silence(self) -> float:
        """Seconds since the loop last turned; above one it is blocked by something it runs."""
        return max(0.0, time.monotonic() - self._last_pulse - PULSE)

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Call ``function(*args)`` on the loop soon; also safe in a signal handler."""
        self.loop.call_soon_threadsafe(function, *args)

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Start ``work`` on the loop, as long as the process lives."""
        asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(
        self,
        work: Coroutine[Any, Any, T],
        *,
        timeout: float | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> T:
        """Run ``work`` on the loop and wait for it.

        Raises:
            TimeoutError: it took longer; it is cancelled.
            Interrupted: ``interrupted()`` came true meanwhile; it is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            # Short waits: signal handlers run between them on the main thread.
            done, _ = concurrent.futures.wait([future], timeout=POLL)
            if done:
                return future.result()
            if interrupted():
                future.cancel()
                raise Interrupted
            if deadline is not None and time.monotonic() > deadline:
                future.cancel()
                raise TimeoutError(f"not done within {timeout:g} s")

    def stop(self) -> None:
        """End the loop after what it is just doing."""
        if self._hang_limit is not None:
            self._hang_limit = None
            faulthandler.cancel_dump_traceback_later()
        if self._thread.is_alive():
            self.call(self.loop.stop)
            self._thread.join(1.0)

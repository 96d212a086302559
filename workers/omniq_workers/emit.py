"""What a running stage says, on its way to the job's event stream: thread-safe, never blocking."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from celery.utils.log import get_logger

from omniq.errors import BrokerUnavailable
from omniq.jobs.store import JobStore

logger = get_logger(__name__)

#: Least time between two writes of one run, in seconds.
PACE = 0.05
OUTAGE_WAIT = 1.0


class JobEmit:
    """An :class:`~omniq.engines.base.Emit` into the job store, at most 20 times a second.

    Progress that is overtaken is dropped, the last one never; previews too. Text that piles up goes
    as one piece. Everything is written by a task on the loop that entered this object as a context;
    it starts with the first thing that is said.

    Args:
        unwanted: called on the loop when the store answers that this run is no longer wanted.
    """

    def __init__(
        self, store: JobStore, job_id: str, stage: str, fence: int, unwanted: Callable[[], object]
    ) -> None:
        self._store, self._run = store, (job_id, stage, fence)
        self._unwanted = unwanted
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._progress: tuple[int, int] | None = None
        self._deltas: list[tuple[str, Any]] = []
        #: The newest of each picture.
        self._previews: dict[int, dict[str, Any]] = {}
        self._closed = False
        # Most runs say nothing: these are made with the first thing that is said.
        self._pump: asyncio.Task[None] | None = None
        self._news: asyncio.Event
        self._closing: asyncio.Event

    async def __aenter__(self) -> JobEmit:
        return self

    async def __aexit__(self, *_: object) -> None:
        """After :meth:`flush` nothing is left; a run that failed has nothing more to say."""
        with self._lock:
            self._progress, self._deltas, self._previews = None, [], {}
        await self._stop()

    # -- called by the engine, from any thread -----------------------------------------------

    def progress(self, step: int, total: int) -> None:
        """See :class:`~omniq.engines.base.Emit`."""
        with self._lock:
            self._progress = (step, total)
        self._loop.call_soon_threadsafe(self._look)

    def delta(self, output: str, value: Any) -> None:
        """See :class:`~omniq.engines.base.Emit`."""
        with self._lock:
            merged = _joined(self._deltas[-1], output, value) if self._deltas else None
            if merged is not None:
                self._deltas[-1] = (output, merged)
            else:
                self._deltas.append((output, value))
        self._loop.call_soon_threadsafe(self._look)

    def preview(self, value: dict[str, Any]) -> None:
        """See :class:`~omniq.engines.base.Emit`."""
        with self._lock:
            self._previews[value["image"]] = value
        self._loop.call_soon_threadsafe(self._look)

    # -- on the loop -------------------------------------------------------------------------

    async def flush(self) -> None:
        """Write what is still there; called when the engine has ended, before the stage does."""
        await self._stop()
        try:
            await self._write()
        except BrokerUnavailable as exc:
            logger.warning("the last progress of job %s is lost: %s", self._run[0], exc)

    def _look(self) -> None:
        if self._closed:
            return
        if self._pump is None:
            self._news, self._closing = asyncio.Event(), asyncio.Event()
            self._pump = asyncio.create_task(self._write_on())
        self._news.set()

    async def _stop(self) -> None:
        self._closed = True
        if self._pump is not None:
            self._closing.set()
            self._news.set()
            await self._pump

    async def _write_on(self) -> None:
        while not self._closing.is_set():
            await self._news.wait()
            self._news.clear()
            pause = PACE
            try:
                await self._write()
            except BrokerUnavailable as exc:
                logger.warning("progress of job %s is delayed: %s", self._run[0], exc)
                self._news.set()
                pause = OUTAGE_WAIT
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._closing.wait()

    async def _write(self) -> None:
        if not self._deltas and not self._previews and self._progress is None:
            return
        wanted = True
        while wanted and self._deltas:
            with self._lock:
                output, value = self._deltas.pop(0)
            try:
                wanted = await self._store.delta(*self._run, output, value)
            except BrokerUnavailable:
                with self._lock:
                    self._deltas.insert(0, (output, value))
                raise
        with self._lock:
            previews, self._previews = self._previews, {}
        for value in previews.values():
            wanted = wanted and await self._store.preview(*self._run, value)
        with self._lock:
            progress, self._progress = self._progress, None
        if wanted and progress is not None:
            wanted = await self._store.progress(*self._run, *progress)
        if not wanted:
            self._unwanted()


def _joined(last: tuple[str, Any], output: str, value: Any) -> dict[str, Any] | None:
    """Two pieces of text of one output as one; None if they are anything else.

    Where a stage makes several texts at once, ``index`` says which one a piece belongs to;
    ``logprobs`` are a list of the tokens that came with it.
    """
    name, before = last
    if name != output or not (_is_text(before) and _is_text(value)):
        return None
    if before.get("index") != value.get("index"):
        return None
    joined = {**before, "text": before["text"] + value["text"]}
    if "logprobs" in before or "logprobs" in value:
        joined["logprobs"] = [*before.get("logprobs", ()), *value.get("logprobs", ())]
    return joined


def _is_text(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("text"), str)
        and value.keys() <= {"text", "index", "logprobs"}
    )

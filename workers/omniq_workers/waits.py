"""Waiting for work on the loop: for so long, until it has stopped, or whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar

from omniq.errors import EngineDead

T = TypeVar("T")


async def to_the_end(work: Awaitable[T]) -> T:
    """The result of what must not be left half done. A cancellation meanwhile is not heard."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    return task.result()


async def ended(work: asyncio.Task[Any], seconds: float | None) -> bool:
    """Wait until a task has ended; False: it has not within so many seconds (None: for ever).

    As ``asyncio.wait`` of one task, with less to do for it.
    """
    loop = asyncio.get_running_loop()
    end: asyncio.Future[None] = loop.create_future()

    def set_end(*_: object) -> None:
        if not end.done():
            end.set_result(None)

    work.add_done_callback(set_end)
    timer = None if seconds is None else loop.call_later(seconds, set_end)
    try:
        await end
    finally:
        if timer is not None:
            timer.cancel()
        work.remove_done_callback(set_end)
    return work.done()


async def stopped(work: asyncio.Task[Any], limit: float) -> None:
    """Cancel an engine's run and wait until it has really stopped.

    Raises:
        EngineDead: it did not.
    """
    work.cancel()
    if not await ended(work, limit):
        raise EngineDead(f"the engine did not stop a request within {limit:g} s")
    if not work.cancelled():
        work.exception()  # retrieved: the outcome of a stopped run is nobody's

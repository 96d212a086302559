"""Waiting for a job without holding on to clients that have gone or a server that stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.types import Message

from omniq.jobs.model import JobRecord
from omniq_api.services import Services

T = TypeVar("T")

CANCEL_AGAIN = 0.05


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


async def wait_for_end(
    services: Services, receive: Callable[[], Awaitable[Message]], job_id: str, seconds: float
) -> JobRecord:
    """The job once it has ended, or as it is when ``seconds`` are over or the server stops.

    The wait sleeps on the job's event stream.

    Args:
        receive: ASGI receive of a request whose body has been read.

    Raises:
        ClientGone: the client disconnected first.
        JobNotFound: unknown job.
        BrokerUnavailable: the broker went away.
    """
    ended = asyncio.ensure_future(services.store.wait(job_id))
    gone = asyncio.ensure_future(_disconnected(receive))
    stopping = asyncio.ensure_future(services.stopping.wait())
    try:
        await asyncio.wait(
            {ended, gone, stopping}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if ended.done():
            return ended.result()
        if gone.done():
            gone.result()
            raise ClientGone(job_id)
    finally:
        abandon(ended, gone, stopping)
    return await services.store.get(job_id)


async def _disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_set(items: AsyncIterator[T], event: asyncio.Event) -> AsyncGenerator[T]:
    """``items``, ended early as soon as ``event`` is set."""
    stop = asyncio.ensure_future(event.wait())
    following: asyncio.Future[T] | None = None
    try:
        while not event.is_set():
            following = asyncio.ensure_future(anext(items))
            await asyncio.wait({following, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            try:
                item = following.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        abandon(stop, *([following] if following else []))


def abandon(*futures: asyncio.Future[Any]) -> None:
    """Cancel what still runs, without waiting for it, until it has really ended.

    redis-py sends through ``asyncio.wait_for``, which before Python 3.12 drops a cancellation that
    arrives together with the result (CPython issue 86296); the cancelled read would then go on
    until its own time-out. It does not wait because its callers are often being cancelled
    themselves.
    """
    loop = asyncio.get_running_loop()
    for future in futures:
        if future.done():
            if not future.cancelled():
                future.exception()  # retrieved: nobody else will look
        else:
            future.cancel()
            loop.call_later(CANCEL_AGAIN, abandon, future)

"""Waiting for a job without holding on to clients that have gone or a server that stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.types import Message

from omniq.errors import BrokerUnavailable, JobNotFound
from omniq.jobs.model import JobRecord
from omniq_api.services import Services

logger = logging.getLogger("omniq.api")
T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


async def wait_for_end(
    services: Services, receive: Callable[[], Awaitable[Message]], job_id: str, seconds: float
) -> JobRecord:
    """The job once it has ended, or as it is when ``seconds`` are over or the server stops.

    Args:
        receive: ASGI receive of a request whose body has been read.

    Raises:
        ClientGone: the client disconnected first.
        JobNotFound: unknown job.
        BrokerUnavailable: the broker went away.
    """
    return await unless_gone(receive, services.store.wait(job_id, seconds))


async def unless_gone(receive: Callable[[], Awaitable[Message]], work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; it is cancelled when the client hangs up.

    Raises:
        ClientGone: the client disconnected first.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        gone.result()
        raise ClientGone
    finally:
        working.cancel()
        gone.cancel()


async def give_up(services: Services, jobs: Iterable[JobRecord]) -> None:
    """Cancel jobs for whose results nobody waits any more.

    Those of a request with an idempotency key go on: it may come again for them.
    """
    if services.idempotency_key is not None:
        return
    for job in jobs:
        try:
            await services.store.cancel(job.id)
        except (BrokerUnavailable, JobNotFound) as exc:
            logger.warning("job %s, which nobody waits for, goes on: %s", job.id, exc)


async def _disconnected(receive: Callable[[], Awaitable[Message]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

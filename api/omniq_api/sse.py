"""A job's events as server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import orjson
from starlette.responses import StreamingResponse

from omniq.errors import BrokerUnavailable, JobNotFound
from omniq.jobs.model import JobEvent
from omniq_api.waiting import until_set

logger = logging.getLogger("omniq.api")

HEARTBEAT = 15.0
RECONNECT_MS = 2000
LARGEST_ID_PART = 2**64 - 1


class EventStreamResponse(StreamingResponse):
    """Headers that keep proxies from buffering or storing the stream."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncGenerator[bytes]) -> None:
        super().__init__(content, headers={"cache-control": "no-store", "x-accel-buffering": "no"})


def check_event_id(value: str) -> str:
    """``value``, if Redis takes it as a stream id.

    Raises:
        ValueError: it does not.
    """
    parts = value.split("-")
    if len(parts) > 2 or not all(
        p.isascii() and p.isdigit() and len(p) <= 20 and int(p) <= LARGEST_ID_PART for p in parts
    ):
        raise ValueError("must be the id of an event of this job, like 1700000000000-0")
    return value


def encode(event: JobEvent) -> bytes:
    """One event on the wire; JSON never holds a raw line break."""
    data = orjson.dumps(event.model_dump(mode="json", exclude={"id"}))
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event.id.encode(), event.type.encode(), data)


async def stream(
    events: AsyncIterator[JobEvent | None], stopping: asyncio.Event
) -> AsyncGenerator[bytes]:
    """The body: events with heartbeats, up to the final event or until the server stops.

    A stream that ends early for any reason is resumed by the client, here or at another replica,
    with the last id it has seen.
    """
    yield b"retry: %d\n\n" % RECONNECT_MS
    try:
        async with aclosing(until_set(events, stopping)) as live:
            async for event in live:
                yield encode(event) if event is not None else b": heartbeat\n\n"
    except (BrokerUnavailable, JobNotFound) as exc:
        # The status line has been sent: what remains is to end, so that the client asks again.
        logger.warning("an event stream ended early: %s", exc)

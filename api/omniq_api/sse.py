"""A job's events as server-sent events (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omniq.errors import BrokerUnavailable, InvalidRequest, JobNotFound
from omniq.jobs.model import JobEvent
from omniq.jobs.watcher import parse_id
from omniq_api.revocation import KeyRevoked
from omniq_api.waiting import ClientGone, unless_gone

logger = logging.getLogger("omniq.api")

HEARTBEAT = 15.0
RECONNECT_MS = 2000
REVOKED = "key.revoked"


class EventStreamResponse(Response):
    """Events with heartbeats, up to the final event or until the server stops.

    A stream that ends early for any reason is resumed by the client, here or at another replica,
    with the last id it has seen. The headers keep proxies from buffering or storing it.

    Args:
        events: closed when the stream ends or the client hangs up.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[JobEvent | None]) -> None:
        # Not Response's own: that would promise the length of a body.
        self.status_code, self.background, self.events = 200, None, events
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        with suppress(ClientGone):
            await unless_gone(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        async with aclosing(stream(self.events)) as body:
            async for piece in body:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def check_event_id(value: str) -> str:
    """``value``, if Redis takes it as a stream id.

    Raises:
        ValueError: it does not.
    """
    try:
        parse_id(value)
    except InvalidRequest:
        raise ValueError("must be the id of an event of this job, like 1700000000000-0") from None
    return value


def encode(event: JobEvent) -> bytes:
    """One event on the wire; JSON never holds a raw line break."""
    data = orjson.dumps(
        {"type": event.type, "stage": event.stage, "time": event.time, "data": event.data}
    )
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event.id.encode(), event.type.encode(), data)


async def stream(events: AsyncGenerator[JobEvent | None]) -> AsyncGenerator[bytes]:
    """The body of a stream; closes ``events`` with itself."""
    yield b"retry: %d\n\n" % RECONNECT_MS
    try:
        async with aclosing(events):
            async for event in events:
                yield encode(event) if event is not None else b": heartbeat\n\n"
    except KeyRevoked as exc:
        data = orjson.dumps({"type": REVOKED, "time": time.time(), "data": {"message": str(exc)}})
        yield b"event: %b\ndata: %b\n\n" % (REVOKED.encode(), data)
    except (BrokerUnavailable, JobNotFound) as exc:
        # The status line has been sent: what remains is to end, so that the client asks again.
        logger.warning("an event stream ended early: %s", exc)

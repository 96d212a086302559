"""Answers that are sent while their jobs run; a client that hangs up cancels the jobs."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from omniq.errors import BrokerUnavailable, JobNotFound
from omniq.jobs.model import JobRecord
from omniq_api.openai_compat import running
from omniq_api.openai_compat.faults import OpenAIError
from omniq_api.openai_error import SERVER, error_body
from omniq_api.services import Services
from omniq_api.waiting import ClientGone, give_up, unless_gone

logger = logging.getLogger("omniq.api")

#: What is sent in turn; None when nothing has come for a while.
Chunks = AsyncGenerator[Any]


@dataclass(frozen=True, slots=True)
class Wire:
    """How chunks are written.

    ``error`` writes a fault behind what has been sent; None: there is no way to say it, and the
    connection breaks off, so that no client takes a part for the whole.
    """

    media_type: str
    chunk: Callable[[Any], bytes]
    end: bytes
    error: Callable[[dict[str, Any]], bytes] | None


def sse_message(chunk: Any) -> bytes:
    """A server-sent event of JSON; a comment when there is none."""
    return b": keep-alive\n\n" if chunk is None else b"data: %b\n\n" % orjson.dumps(chunk)


#: Objects as server-sent events up to ``[DONE]``.
EVENTS = Wire("text/event-stream", sse_message, b"data: [DONE]\n\n", sse_message)


async def streamed(
    request: Request,
    services: Services,
    jobs: Sequence[JobRecord],
    chunks: Chunks,
    wire: Wire = EVENTS,
) -> Response:
    """A stream that begins with the first chunk: what fails before is an answer with its status."""
    begun = False
    try:
        first = await unless_gone(request.receive, _first(chunks))
        begun = True
        return _ChunkResponse(services, jobs, first, chunks, wire)
    except ClientGone:
        return running.gone()
    finally:
        if not begun:
            await chunks.aclose()
            await give_up(services, jobs)


async def _first(chunks: Chunks) -> Any:
    return await anext(chunks)


class _ChunkResponse(Response):
    """Chunks up to their end; a client that hangs up cancels the jobs."""

    def __init__(
        self, services: Services, jobs: Sequence[JobRecord], first: Any, chunks: Chunks, wire: Wire
    ) -> None:
        # Not Response's own: that would promise the length of a body.
        self.status_code, self.background, self.media_type = 200, None, wire.media_type
        self._services, self._jobs, self._first = services, jobs, first
        self._chunks, self._wire = chunks, wire
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        done = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            done = await unless_gone(receive, self._write(send))
        except ClientGone:
            pass
        finally:
            if not done:
                await give_up(self._services, self._jobs)

    async def _write(self, send: Send) -> bool:
        """Whether the jobs have ended well."""
        fault: dict[str, Any] | None = None
        async with aclosing(self._chunks) as chunks:
            try:
                await self._send(send, self._first)
                async for chunk in chunks:
                    await self._send(send, chunk)
            except OpenAIError as exc:
                fault = exc.body
            except (BrokerUnavailable, JobNotFound) as exc:
                # The status line has been sent: the error is the stream's last word.
                logger.warning("a stream ended early: %s", exc)
                fault = error_body("a part this service needs is down", SERVER)
        if fault is not None:
            if self._wire.error is None:
                logger.warning("a stream of %s is broken off: %s", self.media_type, fault)
                return False
            await self._send_bytes(send, self._wire.error(fault))
        await send({"type": "http.response.body", "body": self._wire.end, "more_body": False})
        return fault is None

    async def _send(self, send: Send, chunk: Any) -> None:
        await self._send_bytes(send, self._wire.chunk(chunk))

    async def _send_bytes(self, send: Send, body: bytes) -> None:
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})

"""HTTP/1.1 as uvicorn reads it, with bounds for clients that nobody knows yet.

uvicorn trusts that a proxy stands in front: heads of requests, and what stands around a body, may
be of any length and take any time; a client that reads nothing keeps its answer in memory for
ever; one that sends a second request before it hangs up goes unnoticed.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.events import TimerHandle
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MOST_HEAD = 64 << 10
"""Bytes of a request's head, and of all else that is no body; beyond what one read brings."""
HEAD_SECONDS = 30.0
"""From a connection's first moment, or a request's first byte, to the end of the request's head."""
STALL_SECONDS = 60.0
"""Within which a client must take some of what waits to be sent to it."""

#: What strangers send is told to them, not to the log; errors of the application are.
logger = logging.getLogger("omniq.api.http")
logger.setLevel(logging.ERROR)


class GuardedProtocol(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = logger
        #: The request that is being answered; :attr:`cycle` is the one that came last.
        self._running: RequestResponseCycle | None = None
        #: Bytes since anything of a request was whole.
        self._loose = 0
        self._late: TimerHandle | None = None
        self._stall: TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell all requests of the connection, not only the last one."""
        self._stop(self._late)
        self._stop(self._stall)
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        for cycle in (self._running, *waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self.transport.is_closing():
            return
        if self._is_idle:
            self._expect_head()
        self._loose += len(data)
        super().data_received(data)
        if self._loose > MOST_HEAD:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._loose = max(self._loose, 1)  # what is left of a read that ended another request

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._loose = 0
        self._stop(self._late)
        self._late = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._loose = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._loose = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Called by uvicorn; what has come of the next request meanwhile has its time from now."""
        super().on_response_complete()
        if self._loose and not self.transport.is_closing():
            self._expect_head()

    def pause_writing(self) -> None:
        """The client does not keep up: see whether it takes anything."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """It does."""
        super().resume_writing()
        self._stop(self._stall)
        self._stall = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_idle(self) -> bool:
        """Whether nothing is being answered: what comes begins a request."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._refuse, b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        """Close the connection, with an answer if none is on its way."""
        if self.transport.is_closing():
            return
        if not self._is_idle:
            self.transport.abort()
            return
        if self._loose:
            head = b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head % status)
        self.transport.close()

    def _watch_reader(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(STALL_SECONDS, self._look_at_reader)

    def _look_at_reader(self) -> None:
        if self.transport.get_write_buffer_size() >= self._unsent:
            self.transport.abort()
        else:
            self._watch_reader()

    @staticmethod
    def _stop(timer: TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()

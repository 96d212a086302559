"""Hearing of changed Redis keys: many waiters, one connection, nothing blocked on the server.

The server is asked to tell when a key that was read over this connection changes or is deleted
(``CLIENT TRACKING``). Reading and being told of the next change is one step on the server, so a
waiter that watches first and reads then misses nothing. Where the server does not tell, waiters
look again every ``POLL`` seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omniq.redis_client import Client, broker_errors, line

logger = logging.getLogger(__name__)

POLL = 0.25


class KeyNews:
    """Reads of keys, and news of their next change; one event loop."""

    def __init__(self, redis: Client) -> None:
        self._waiting: dict[bytes, set[asyncio.Event]] = {}
        self._line = line(
            redis,
            greeting=[("CLIENT", "TRACKING", "ON")],
            on_push=self._told,
            on_lost=lambda _: self._wake_all(),
            on_refused=self._refused,
        )
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._timer is not None:
            self._timer.cancel()
        self._line.close()

    async def ask(self, *command: str | int) -> Any:
        """Carry out one read command, in RESP3.

        Raises:
            BrokerUnavailable: no answer.
        """
        with broker_errors():
            return await self._line.ask(*command)

    @contextmanager
    def watch(self, *names: str) -> Iterator[asyncio.Event]:
        """An event that is set when one of the keys changes after it was read, or might have."""
        changed = asyncio.Event()
        found = [name.encode() for name in names]
        for key in found:
            self._waiting.setdefault(key, set()).add(changed)
        try:
            yield changed
        finally:
            for key in found:
                waiting = self._waiting[key]
                waiting.discard(changed)
                if not waiting:
                    del self._waiting[key]

    def _told(self, message: list[Any]) -> None:
        if message[0] != b"invalidate":
            return
        changed = message[1]
        if changed is None:  # the whole database was emptied
            self._wake_all()
            return
        for key in changed:
            for event in self._waiting.get(key, ()):
                event.set()

    def _wake_all(self) -> None:
        for waiting in self._waiting.values():
            for event in waiting:
                event.set()

    def _refused(self, reason: Exception) -> None:
        if self._timer is None:
            logger.warning("the broker does not tell of changes, streams are polled: %s", reason)
            self._poll()

    def _poll(self) -> None:
        self._wake_all()
        self._timer = asyncio.get_running_loop().call_later(POLL, self._poll)

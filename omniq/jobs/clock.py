"""The time that all hosts agree on: the broker's."""

from __future__ import annotations

import time

from omniq.errors import BrokerUnavailable
from omniq.redis_client import Client, broker_errors

#: Asked for again when older than so many seconds: a server may be replaced, or its clock set.
FRESH = 5.0


class ServerClock:
    """Unix time by the clock of the server, for what one host writes and another one reads.

    Between two questions it goes by this host's monotonic clock, so that a step of its wall clock
    (a first synchronisation, a virtual machine that was paused) moves no deadline.
    """

    def __init__(self, redis: Client) -> None:
        self._redis = redis
        self._asked = -FRESH
        self._ahead: float | None = None
        """Seconds that the server's clock is ahead of this host's monotonic one."""

    async def now(self) -> float:
        """Unix time in seconds, as exact as an answer of the server is quick.

        Raises:
            BrokerUnavailable: it was never asked before, and cannot be now.
        """
        if self._ahead is None or time.monotonic() > self._asked + FRESH:
            try:
                self._ahead = await self._ask()
            except BrokerUnavailable:
                if self._ahead is None:
                    raise
            self._asked = time.monotonic()
        return time.monotonic() + self._ahead

    async def _ask(self) -> float:
        before = time.monotonic()
        with broker_errors():
            seconds, micros = await self._redis.time()
        return float(seconds) + micros / 1e6 - (before + time.monotonic()) / 2

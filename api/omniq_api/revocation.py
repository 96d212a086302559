"""Streams that have begun, and whose tenant's key is revoked meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from omniq.errors import BrokerUnavailable, NotReady
from omniq.redis_client import Client
from omniq.tenants import TenantKey, TenantKeys

T = TypeVar("T")

#: Seconds between two looks at a stream's key; all streams of a process share one look.
LOOK = 2.0
MESSAGE = "this API key has been revoked"


class KeyRevoked(Exception):
    """The key with which a stream was asked for is good no more."""

    def __init__(self) -> None:
        super().__init__(MESSAGE)


class Revocations:
    """What this process knows of keys that streams were asked for with."""

    def __init__(self, redis: Client) -> None:
        self._keys = TenantKeys(redis)
        self._good: dict[str, tuple[float, bool]] = {}

    async def until_revoked(
        self, key: TenantKey | None, items: AsyncGenerator[T]
    ) -> AsyncGenerator[T]:
        """``items``, which are closed with this, as long as the key is good; None: the operator's.

        Raises:
            KeyRevoked: it is not any more, for :data:`LOOK` and a second at the most.
        """
        async with aclosing(items):
            if key is None:
                async for item in items:
                    yield item
                return
            looked = time.monotonic()
            waiting: asyncio.Task[T] | None = None
            try:
                while True:
                    if waiting is None:
                        waiting = asyncio.create_task(_next(items))
                    await asyncio.wait({waiting}, timeout=max(0, looked + LOOK - time.monotonic()))
                    if time.monotonic() >= looked + LOOK:
                        if not await self._is_good(key):
                            raise KeyRevoked
                        looked = time.monotonic()
                    if waiting.done():
                        done, waiting = waiting, None
                        try:
                            item = done.result()
                        except StopAsyncIteration:
                            return
                        yield item
            finally:
                if waiting is not None:
                    waiting.cancel()
                    await asyncio.wait({waiting})

    async def _is_good(self, key: TenantKey) -> bool:
        until, good = self._good.get(key.id, (0.0, True))
        if time.monotonic() > until:
            try:
                good = await self._keys.get(key.id) is not None
            except (BrokerUnavailable, NotReady):
                return True  # the stream ends by the first, if it lasts; the other is there still
            now = time.monotonic()
            self._good = {i: known for i, known in self._good.items() if known[0] > now - LOOK}
            self._good[key.id] = (now + 1, good)
        return good


async def _next(items: AsyncGenerator[T]) -> T:
    return await anext(items)

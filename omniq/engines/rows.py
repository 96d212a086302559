"""What AR engines share that step: whose keys and values stand where, and how requests are told."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from omniq.engines.batch_cache import BatchCache, can_batch

R = TypeVar("R", bound=Hashable)


class Rows(Generic[R]):
    """What is in flight: rows of one batch, and those that have a forward pass each.

    Attributes:
        batch: keys and values of ``batched``; None: there are none.
        batched: in the order of the batch's rows.
        apart: the others, with their caches.
    """

    def __init__(self) -> None:
        self.batch: BatchCache | None = None
        self.batched: list[R] = []
        self.apart: dict[R, Any] = {}

    def __iter__(self) -> Iterator[R]:
        yield from self.batched
        yield from self.apart

    def __len__(self) -> int:
        return len(self.batched) + len(self.apart)

    def add(self, rows: Sequence[R], cache: Any, length: int, *, apart: bool) -> None:
        """Take in rows that go on from the same prompt.

        Args:
            rows: one or several.
            cache: of transformers, one row; it is used up.
            length: tokens in it.
            apart: whether they may not share a forward pass; they do not if the cache cannot be
                joined either.
        """
        if apart or not can_batch(cache):
            for i, row in enumerate(rows):
                self.apart[row] = copy.deepcopy(cache) if i + 1 < len(rows) else cache
            return
        joined = BatchCache(cache, length)
        if len(rows) > 1:
            joined.repeat(len(rows))
        if self.batch is None:
            self.batch = joined
        else:
            self.batch.join(joined)
        self.batched += rows

    def keep(self, stays: Callable[[R], bool]) -> None:
        """Take out all others."""
        self.apart = {row: cache for row, cache in self.apart.items() if stays(row)}
        kept = [i for i, row in enumerate(self.batched) if stays(row)]
        if self.batch is None or len(kept) == len(self.batched):
            return
        self.batched = [self.batched[i] for i in kept]
        if kept:
            self.batch.keep(kept)
        else:
            self.batch = None

    def clear(self) -> None:
        """Take out everything."""
        self.batch, self.batched, self.apart = None, [], {}


class Request(Protocol):
    """One that somebody waits for on the loop: ``done`` is its end, ``news`` is set after each step
    that was for it, and with the end.
    """

    done: asyncio.Future[None]
    news: asyncio.Event


def settle(request: Request, fault: Exception | None) -> None:
    """Wake whoever waits for the request, unless it has ended before; on the loop."""
    request.news.set()
    if request.done.done():
        return
    if fault is None:
        request.done.set_result(None)
    else:
        request.done.set_exception(fault)


async def hand_on(
    request: Request,
    count: Callable[[], int],
    every: int,
    send: Callable[[int, int, bool], Awaitable[None]],
) -> None:
    """Send what a request makes while it is made, ``every`` units at once, and the rest at its end.

    Args:
        request: is stepped elsewhere.
        count: units that there are by now.
        every: units of a chunk, at least.
        send: from which unit, up to which, and whether it is the last chunk.

    Raises:
        Exception: what the request ends with.
    """
    sent = 0
    while not request.done.done():
        await request.news.wait()
        request.news.clear()
        made = count()
        if made - sent >= every and not request.done.done():
            await send(sent, made, False)
            sent = made
    await request.done
    await send(sent, count(), True)

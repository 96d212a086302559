"""Chunks of one output on their way from an engine, in any thread, to the engine loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omniq.engines.base import Cancelled
from omniq.errors import EngineError

if TYPE_CHECKING:
    import torch

#: Chunks that may wait here until they are written; the stream itself holds more.
PENDING = 4


@dataclass(frozen=True, slots=True)
class Item:
    """A chunk as the engine gave it; ``piece``: the client shall see it too, if it may."""

    value: Any
    tensors: Mapping[str, torch.Tensor]
    last: bool = False
    piece: bool = True


class Channel:
    """A short queue, emptied in order by a task on the loop.

    Args:
        thread: identity of the thread that runs ``loop``.
        deliver: writes one chunk; waits as long as it must. What it raises ends the channel, and is
            raised to the engine.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: int,
        deliver: Callable[[Item], Awaitable[None]],
    ) -> None:
        self._loop, self._thread, self._deliver = loop, thread, deliver
        self._queue: deque[Item] = deque()
        self._room = threading.Condition()
        self._change = asyncio.Event()
        self._stopped: Exception | None = None
        self._pump: asyncio.Task[None] | None = None
        self.taken = 0
        self.closed = False

    # -- any thread --------------------------------------------------------------------------

    def put(self, item: Item) -> None:
        """See :meth:`omniq.engines.base.Emit.chunk`."""
        with self._room:
            while not self._accept(item):
                if threading.get_ident() == self._thread:
                    raise EngineError("too many chunks at once on the loop: await emit.achunk()")
                self._room.wait()
        self._loop.call_soon_threadsafe(self._wake)

    def _accept(self, item: Item) -> bool:
        if self._stopped is not None:
            raise self._stopped
        if self.closed:
            raise EngineError("a chunk after the last one")
        if len(self._queue) >= PENDING:
            return False
        self._queue.append(item)
        self.taken += 1
        self.closed = item.last
        return True

    # -- on the loop -------------------------------------------------------------------------

    async def aput(self, item: Item) -> None:
        """See :meth:`omniq.engines.base.Emit.achunk`."""
        while True:
            with self._room:
                if self._accept(item):
                    break
            await self._changed()
        self._wake()

    async def drain(self) -> None:
        """Return when everything is written; raises what writing raised."""
        while True:
            with self._room:
                if self._stopped is not None:
                    raise self._stopped
                if not self._queue:
                    return
            await self._changed()

    async def stop(self) -> None:
        """Take and write nothing more; an engine thread that waits here goes on."""
        self._end(Cancelled("the run has ended"))
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)

    async def _changed(self) -> None:
        """Every change sets the event; who waits looks again."""
        self._change.clear()
        await self._change.wait()

    def _wake(self) -> None:
        idle = self._pump is None or self._pump.done()
        if idle and self._queue and self._stopped is None:
            self._pump = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            while self._queue:
                await self._deliver(self._queue[0])
                with self._room:
                    self._queue.popleft()
                    self._room.notify()
                self._change.set()
        except Exception as exc:  # the engine gets it with its next chunk, or at its end
            self._end(exc)

    def _end(self, why: Exception) -> None:
        with self._room:
            self._stopped = self._stopped or why
            self._room.notify_all()
        self._change.set()

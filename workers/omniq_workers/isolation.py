"""A run that may be poison is by itself: nothing else runs beside it.

A request that kills every engine takes along what runs beside it, again and again: all of them are
delivered as often as it is. Which one it was shows when each runs alone.
"""

from __future__ import annotations

import asyncio


class Isolation:
    """Runs side by side, or one by itself. Used on one loop."""

    def __init__(self) -> None:
        self._running = 0
        self._alone = self._closed = False
        #: Those who want to be alone; nobody else begins meanwhile.
        self._wanting = 0
        self._sleepers: list[asyncio.Future[None]] = []

    async def enter(self, *, alone: bool) -> None:
        """Wait until a run may begin; :meth:`leave` has to follow."""
        self._wanting += alone
        try:
            while self._closed or self._alone or (self._running if alone else self._wanting):
                sleeper = asyncio.get_running_loop().create_future()
                self._sleepers.append(sleeper)
                await sleeper
        finally:
            self._wanting -= alone
            if alone and not self._wanting:
                self._wake()  # should this be cancelled, the others need not wait for it
        self._running += 1
        self._alone = alone

    def leave(self) -> None:
        """A run has ended."""
        self._running -= 1
        self._alone = False
        self._wake()

    def close(self) -> None:
        """The engine is dead: nothing more begins; who waits does so until cancelled."""
        self._closed = True

    def _wake(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

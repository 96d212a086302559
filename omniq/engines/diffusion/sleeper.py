"""Lets a stage that has had no request for a while sleep, and wakes it for the next one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from omniq.engines.diffusion.memory import Weights
from omniq.errors import OmniqError

if TYPE_CHECKING:
    from omniq.engines.base import Engine

logger = logging.getLogger(__name__)


class Sleeper:
    """Sleep and wake of one engine's weights, on the engine's loop.

    Args:
        engine: whose model thread moves the weights.
        weights: they.
    """

    def __init__(self, engine: Engine, weights: Weights) -> None:
        self._engine, self.weights = engine, weights
        self._lock = asyncio.Lock()
        self._busy = 0
        self._timer: asyncio.TimerHandle | None = None
        self._falling: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[float]:
        """Inside, the weights are where they work; gives the seconds that waking took, or 0.

        Raises:
            EngineOutOfMemory: the device has no room for them now.
        """
        self._busy += 1
        self._disarm()
        try:
            yield await self.wake()
        finally:
            self._busy -= 1
            if not self._busy and self.weights.sleep_after is not None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self.weights.sleep_after, self._fall_asleep)

    async def sleep(self) -> bool:
        """Whether it sleeps now; False while requests are in flight.

        Raises:
            EngineOutOfMemory: the machine's memory has no room for the weights.
        """
        async with self._lock:
            if not self._busy and not self.weights.asleep:
                await self._engine.in_thread(self.weights.sleep)
                logger.info("stage %s sleeps", self._engine.stage.stage_id)
            return self.weights.asleep

    async def wake(self) -> float:
        """Wake up if asleep; the seconds that it took.

        Raises:
            EngineOutOfMemory: the device has no room for the weights now.
        """
        # Only an idle stage falls asleep, so the model thread has nothing else to do meanwhile.
        async with self._lock:
            if not self.weights.asleep:
                return 0.0
            began = time.monotonic()
            await self._engine.in_thread(self.weights.wake)
            seconds = time.monotonic() - began
            logger.info("stage %s woke up in %.2f s", self._engine.stage.stage_id, seconds)
            return seconds

    async def close(self) -> None:
        """Fall asleep no more; waits for a move that has begun."""
        self._disarm()
        if self._falling is not None:
            await asyncio.wait([self._falling])

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fall_asleep(self) -> None:
        self._falling = asyncio.create_task(self._sleep_if_it_can())

    async def _sleep_if_it_can(self) -> None:
        try:
            await self.sleep()
        except OmniqError as exc:
            # It serves on as it is, and tries again after the next request.
            logger.warning("stage %s stays awake: %s", self._engine.stage.stage_id, exc.message)

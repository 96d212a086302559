"""A worker's entry in the registry of live workers, renewed from the engine loop.

A loop that does not turn does not beat either: the entry expires, and others see that the worker is
gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from celery.utils.log import get_logger

from omniq.blobs.choice import BlobUse
from omniq.errors import BrokerUnavailable
from omniq.jobs.workers import WorkerInfo, WorkerRegistry, WorkerState
from omniq.settings import get_settings

logger = get_logger(__name__)

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Heartbeat:
    """Says every ``settings.heartbeat`` seconds what the worker is and does.

    Args:
        info: the entry's fixed part; state, times and numbers are filled in here.
        measure: returns tasks in flight now, and the last log lines.
        blobs: says what the worker's blobs are; None while it has no store.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        info: WorkerInfo,
        measure: Callable[[], tuple[int, list[str]]],
        blobs: Callable[[], BlobUse | None],
    ) -> None:
        self._registry, self._info = registry, info
        self._measure, self._blobs = measure, blobs
        self._task: asyncio.Task[None] | None = None
        self._silent = False

    @property
    def info(self) -> WorkerInfo:
        """The entry as it was last written."""
        return self._info

    async def start(self) -> None:
        """Beat from now on."""
        await self._beat()
        self._task = asyncio.create_task(self._beat_on())

    async def set(
        self,
        state: WorkerState,
        reason: str | None = None,
        *,
        engine: str | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        """Change state and say so at once."""
        update = {"state": state, "reason": reason, "since": time.time()}
        if engine is not None:
            update["engine"] = engine
        if max_in_flight is not None:
            update["max_in_flight"] = max_in_flight
        self._info = self._info.model_copy(update=update)
        await self._beat()

    async def stop(self, *, remove: bool) -> None:
        """Beat no more; with ``remove`` the entry goes too, else it stays until it expires."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if remove:
            try:
                await self._registry.remove(self._info.id)
            except BrokerUnavailable as exc:
                logger.warning("the registry entry is left to expire: %s", exc)

    async def _beat_on(self) -> None:
        while True:
            await asyncio.sleep(get_settings().heartbeat)
            await self._beat()

    async def _beat(self) -> None:
        in_flight, lines = self._measure()
        self._info = self._info.model_copy(
            update={
                "seen": time.time(),
                "in_flight": in_flight,
                "last_log": lines,
                "rss_bytes": resident_bytes(),
                "blobs": self._blobs(),
            }
        )
        try:
            await self._registry.beat(self._info)
        except BrokerUnavailable as exc:
            if not self._silent:
                logger.warning("heartbeats are not heard: %s", exc)
            self._silent = True
        else:
            self._silent = False


def first_info(
    worker_id: str, pipeline: str, stage: str, host: str, devices: list[str]
) -> WorkerInfo:
    """The entry of a worker that has just started to load."""
    now = time.time()
    return WorkerInfo(
        id=worker_id,
        pipeline=pipeline,
        stage=stage,
        state=WorkerState.LOADING,
        host=host,
        hostname=socket.gethostname(),
        pid=os.getpid(),
        devices=devices,
        since=now,
        seen=now,
    )


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE

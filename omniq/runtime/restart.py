"""``omniq worker --restart``: a worker that ends is started again, where no supervisor does so."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from omniq.errors import BrokerUnavailable
from omniq.jobs.workers import WorkerInfo, WorkerRegistry, WorkerState
from omniq.redis_client import connect
from omniq.settings import get_settings

logger = logging.getLogger(__name__)

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
#: Waits vary by so much both ways: workers of one broken host do not all come back at once.
JITTER = 0.25
#: A worker that has run for so many seconds had started well: waits begin anew.
RAN_WELL = 60.0
#: What cannot be served as it is configured will not be, the next time.
BAD_INPUT = 2


class Restarter:
    """Runs a command again and again until it ends by itself or a signal comes.

    While it is down the registry has an entry that says why, so that readiness is red with the
    reason. The child ends with this process, even by SIGKILL.

    Args:
        arguments: of ``omniq``.
        pipeline, stage: what the command serves.
    """

    def __init__(self, arguments: Sequence[str], pipeline: str, stage: str) -> None:
        self._arguments, self._pipeline, self._stage = arguments, pipeline, stage
        self._name = f"{pipeline}.{stage}.restart-{os.getpid()}@{socket.gethostname()}"
        self._child: subprocess.Popen[bytes] | None = None
        self._stop = False
        self._failures = 0

    def run(self) -> int:
        """Returns the exit status: that of a child that ended with 0, with a configuration error,
        or after a signal.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)
        while True:
            began = time.monotonic()
            self._child = subprocess.Popen(
                [sys.executable, "-m", "omniq", "--parent", str(os.getpid()), *self._arguments],
                # A terminal's Ctrl-C reaches this process, which passes it on once.
                start_new_session=True,
            )
            if self._stop:  # it came before there was a child
                self._child.terminate()
            code = self._child.wait()
            if self._stop or code in (0, BAD_INPUT):
                return code
            ran = time.monotonic() - began
            self._failures = 1 if ran > RAN_WELL else self._failures + 1
            wait = self._wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
            logger.error("the worker ended %s; it is started again in %.1f s", how, wait)
            asyncio.run(self._down(how, wait))
            if self._stop:
                return 128 + signal.SIGTERM if code < 0 else code

    def _wait(self) -> float:
        wait = min(FIRST_WAIT * 2 ** (self._failures - 1), LONGEST_WAIT)
        return wait * random.uniform(1 - JITTER, 1 + JITTER)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    async def _down(self, how: str, wait: float) -> None:
        """Say for so many seconds that the worker is down."""
        redis = connect()
        registry, deadline = WorkerRegistry(redis), time.monotonic() + wait
        since = time.time()
        try:
            reason = f"the worker ended {how}"
            if said := await self._said(registry):
                reason += f" ({said})"
            while not self._stop and (left := deadline - time.monotonic()) > 0:
                try:
                    await registry.beat(
                        self._info(f"{reason}; started again in {left:.0f} s", since)
                    )
                except BrokerUnavailable as exc:
                    logger.warning("nobody is told that the worker is down: %s", exc.message)
                until = min(left, get_settings().heartbeat)
                while not self._stop and until > 0:
                    await asyncio.sleep(min(0.1, until))
                    until -= 0.1
            await registry.remove(self._name)
        except BrokerUnavailable as exc:
            logger.warning("the registry entry of this worker is left to expire: %s", exc.message)
        finally:
            await redis.aclose()

    async def _said(self, registry: WorkerRegistry) -> str | None:
        """Why the child went, if it could say so itself."""
        assert self._child is not None
        host, pid = socket.gethostname(), self._child.pid
        try:
            for worker in await registry.all(self._pipeline):
                if (worker.hostname, worker.pid) == (host, pid):
                    await registry.remove(worker.id)  # it is not there any more
                    return worker.reason
        except BrokerUnavailable:
            pass  # said when the entry is written
        return None

    def _info(self, reason: str, since: float) -> WorkerInfo:
        return WorkerInfo(
            id=self._name,
            pipeline=self._pipeline,
            stage=self._stage,
            state=WorkerState.FAILED,
            reason=reason,
            host="",
            hostname=socket.gethostname(),
            pid=os.getpid(),
            since=since,
            seen=time.time(),
        )

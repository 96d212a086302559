"""A whole omniq system as children of this Python process."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import httpx

from omniq.config import PipelineConfig, get_pipeline
from omniq.errors import NotReady
from omniq.runtime.private_broker import PrivateBroker
from omniq.runtime.processes import (
    ProcessSpec,
    api_process,
    child_command,
    worker_processes,
)
from omniq.runtime.ready import StageReadiness, not_ready, wait_ready
from omniq.runtime.spawn import Child
from omniq.settings import get_settings

T = TypeVar("T")
logger = logging.getLogger(__name__)

STOP_GRACE = 5.0
"""Seconds a worker may take beyond its drain time before it is killed."""


class LocalSystem:
    """One worker per stage of a pipeline, a private broker unless one is configured, maybe an API.

    Nothing outlives this process: :meth:`close` stops everything in order, the interpreter's exit
    calls it, and if this process is killed the kernel tells the children to stop.

    Args:
        pipeline: name of an available pipeline.
        devices: by stage id, the devices of its worker (default: as the stage configures).
        api: start the HTTP API too, on ``OMNIQ_API_HOST``/``OMNIQ_API_PORT``.
        ready_timeout: seconds until every stage must be ready; default ``OMNIQ_READY_TIMEOUT``.
        on_progress: called with stage and state when a stage's state changes; default: logged.
    """

    def __init__(
        self,
        pipeline: str,
        *,
        devices: Mapping[str, Sequence[str]] | None = None,
        api: bool = False,
        ready_timeout: float | None = None,
        on_progress: Callable[[str, str], None] | None = None,
    ) -> None:
        self.pipeline: PipelineConfig = get_pipeline(pipeline)
        self._devices = dict(devices or {})
        self._with_api = api
        self._ready_timeout = ready_timeout
        self._on_progress = on_progress or self._log_progress
        self._broker: PrivateBroker | None = None
        self._children: list[Child] = []
        self._closing = False
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def start(self) -> LocalSystem:
        """Start everything and wait until every stage is ready.

        Raises:
            NotReady: a process ended, or the time is up; says which stage, its state, its last log
                lines, its device and the machine's memory. Nothing is left running.
            BrokerUnavailable: the private broker does not start.
        """
        atexit.register(self.close)
        try:
            if get_settings().embedded or PrivateBroker.in_use():
                self._broker = PrivateBroker.acquire()
            workers = {
                self._spawn(self._with_devices(spec)).pid
                for spec in worker_processes(self.pipeline)
            }
            if self._with_api:
                self._spawn(api_process())
            timeout = self._ready_timeout or get_settings().ready_timeout
            _in_own_loop(
                wait_ready(
                    self.pipeline,
                    timeout,
                    pids=workers,
                    on_change=self._on_progress,
                    check=self._check_while_starting,
                )
            )
            if self._with_api:
                self._wait_for_api(timeout)
        except BaseException:
            self.close()
            raise
        return self

    def check(self) -> None:
        """Raise NotReady if one of the processes has ended."""
        self._check_while_starting([])

    def close(self) -> None:
        """Stop workers and API, then the broker. May be called more than once, by any thread."""
        if self._owner != os.getpid():  # a fork's copy owns nothing
            return
        with self._lock:
            self._closing = True
            children, self._children = self._children, []
            broker, self._broker = self._broker, None
        atexit.unregister(self.close)
        for child in children:
            child.terminate()
        deadline = time.monotonic() + get_settings().drain_seconds + STOP_GRACE
        for child in children:
            if not child.wait(max(0.1, deadline - time.monotonic())):
                logger.warning("%s did not stop in time and was killed", child.name)
            child.close()
        if broker is not None:
            broker.release()

    def __enter__(self) -> LocalSystem:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _spawn(self, spec: ProcessSpec) -> Child:
        with self._lock:
            self._refuse_if_closing()
            child = Child(spec.name, child_command(spec), os.environ)
            self._children.append(child)
            return child

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise NotReady("the system is being closed")

    def _with_devices(self, spec: ProcessSpec) -> ProcessSpec:
        devices = self._devices.get(spec.name)
        if not devices:
            return spec
        return ProcessSpec(spec.name, (*spec.args, "--devices", ",".join(devices)))

    def _log_progress(self, stage: str, state: str) -> None:
        logger.info("%s/%s is %s", self.pipeline.name, stage, state)

    def _check_while_starting(self, stages: list[StageReadiness]) -> None:
        self._refuse_if_closing()
        for child in self._children:
            if child.exit_code is not None:
                lines = [f"process {child.name} {child.describe_exit()}; its last output:"]
                lines += [f"    {line}" for line in child.last_lines()]
                raise not_ready(
                    stages or [StageReadiness(child.name)], f"process {child.name} ended", lines
                )
            child.trim_log()
        for stage in stages:
            if stage.state == "failed":
                raise not_ready([stage], "its worker cannot serve", [])

    def _wait_for_api(self, timeout: float) -> None:
        settings = get_settings()
        url = f"http://{settings.api_host}:{settings.api_port}/health"
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            try:
                if httpx.get(url, timeout=2.0).is_success:
                    return
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise NotReady(f"the API does not answer at {url}") from None
            time.sleep(0.1)


def _in_own_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end, also where the calling thread's own loop runs (notebooks)."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="omniq-wait")
    try:
        return pool.submit(asyncio.run, work).result()
    finally:
        pool.shutdown(wait=False)  # interrupted by Ctrl-C: close() makes it give up by itself

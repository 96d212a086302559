"""Celery's worker program as omniq runs it, by ``omniq worker`` and by ``celery -A omniq worker``.

A first SIGTERM or SIGINT drains (:meth:`omniq_workers.pool.EnginePool.on_stop`), a second one ends
the process at once; its messages are then delivered again when their leases lapse.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

from celery import bootsteps
from celery.apps.worker import Worker, install_cry_handler
from celery.platforms import EX_OK
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.strategy import logger as strategy_logger

import omniq_workers.revoke  # noqa: F401 - replaces Celery's command
from omniq import keys
from omniq.config import available_pipelines
from omniq.errors import ConfigError
from omniq_workers.devices import pin
from omniq_workers.events import StageDispatcher
from omniq_workers.leases import Leases
from omniq_workers.logs import RecentLines
from omniq_workers.service import StageService
from omniq_workers.transport import StageConnection

logger = get_logger(__name__)

#: Two signals this close are one request to stop: a terminal and a supervisor may both send it.
SAME_REQUEST = 0.5
#: The engine gets so long to unload; a supervisor may kill 5 s after its signal.
CLOSE_SECONDS = 1.0
THREADS_SECONDS = 0.2


class ServiceStep(bootsteps.StartStopStep):
    """Worker bootstep between pool and consumer: hands the engine's window to the consumer."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, w: Any, **kwargs: Any) -> None:
        super().__init__(w, **kwargs)

    def create(self, w: Any) -> None:
        """The pool exists, nothing runs yet."""
        if w.app.service is not None:
            w.app.service.pool = w.pool

    def start(self, w: Any) -> None:
        """The engine is loaded; the consumer has not started."""
        if w.app.service is not None:
            w.prefetch_multiplier = w.consumer.prefetch_multiplier = w.app.service.max_in_flight
            w.consumer.initial_prefetch_count = w.app.service.max_in_flight


class StageWorker(Worker):
    """A worker that serves the stage whose queue it consumes, or only control tasks."""

    def __init__(self, app: Any = None, hostname: str | None = None, **kwargs: Any) -> None:
        # Workers know each other by omniq's registry.
        kwargs.update(without_gossip=True, without_mingle=True)
        self._stop_asked: float | None = None
        super().__init__(app, hostname, **kwargs)

    def on_init_blueprint(self) -> None:
        """Logging is up; steps and service are decided before the parts are made."""
        super().on_init_blueprint()
        self.app.amqp.Connection = StageConnection
        self.app.events.dispatcher_cls = StageDispatcher
        self.app.steps["worker"].add(ServiceStep)
        self.app.steps["consumer"].add(Leases)
        if self.app.service is None:
            self.app.service = self._service_of_queues()
        if self.app.service is not None:
            logging.getLogger().addHandler(self.app.service.lines)
            # A line for each task; the job's events say the same.
            strategy_logger.setLevel(logging.WARNING)

    def _service_of_queues(self) -> StageService | None:
        """The service of the one stage queue among those that this worker consumes, if any."""
        found = [
            (pipeline, stage)
            for pipeline in available_pipelines().values()
            for stage in pipeline.stages
            if keys.stage_queue(pipeline.name, stage.stage_id) in self.app.amqp.queues.consume_from
        ]
        if not found:
            return None
        if len(found) > 1:
            names = ", ".join(f"{p.name}.{s.stage_id}" for p, s in found)
            raise ConfigError(f"one worker serves one stage, not {len(found)}: {names}")
        pipeline, stage = found[0]
        devices, device = pin(stage.devices)
        return StageService(
            self.app,
            pipeline,
            stage,
            worker_id=self.hostname,
            devices=devices,
            device=device,
            lines=RecentLines(),
        )

    def install_platform_tweaks(self, worker: Any) -> None:
        """Signal handlers: omniq's for stopping, Celery's SIGUSR1 that logs all stacks."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        install_cry_handler()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._stop_asked is None:
            self._stop_asked = now
            state.should_stop = EX_OK
            if self.pool is not None:
                self.pool.wake_hub()
        elif now - self._stop_asked > SAME_REQUEST:
            os._exit(128 + number)

    def start(self) -> None:
        """Run until told to stop; afterwards nothing of this worker is left."""
        try:
            super().start()
        finally:
            self._close()

    def _close(self) -> None:
        loop = self.pool.loop
        try:
            if self.app.service is not None:
                loop.run(self.app.service.stop(), timeout=CLOSE_SECONDS)
        except TimeoutError:
            logger.warning("the engine did not unload within %.1f s", CLOSE_SECONDS)
        loop.stop()
        _leave_no_thread(self.exitcode or EX_OK)


def end_process(code: int) -> NoReturn:
    """Exit without taking the interpreter apart, which takes seconds once torch is loaded."""
    atexit._run_exitfuncs()  # closes logs, and saves coverage
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_no_thread(code: int) -> None:
    """End the process here if a thread that Python would wait for does not end."""
    deadline = time.monotonic() + THREADS_SECONDS
    while alive := [t.name for t in threading.enumerate() if not t.daemon and t.ident != _me()]:
        if time.monotonic() > deadline:
            logger.warning("exit with threads still at work: %s", ", ".join(alive))
            end_process(code)
        time.sleep(0.02)


def _me() -> int:
    return threading.get_ident()

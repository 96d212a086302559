"""The engine of a worker and what lives beside it on the loop, from loading to unloading."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine
from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery.platforms import EX_FAILURE
from celery.utils.log import get_logger
from celery.worker import state as worker_state
from kombu.exceptions import OperationalError

from omniq import keys
from omniq.config import OmniStageConfig, PipelineConfig
from omniq.errors import BlobError, BrokerUnavailable, EngineDead, OmniqError
from omniq.jobs.reconcile import Reconciler
from omniq.jobs.store import JobStore
from omniq.jobs.workers import WorkerRegistry, WorkerState
from omniq.outputs import MultimodalOutputProcessor
from omniq.settings import get_settings
from omniq.streams import ChunkStreams
from omniq_workers.cancel import listen
from omniq_workers.heartbeat import Heartbeat, first_info
from omniq_workers.intake import Intake
from omniq_workers.logs import RecentLines
from omniq_workers.pieces import Pieces
from omniq_workers.pool import CannotStart
from omniq_workers.stage_io import StageIO
from omniq_workers.stage_run import StageRunner
from omniq_workers.windows import Windows

if TYPE_CHECKING:
    from omniq.blobs import BlobRouter
    from omniq.celery import OmniqCelery
    from omniq.engines.base import Engine

logger = get_logger(__name__)

READY_EVENT = "stage-ready"
GC_THRESHOLDS = (10_000, 20, 20)


class StageService:
    """One stage's engine in this worker process.

    Args:
        devices: what was pinned, for people.
        device: torch device for the engine.
    """

    def __init__(
        self,
        app: OmniqCelery,
        pipeline: PipelineConfig,
        stage: OmniStageConfig,
        *,
        worker_id: str,
        devices: list[str],
        device: str,
        lines: RecentLines,
    ) -> None:
        self.app, self.pipeline, self.stage = app, pipeline, stage
        self.worker_id, self.devices, self.device = worker_id, devices, device
        self.lines = lines
        self.engine: Engine | None = None
        self.pool: Any = None
        self._router: BlobRouter | None = None
        self._store: JobStore | None = None
        self._streams: ChunkStreams | None = None
        self._heartbeat: Heartbeat | None = None
        self._failed = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def max_in_flight(self) -> int:
        """The engine's admission window; the configured one before it is loaded."""
        return self.engine.max_in_flight if self.engine else self.stage.max_in_flight

    @property
    def _heart(self) -> Heartbeat:
        assert self._heartbeat is not None, "beats from the start on"
        return self._heartbeat

    # -- start (on the loop, before anything is consumed) --------------------------------------

    async def start(self) -> None:
        """Load and warm up the engine, then report ready.

        Raises:
            CannotStart: the engine could not be loaded; log and registry say why.
        """
        from omniq.blobs import BlobRouter, host_identity  # noqa: PLC0415 - imports torch

        store = self._store = JobStore.from_settings()
        registry = WorkerRegistry(store.redis)
        host = host_identity()
        self._heartbeat = Heartbeat(
            registry,
            first_info(self.worker_id, self.pipeline.name, self.stage.stage_id, host, self.devices),
            lambda: (len(self.pool.flights) if self.pool else 0, self.lines.last()),
            lambda: self._router.use() if self._router else None,
        )
        await self._heart.start()
        began = time.monotonic()
        try:
            processor = MultimodalOutputProcessor()
            for name, output in self.pipeline.outputs_of(self.stage.stage_id).items():
                processor.check(name, output)
            self._router = await asyncio.to_thread(BlobRouter.from_settings)
            self.engine = await self._load()
        except Exception as exc:  # whatever a model library raises, people get the reason
            await self._load_failed(exc)
            raise CannotStart(str(exc)) from exc
        io = StageIO(
            self.pipeline,
            self.stage.stage_id,
            router=self._router,
            processor=processor,
            store=store,
            registry=registry,
            host=host,
        )
        self._streams = ChunkStreams(store.redis)
        runner = StageRunner(
            self.stage,
            self.engine,
            store=store,
            io=io,
            windows=Windows(
                self.pipeline,
                self.stage.stage_id,
                streams=self._streams,
                io=io,
                pieces=Pieces(
                    self.pipeline.outputs_of(self.stage.stage_id),
                    streams=self._streams,
                    store=store,
                    processor=processor,
                ),
            ),
            worker_id=self.worker_id,
            dead=self._engine_died,
        )
        self.app.stage_runner = runner
        self._background("cancel listener", listen(runner.cancel_job, runner.look_for_cancelled))
        reconciler = Reconciler(store, self.pipeline)
        self._background("reconciler", reconciler.run(self.worker_id))
        self._background("garbage collection", self._collect_garbage(self._router))
        _calm_collector()
        await self._ready(time.monotonic() - began)

    async def _load(self) -> Engine:
        # Imports the model library, which takes seconds: not on the loop, which has to beat.
        create = await asyncio.to_thread(import_module, "omniq.engines.registry")
        engine: Engine = await asyncio.to_thread(create.create_engine, self.stage, self.device)
        self.engine = engine  # unloaded at the end even if loading fails halfway
        await self._heart.set(WorkerState.LOADING, engine=engine.name)
        logger.info("loading %s on %s by engine %s", self.stage.model, self.device, engine.name)
        await engine.load()
        await engine.warmup()
        return engine

    async def _load_failed(self, exc: Exception) -> None:
        self._failed = True
        reason = exc.message if isinstance(exc, OmniqError) else f"{type(exc).__name__}: {exc}"
        # A configuration error explains itself; anything else needs its traceback.
        logger.error(
            "stage %s of %s cannot start: %s",
            self.stage.stage_id,
            self.pipeline.name,
            reason,
            exc_info=None if isinstance(exc, OmniqError) else exc,
        )
        if isinstance(exc, OmniqError) and exc.hint:
            logger.error("hint: %s", exc.hint)
        await self._heart.set(WorkerState.FAILED, reason)

    async def _ready(self, seconds: float) -> None:
        await self._heart.set(WorkerState.READY, max_in_flight=self.max_in_flight)
        logger.info(
            "stage_ready pipeline=%s stage=%s seconds=%.2f",
            self.pipeline.name,
            self.stage.stage_id,
            seconds,
        )
        await asyncio.to_thread(self._send_ready_event, seconds)

    def _send_ready_event(self, seconds: float) -> None:
        try:
            with self.app.events.default_dispatcher(hostname=self.worker_id) as dispatcher:
                dispatcher.send(
                    READY_EVENT,
                    pipeline=self.pipeline.name,
                    stage=self.stage.stage_id,
                    seconds=seconds,
                )
        except OperationalError as exc:
            logger.warning("event %s was not sent: %s", READY_EVENT, exc)

    def intake(self, **options: Any) -> Intake:
        """What takes the stage's messages on the loop; ``options`` are the rest of its own."""
        assert self._store is not None, "it is asked for once the service has started"
        return Intake(
            self._store.redis,
            keys.stage_queue(self.pipeline.name, self.stage.stage_id),
            self.worker_id,
            max_deliveries=self.stage.retry.max_deliveries,
            **options,
        )

    # -- while it serves ---------------------------------------------------------------------

    def _background(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside the engine; a worker in which it breaks ends and is replaced."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (exc := task.exception()) is not None:
                logger.critical("the %s broke", name, exc_info=exc)
                self._fail(f"the {name} broke: {exc!r}")

        task = asyncio.create_task(work)
        task.add_done_callback(ended)
        self._tasks.append(task)

    async def _collect_garbage(self, router: BlobRouter) -> None:
        """Free shared memory of ended jobs and of dead processes on this machine, now and then."""
        while True:
            try:
                await asyncio.to_thread(router.collect)
            except (BlobError, BrokerUnavailable) as exc:
                logger.warning("garbage is collected later: %s", exc)
            await asyncio.sleep(get_settings().heartbeat)

    def _engine_died(self, exc: EngineDead) -> None:
        logger.critical("the engine is dead: %s", exc.message)
        self._fail(exc.message)

    def _fail(self, reason: str) -> None:
        """End the worker with a failure code; tasks in flight go back to the queue."""
        if self._failed:
            return
        self._failed = True
        self._tasks.append(asyncio.create_task(self._heart.set(WorkerState.FAILED, reason)))
        worker_state.should_stop = EX_FAILURE
        self.pool.wake_hub()

    async def draining(self) -> None:
        """The worker takes no more tasks and is about to end."""
        if not self._failed:
            await self._heart.set(WorkerState.DRAINING)

    # -- stop (on the loop, after everything was settled or returned) ----------------------------

    async def stop(self) -> None:
        """Unload the engine and leave nothing: blobs that others still need move to Redis."""
        self.app.stage_runner = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._router is not None:
            try:
                await asyncio.to_thread(self._router.spill)
            except (BlobError, BrokerUnavailable) as exc:
                logger.warning("blobs of this worker stay in shared memory: %s", exc)
            self._router.close()
        if self._heartbeat is not None:
            # A failure stays to be read until it expires.
            await self._heartbeat.stop(remove=not self._failed)
        if self.engine is not None:
            await self.engine.unload()
        if self._streams is not None:
            self._streams.close()
        if self._store is not None:
            await self._store.close()
        await asyncio.get_running_loop().shutdown_default_executor()


def _calm_collector() -> None:
    """Keep the garbage collector from looking through what is there by now, over and over: engine
    and libraries stay, and every thread stands still meanwhile.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)

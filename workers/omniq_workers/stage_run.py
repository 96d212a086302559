"""What a worker does with one stage task: begin, fetch inputs, run the engine, store, finish."""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from celery.exceptions import Ignore
from celery.utils.log import get_logger

from omniq.config import OmniStageConfig
from omniq.engines.base import Engine, StageInput, StageOutput, StageRequest
from omniq.errors import (
    BrokerUnavailable,
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    EngineError,
    InvalidRequest,
    JobNotFound,
    OmniqError,
    StageTimeout,
)
from omniq.jobs.model import JobState, StageGrant, StageResult, StageState, Verdict
from omniq.jobs.store import JobStore
from omniq.publish import continuation
from omniq.tasks import GiveBack, RetryLater, current_flight
from omniq_workers.cancel import Announced, Cancellation
from omniq_workers.emit import JobEmit
from omniq_workers.flight import Flight, Stop
from omniq_workers.isolation import Isolation
from omniq_workers.outage import through_outage
from omniq_workers.run import Ending, Run
from omniq_workers.waits import ended, stopped, to_the_end

if TYPE_CHECKING:
    from omniq_workers.stage_io import StageIO
    from omniq_workers.windows import RunWindows, Windows

logger = get_logger(__name__)

#: Retry delays vary by so much both ways, so that what failed together is not tried together.
JITTER = 0.5
TRACEBACK_CHARS = 8000


class StageRunner:
    """Body of ``omniq.stage`` in a worker that has an engine.

    Args:
        dead: called when the engine can serve nothing more; the worker has to stop.
    """

    def __init__(
        self,
        stage: OmniStageConfig,
        engine: Engine,
        *,
        store: JobStore,
        io: StageIO,
        windows: Windows,
        worker_id: str,
        dead: Callable[[EngineDead], object],
    ) -> None:
        self._stage, self._engine, self._store, self._io = stage, engine, store, io
        self._windows, self._worker_id, self._dead = windows, worker_id, dead
        self._runs: set[Run] = set()
        #: Runs that have been released and wait to be by themselves.
        self._suspects: set[Run] = set()
        self._announced = Announced()
        self._isolation = Isolation()

    # -- cancellation ------------------------------------------------------------------------

    def cancel_job(self, cancelled: Cancellation) -> None:
        """Stop what runs, or waits to, here for that job, or for that stage of it."""
        self._announced.add(cancelled)
        for run in (*self._runs, *self._suspects):
            if cancelled.means(*run.key):
                run.cancel()

    def _enter(self, run: Run, runs: set[Run]) -> None:
        """The run can be cancelled from now on, and is if that was heard of before its begin."""
        runs.add(run)
        if self._announced.means(*run.key):
            run.cancel()

    async def look_for_cancelled(self) -> None:
        """Stop runs whose cancellation was announced while nobody listened."""
        for run in (*self._runs, *self._suspects):
            found = await self._store.standing(run.job_id, run.stage)
            if (
                found is None
                or found.job != JobState.RUNNING
                or found.stage == StageState.CANCELLED
            ):
                run.cancel()

    async def revoked(self, job_id: str, stage: str) -> None:
        """Celery was told to revoke that stage's task: cancel the job if it has not begun."""

        async def cancel(_: bool) -> None:
            try:
                found = await self._store.standing(job_id, stage)
                if found is not None and found.stage in (StageState.QUEUED, StageState.RETRYING):
                    await self._store.cancel(job_id)
            except JobNotFound:
                pass  # its record has just passed

        try:
            await through_outage(cancel)
        except BrokerUnavailable as exc:
            logger.warning("job %s is not cancelled: %s", job_id, exc.message)

    # -- running -----------------------------------------------------------------------------

    async def run(self, job_id: str, stage: str) -> str:
        """See :class:`omniq.tasks.StageRunner`."""
        if stage != self._stage.stage_id:
            raise ConfigError(f"this worker runs stage {self._stage.stage_id!r}, not {stage!r}")
        try:
            return await self._deliver(job_id, stage)
        except BrokerUnavailable as exc:
            # Nothing is known to be recorded: whoever gets the message next finds out.
            raise GiveBack(str(exc)) from exc

    async def _deliver(self, job_id: str, stage: str) -> str:
        flight = current_flight.get()
        assert isinstance(flight, Flight)
        run = Run(job_id, stage, flight.grant or await self._granted(job_id, stage, flight), flight)
        if not self._is_suspect(run):
            return await self._settle(run, alone=False)
        await self._wait_alone(run)
        try:
            grant = await self._granted(job_id, stage, flight)
            return await self._settle(Run(job_id, stage, grant, flight), alone=True)
        finally:
            self._isolation.leave()

    async def _granted(self, job_id: str, stage: str, flight: Flight) -> StageGrant:
        """What is to be done. If Celery is told meanwhile to stop the task, the run may have begun
        all the same: then it is recorded that it has stopped.
        """
        begun = asyncio.ensure_future(self._begin(job_id, flight))
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            run = Run(job_id, stage, await to_the_end(begun), flight)
            if run.grant.verdict is Verdict.RUN:
                await to_the_end(self._cancelled(run))
            raise

    def _is_suspect(self, run: Run) -> bool:
        """Whether it may be this run that ends its process again and again: half of its deliveries
        are used up.

        Stages that stream wait for each other, and so never to be alone.
        """
        return (
            run.grant.verdict is Verdict.RUN
            and run.flight.delivery.redelivered
            and 2 * run.grant.attempt > self._stage.retry.max_deliveries
            and not self._windows.streams_any
        )

    async def _wait_alone(self, run: Run) -> None:
        """Have a suspect wait until nothing else runs; ``Isolation.leave`` has to follow.

        It has not begun meanwhile: the end of another run is none of this one.

        Raises:
            DeadlineExceeded: that takes longer than the job may.
            Ignore: nobody wants it any more.
        """
        self._enter(run, self._suspects)
        try:
            await to_the_end(self.give_back(run.job_id, run.stage, run.grant))
            if run.unwanted or run.flight.stopped is not None:
                raise asyncio.CancelledError
            await self._wait_for_turn(run, alone=True)
        except (asyncio.CancelledError, DeadlineExceeded) as exc:
            if run.unwanted:  # its end is recorded, or that of its job
                raise Ignore("no longer wanted") from exc
            if run.flight.stopped is not Stop.RETURN:
                await to_the_end(self._end_unbegun(run, exc))
            raise
        finally:
            self._suspects.discard(run)

    async def _end_unbegun(self, run: Run, exc: BaseException) -> None:
        """Record the end of a run that waited, as if it had been going on."""
        run.grant = await self._begin(run.job_id, run.flight)
        if run.grant.verdict is not Verdict.RUN:
            return
        if isinstance(exc, Exception):
            raise await self._failed(run, exc)
        await self._cancelled(run)

    async def _settle(self, run: Run, *, alone: bool) -> str:
        """Do what the run was granted, or wants no more.

        Args:
            alone: it has been seen to that nothing else runs.
        """
        job_id, stage, grant = run.job_id, run.stage, run.grant
        if grant.verdict is Verdict.DONE:
            return _message(stage, grant.outputs)
        if grant.verdict is not Verdict.RUN:
            logger.info("job %s stage %s: nothing to run (%s)", job_id, stage, grant.verdict)
            raise Ignore(grant.verdict.value)
        if (unreadable := grant.unreadable) is not None:
            at = (job_id, stage, grant.fence, unreadable.to_dict(), traceback_of(unreadable))
            await to_the_end(through_outage(lambda _: self._store.fail_stage(*at)))
            raise unreadable
        self._enter(run, self._runs)
        entered = False
        try:
            if not alone:
                await self._wait_for_turn(run, alone=False)
                entered = True
            return await self._run(run)
        except asyncio.CancelledError:
            if (ending := await to_the_end(self._ended_before(run))) is not None:
                return _succeeded(run, ending)
            raise
        except Exception as exc:  # every outcome is recorded, then raised for Celery
            raise await to_the_end(self._failed(run, exc)) from exc
        finally:
            self._runs.discard(run)
            if entered:
                self._isolation.leave()

    async def _wait_for_turn(self, run: Run, *, alone: bool) -> None:
        """Wait until nothing that has to be alone runs, or nothing at all.

        Raises:
            DeadlineExceeded: that takes longer than the job may.
        """
        try:
            async with asyncio.timeout(await self._seconds_left(run)):
                await self._isolation.enter(alone=alone)
        except TimeoutError:
            what = "to be by itself" if alone else "for a run that has to be by itself"
            raise DeadlineExceeded(
                f"the job's deadline passed while stage {run.stage!r} waited {what}"
            ) from None

    async def _seconds_left(self, run: Run) -> float | None:
        """Until the job's deadline; None: it has none."""
        deadline = run.spec.deadline
        return None if deadline is None else deadline - await self._store.clock.now()

    async def give_back(self, job_id: str, stage: str, grant: StageGrant) -> None:
        """A run that has begun is not to start now: leave it to the next who begins it."""
        if grant.verdict is Verdict.RUN:
            await through_outage(lambda _: self._store.release_stage(job_id, stage, grant.fence))

    async def _begin(self, job_id: str, flight: Flight) -> StageGrant:
        async def begin(again: bool) -> StageGrant:
            return await self._store.begin_stage(
                job_id,
                self._stage.stage_id,
                self._worker_id,
                # Our own first call may have started the run without us knowing.
                redelivered=flight.delivery.redelivered or again,
                max_deliveries=self._stage.retry.max_deliveries,
            )

        return await through_outage(begin)

    async def _run(self, run: Run) -> str:
        inputs = await self._io.inputs(run.spec, run.grant.upstream)
        async with JobEmit(self._store, *run.key, run.cancel) as emit, self._windows.of(run) as win:
            output = await self._in_engine(run, {**inputs, **win.inputs()}, win, emit)
            await emit.flush()
        if win.first_output is not None:
            output.metrics["first_output_seconds"] = max(win.first_output - run.spec.created, 0.0)
        result = await self._io.store(run, output)
        for name, made in win.outputs().items():
            result.outputs.setdefault(name, {}).update(made)
        ending = run.ending = _ending(run, result)
        if not await through_outage(lambda again: self._finish(run, result, ending, again)):
            logger.info("job %s stage %s: the outcome is no longer wanted", *run.key[:2])
            await self._io.drop(run)
            raise Ignore("no longer wanted")
        await win.drained()
        seconds = time.monotonic() - run.flight.started
        logger.debug("job %s stage %s: done in %.3f s", *run.key[:2], seconds)
        return _succeeded(run, ending)

    async def _in_engine(
        self, run: Run, inputs: Mapping[str, StageInput], windows: RunWindows, emit: JobEmit
    ) -> StageOutput:
        limit = self._stage.time_limit
        left = await self._seconds_left(run)
        request = StageRequest(
            request_id=f"{run.job_id}.{run.stage}.{run.grant.fence}",
            params=run.spec.parameters.get(run.stage, {}),
            priority=run.spec.priority,
            deadline=None if left is None else time.monotonic() + left,
            stream=run.spec.stream,
        )

        async def serve() -> StageOutput:
            output = await self._engine.run(request, inputs, windows.speaker(emit))
            await windows.finish(output)
            return output

        work = asyncio.create_task(serve())
        late = left is not None and (limit is None or left < limit)
        try:
            done = await ended(work, left if late else limit)
        except asyncio.CancelledError:
            await stopped(work, self._stage.stop_limit)
            raise
        if done:
            return work.result()
        await stopped(work, self._stage.stop_limit)
        if late:
            raise DeadlineExceeded(f"the job's deadline passed while stage {run.stage!r} ran")
        raise StageTimeout(
            f"stage {run.stage!r} ran longer than its time limit of {limit:g} s",
            hint="raise time_limit in the pipeline, or ask for less",
        )

    async def _finish(self, run: Run, result: StageResult, ending: Ending, again: bool) -> bool:
        freed = self._io.take_freed()
        rest, slot = ending.following.rest, run.flight.slot
        settles = slot if run.flight.all_but(rest) else None
        try:
            done = await self._store.finish_stage(
                *run.key,
                result,
                ending.following.posts,
                host=self._io.host,
                freed=freed,
                tag=settles.tag if settles else "",
                place=settles.place() if settles else ("", ""),
            )
        except BaseException:
            if settles is not None:
                settles.forget()
            raise
        if done and settles is not None:
            settles.free(known=done.known)
        self._io.free_here(done.garbage)
        if done:
            return True
        # Refused, or done by the call whose answer was lost.
        return again and await self._is_recorded(run)

    async def _is_recorded(self, run: Run) -> bool:
        found = await self._store.standing(run.job_id, run.stage)
        return found is not None and (found.stage, found.attempts) == (
            StageState.SUCCEEDED,
            run.grant.attempt,
        )

    # -- other endings -----------------------------------------------------------------------

    async def _ended_before(self, run: Run) -> Ending | None:
        """How a run has succeeded whose cancellation came too late; else it is recorded."""
        if run.ending is not None and await through_outage(lambda _: self._is_recorded(run)):
            return run.ending
        await self._cancelled(run)
        return None

    async def _cancelled(self, run: Run) -> None:
        """The run has stopped; record why, and raise what Celery shall see, if not the cancel."""
        await self._io.drop(run)
        why = run.flight.stopped
        if run.unwanted or why is Stop.REVOKED:
            await through_outage(lambda _: self._store.stop_stage(*run.key))
            raise Ignore("cancelled")
        if run.lost:
            raise Ignore("released")
        if why is Stop.RETURN:
            await through_outage(lambda _: self._store.release_stage(*run.key))
            return
        error = (
            StageTimeout(f"stage {run.stage!r} ran longer than Celery's time limit for its task")
            if why is not None
            else EngineError(f"stage {run.stage!r} was cancelled from within its engine")
        )
        await through_outage(
            lambda _: self._store.fail_stage(*run.key, error.to_dict(), traceback_of(error))
        )
        raise error

    async def _failed(self, run: Run, exc: Exception) -> Exception:
        """Record a failure; returns what Celery shall see."""
        if isinstance(exc, Ignore | BrokerUnavailable):
            return exc
        await self._io.drop(run)
        if isinstance(exc, EngineDead):
            return self._engine_died(run, exc)
        error = exc.to_dict() if isinstance(exc, OmniqError) else _internal(exc)
        retries = int(run.flight.delivery.request.get("retries") or 0)
        retryable = isinstance(exc, OmniqError) and exc.retryable
        if retryable and retries < self._stage.retry.max_retries:
            delay = self._delay(retries)
            if await through_outage(lambda _: self._store.retry_stage(*run.key, error, delay)):
                return RetryLater(exc, delay)
            return Ignore("no longer wanted")
        if isinstance(exc, DeadlineExceeded):
            await through_outage(lambda _: self._store.expire_stage(*run.key, error))
            return exc
        # A request that can never be served is nobody's dead letter.
        trace = "" if isinstance(exc, InvalidRequest) else traceback_of(exc)
        await through_outage(lambda _: self._store.fail_stage(*run.key, error, trace))
        return exc

    def _engine_died(self, run: Run, exc: EngineDead) -> Exception:
        """Leave the run as it is: the message is delivered again and counts towards the limit that
        ends a request which kills every engine it meets.
        """
        run.flight.stopped = Stop.RETURN
        self._isolation.close()
        self._dead(exc)
        return exc

    def _delay(self, retries: int) -> float:
        policy = self._stage.retry
        delay = min(policy.backoff * 2**retries, policy.backoff_max)
        return delay * random.uniform(1 - JITTER, 1 + JITTER)


def _ending(run: Run, result: StageResult) -> Ending:
    message = _message(run.stage, result.outputs)
    embed = run.flight.delivery.payload[2]
    following = continuation(embed, run.job_id, result=message, parent=run.parent)
    return Ending(message, following)


def _succeeded(run: Run, ending: Ending) -> str:
    """The outputs are recorded, the next stages sent: Celery has to send only the rest."""
    run.flight.rest = ending.following.rest
    return ending.message


def _message(stage: str, outputs: Mapping[str, Mapping[str, Any]]) -> str:
    """What the next stage's task gets as its first argument: names, for people."""
    made = (
        f"{name}={output['blob']['id'] if 'blob' in output else 'value'}"
        for name, output in outputs.items()
    )
    return f"{stage}: {', '.join(made)}"


def traceback_of(exc: BaseException) -> str:
    """Its end, for the dead letter."""
    return "".join(traceback.format_exception(exc))[-TRACEBACK_CHARS:]


def _internal(exc: Exception) -> dict[str, Any]:
    return {"code": "internal_error", "message": f"{type(exc).__name__}: {exc}"}

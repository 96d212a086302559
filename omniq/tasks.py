"""The three Celery tasks, and the base class of tasks that run on a worker's event loop.

Clients import this module to name tasks; what runs them lives in ``omniq_workers``.
"""

from __future__ import annotations

import asyncio
import contextvars
from hashlib import sha256
from typing import Any, Protocol

from celery import Task
from celery.exceptions import Reject, Retry

from omniq.celery import app
from omniq.errors import ConfigError, OmniqError
from omniq.publish import STAGE

SUBMIT = "omniq.submit"
CANCEL = "omniq.cancel"
#: Header of a message that is tried again: seconds to wait.
DELAY = "omniq_delay"


class Flight(Protocol):
    """One task in flight in a worker, as its task sees it."""

    id: str

    def outcome(self) -> Any:
        """The finished body's result; raises what the body raised."""


#: The task in flight whose body runs here. A context variable, not an attribute of the request:
#: Celery sends unknown request attributes on as message headers when it retries.
current_flight: contextvars.ContextVar[Flight] = contextvars.ContextVar("current_flight")


class RetryLater(Exception):
    """Raised by a task's body: ``cause`` may pass, run the task again in ``delay`` seconds."""

    def __init__(self, cause: Exception, delay: float) -> None:
        super().__init__(str(cause))
        self.cause, self.delay = cause, delay


class GiveBack(Exception):
    """Raised by a task's body: this worker cannot run the task, another one may."""


class EngineTask(Task):
    """Base of tasks whose body is a coroutine function.

    :class:`omniq_workers.pool.EnginePool` runs the body on its loop and then has Celery's tracer
    call the task, which only answers with the outcome that is already there. Under any other pool
    the body runs in a loop of its own.
    """

    abstract = True
    throws = (OmniqError,)
    Strategy = "omniq_workers.delays:strategy"  # loaded by workers only

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The body's outcome in Celery's terms: a result, an error, a retry or a rejection."""
        flight = current_flight.get(None)
        try:
            if flight is not None and flight.id == self.request.id:
                return flight.outcome()
            return asyncio.run(self.run(*args, **kwargs))
        except RetryLater as later:
            raise self._retry(later) from later.cause
        except GiveBack as reason:
            raise Reject(str(reason), requeue=True) from reason

    def _retry(self, later: RetryLater) -> Exception:
        # The body has decided that there is a try left: Celery must not count for itself.
        most = self.request.retries + 1
        try:
            sent: Retry = self.retry(
                exc=later.cause,
                countdown=later.delay,
                max_retries=most,
                throw=False,
                headers={**(self.request.headers or {}), DELAY: later.delay},
            )
        except Reject as exc:
            # The new message could not be sent; Celery would drop the task.
            return Reject(exc.reason, requeue=True)
        return sent


class StageRunner(Protocol):
    """What a worker with an engine offers to the stage task."""

    async def run(self, job_id: str, stage: str) -> str:
        """Run one stage of one job; the answer names its outputs, for people."""


@app.task(base=EngineTask, name=STAGE, bind=True, ignore_result=True)
async def run_stage(
    self: EngineTask, upstream: Any = None, *, job: str, stage: str, prompt: str = ""
) -> str:
    """Run ``stage`` of ``job`` in this worker's engine.

    ``upstream`` (what the stage before returned) and ``prompt`` (an excerpt) are for people who
    watch the queues: inputs come from the job record.
    """
    runner = self.app.stage_runner
    if runner is None:
        raise ConfigError(
            f"this worker has no engine, but received stage {stage!r} of job {job}",
            hint="start one by `omniq worker --pipeline P --stage S`",
        )
    return await runner.run(job, stage)


@app.task(base=EngineTask, name=SUBMIT, bind=True)
async def submit_job(
    self: EngineTask,
    pipeline: str,
    *,
    inputs: dict[str, Any] | None = None,
    prompt: str | None = None,
    parameters: dict[str, Any] | None = None,
    priority: int | None = None,
    timeout: float | None = None,
    metadata: dict[str, str] | None = None,
    stream: bool = True,
    idempotency_key: str | None = None,
    webhook: dict[str, Any] | None = None,
    outputs: list[str] | None = None,
    allow_partial: bool = False,
    formats: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Start a job; ``prompt`` is short for ``inputs={"prompt": ...}``, ``webhook`` has ``url`` and
    ``secret``, the rest is as of :func:`omniq.submit.submit`. A task that is delivered again,
    because its worker died, starts no second one.

    Returns:
        ``{"id", "pipeline", "state", "stages"}``.

    Raises:
        InvalidRequest: naming every faulty field.
        Overloaded: there is no room for it now.
        IdempotencyConflict: the key was used for something else.
    """
    from omniq.job_request import refused  # noqa: PLC0415 - needs this module's app
    from omniq.jobs.store import JobStore  # noqa: PLC0415 - as above
    from omniq.jobs.webhooks import Webhook  # noqa: PLC0415 - as above
    from omniq.submit import submit  # noqa: PLC0415 - as above

    flight = current_flight.get(None)
    task = self.request.id if flight is None else flight.id
    if idempotency_key is None and task is not None:
        idempotency_key = f"task-{sha256(task.encode()).hexdigest()}"
    inputs = {} if inputs is None else inputs
    if prompt is not None and isinstance(inputs, dict):
        if "prompt" in inputs:
            raise refused("prompt", "given twice, also in inputs")
        inputs = {**inputs, "prompt": prompt}
    store = JobStore.from_settings()
    try:
        record = await submit(
            store,
            pipeline=pipeline,
            inputs=inputs,
            parameters=parameters,
            priority=priority,
            timeout=timeout,
            metadata=metadata,
            stream=stream,
            idempotency_key=idempotency_key,
            webhook=None if webhook is None else Webhook.of(webhook),
            outputs=outputs,
            allow_partial=allow_partial,
            formats=formats,
        )
    finally:
        await store.close()
    return {
        "id": record.id,
        "pipeline": record.spec.pipeline,
        "state": record.state.value,
        "stages": record.spec.stages,
    }


@app.task(base=EngineTask, name=CANCEL)
async def cancel_job(job: str) -> dict[str, Any]:
    """Cancel a job.

    Returns:
        ``{"id", "state"}`` after the request.

    Raises:
        JobNotFound: unknown job.
    """
    from omniq.jobs.store import JobStore  # noqa: PLC0415 - only workers need it

    store = JobStore.from_settings()
    try:
        record = await store.cancel(job)
    finally:
        await store.close()
    return {"id": record.id, "state": record.state.value}

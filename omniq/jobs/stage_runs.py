"""What workers say of their runs of stages: every call is one atomic step in Redis.

A run is fenced: ``begin_stage`` hands out a growing number, and only the holder of the newest one
may write, so that a run whose task was delivered again elsewhere cannot double or overwrite
anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson

from omniq import keys
from omniq.errors import JobUnreadable
from omniq.jobs.model import Finished, JobSpec, JobState, StageGrant, StageResult, Verdict
from omniq.publish import Post, posted


def dumps(value: Any) -> bytes:
    """JSON as the scripts read it."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


class StageRuns:
    """The part of :class:`~omniq.jobs.store.JobStore` that workers call for their stages."""

    #: Runs one of the job scripts: its name, the job, its arguments, more keys.
    _run: Callable[..., Awaitable[Any]]

    async def begin_stage(
        self,
        job_id: str,
        stage: str,
        worker: str,
        *,
        redelivered: bool,
        max_deliveries: int = 10,
    ) -> StageGrant:
        """What a worker that received the task of (job, stage) must do with it."""
        arguments = [stage, worker, int(redelivered), max_deliveries]
        return read_grant(await self._run("begin_stage", job_id, arguments))

    async def progress(self, job_id: str, stage: str, fence: int, step: int, total: int) -> bool:
        """Note that ``step`` of ``total`` units are done.

        False: this run is no longer wanted (cancelled, or another run took over).
        """
        data = dumps({"step": step, "total": total})
        return bool(
            await self._run("progress", job_id, [stage, fence, "stage.progress", data, step, total])
        )

    async def delta(self, job_id: str, stage: str, fence: int, output: str, value: Any) -> bool:
        """Pass a piece of an output on to whoever watches the job. False as in :meth:`progress`."""
        data = dumps({"output": output, "value": value})
        return bool(
            await self._run("progress", job_id, [stage, fence, "stage.delta", data, "", ""])
        )

    async def preview(self, job_id: str, stage: str, fence: int, value: dict[str, Any]) -> bool:
        """Pass a look at an unfinished picture on to whoever watches the job. False as in
        :meth:`progress`.
        """
        arguments = [stage, fence, "stage.preview", dumps(value), "", ""]
        return bool(await self._run("progress", job_id, arguments))

    async def finish_stage(
        self,
        job_id: str,
        stage: str,
        fence: int,
        result: StageResult,
        posts: Sequence[Post] = (),
        *,
        host: str = "",
        freed: Sequence[str] = (),
        tag: str = "",
        place: tuple[str, str] = ("", ""),
    ) -> Finished:
        """Write a run's outputs once and send what follows; ends the job with its last stage.

        Blobs that no stage will read any more are freed, those in shared memory by way of their
        host's garbage list.

        Args:
            posts: messages to the stages behind. Those whose inputs are all there are sent: a join
                by the last stage that feeds it.
            host: of the caller, who may free shared memory there without waiting for others.
            freed: what it has freed since it last said so (:attr:`Finished.garbage`).
            tag: delivery tag of the run's message, if nothing is left to do for it but this: it is
                acknowledged in the same step.
            place: where the caller waits for messages and its name there, to be known by this step
                to have room for one more.

        The answer is false if it is refused (another run took over, or the job has ended or is
        being cancelled); the caller frees the blobs it wrote.
        """
        artifacts = {
            n: (dumps({**a.model_dump(mode="json"), "key": a.key})).decode()
            for n, a in result.artifacts.items()
        }
        done, known, *garbage = await self._run(
            "finish_stage",
            job_id,
            [
                stage,
                fence,
                dumps(result.outputs),
                dumps(result.metrics),
                dumps([ref.to_json().decode() for ref in result.blobs]),
                dumps({n: dumps(v).decode() for n, v in result.values.items()}),
                dumps(artifacts),
                host,
                dumps(freed),
                tag,
                *place,
                *posted(posts),
            ],
            *(p.queue for p in posts),
        )
        return Finished(bool(done), [ref.decode() for ref in garbage], bool(known))

    async def retry_stage(
        self, job_id: str, stage: str, fence: int, error: dict[str, Any], delay: float
    ) -> bool:
        """The run failed and will be tried again in ``delay`` seconds. False: it must not be."""
        return await self._end_run(job_id, stage, fence, "retry", error=error, delay=delay)

    async def release_stage(self, job_id: str, stage: str, fence: int) -> bool:
        """A worker that stops gives the run back unharmed; it counts as no attempt."""
        return await self._end_run(job_id, stage, fence, "release")

    async def fail_stage(
        self, job_id: str, stage: str, fence: int, error: dict[str, Any], traceback: str = ""
    ) -> bool:
        """The run failed for good, and the job with it; but if the client takes that
        (:attr:`JobSpec.partial`), only outputs that need the stage. False: refused.

        Args:
            traceback: of a failure that is not the request's own fault: the job is kept as a dead
                letter (:mod:`omniq.jobs.dead`).
        """
        return await self._end_run(job_id, stage, fence, "fail", error=error, traceback=traceback)

    async def expire_stage(
        self, job_id: str, stage: str, fence: int, error: dict[str, Any]
    ) -> bool:
        """The deadline passed while the run went on, which has stopped. False: refused."""
        return await self._end_run(job_id, stage, fence, "expire", error=error)

    async def stop_stage(self, job_id: str, stage: str, fence: int) -> bool:
        """A cancelled run has really stopped; the job ends as cancelled with the last of them.

        A run that was revoked by itself takes its job along: whatever else of it runs is told to
        stop.
        """
        return await self._end_run(job_id, stage, fence, "stop")

    async def _end_run(
        self,
        job_id: str,
        stage: str,
        fence: int,
        how: str,
        *,
        error: dict[str, Any] | None = None,
        delay: float = 0.0,
        traceback: str = "",
    ) -> bool:
        body = dumps(error) if error is not None else ""
        arguments = [stage, fence, how, body, repr(delay), job_id, traceback]
        return bool(await self._run("end_run", job_id, arguments, keys.cancel_channel()))


def read_grant(answer: Sequence[Any]) -> StageGrant:
    """What ``begin`` of ``_run.lua`` answered, its numbers as such or as digits."""
    verdict, fence, attempt, spec, payload, state = answer
    found = Verdict(verdict.decode())
    body = orjson.loads(payload)
    known, unreadable = None, None
    if spec:
        try:
            known = JobSpec.from_json(spec)
        except JobUnreadable as exc:
            unreadable = exc
    return StageGrant(
        verdict=found,
        fence=int(fence),
        attempt=int(attempt),
        spec=known,
        unreadable=unreadable,
        upstream=body if found is Verdict.RUN else {},
        outputs=body if found is Verdict.DONE else {},
        state=JobState(state.decode()) if state else None,
    )

"""The job store: every change of a job is one of these calls, each one atomic in Redis.

The record, not Celery's result, is the truth about a job. A stage run is fenced: ``begin_stage``
hands out a growing number, and only the holder of the newest one may write, so that a run whose
task was delivered again elsewhere cannot double or overwrite anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncGenerator, Collection
from typing import Any

import orjson

from omniq import keys
from omniq.errors import ArtifactNotFound, InvalidRequest, JobNotFound
from omniq.jobs import scripts
from omniq.jobs.model import (
    ArtifactInfo,
    JobEvent,
    JobRecord,
    JobSpec,
    JobState,
    StageGrant,
    StageRecord,
    StageResult,
    Verdict,
)
from omniq.redis_client import Client, broker_errors, connect
from omniq.settings import get_settings

EVENT_ID = re.compile(r"^\d{1,18}(-\d{1,18})?$")  # well inside Redis's two 64-bit numbers
BLOCK_LIMIT = 60.0
PAGE = 200


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


class JobStore:
    """Async access to jobs; one instance per event loop, safe for many tasks at once.

    All methods raise :class:`~omniq.errors.BrokerUnavailable` when Redis cannot be used.
    """

    def __init__(self, redis: Client, blocking: Client | None = None) -> None:
        self.redis = redis
        self._blocking = blocking or redis
        self._scripts = scripts.register(redis)

    @classmethod
    def from_settings(cls) -> JobStore:
        """A store on the configured broker; connects on first use."""
        return cls(connect(), connect(blocking=BLOCK_LIMIT))

    async def close(self) -> None:
        """Close the connections."""
        await self.redis.aclose()
        if self._blocking is not self.redis:
            await self._blocking.aclose()

    async def _run(self, name: str, job_id: str, args: list[Any], *more_keys: str) -> Any:
        settings = get_settings()
        common: list[Any] = [
            int(settings.retention * 1000),
            settings.max_events,
            f"{settings.namespace}:",
        ]
        names = [keys.job(job_id), keys.job_events(job_id), keys.job_blobs(job_id), *more_keys]
        with broker_errors():
            return await self._scripts[name](keys=names, args=[*args, *common])

    # -- accepting and reading ---------------------------------------------------------------

    async def create(self, spec: JobSpec, upstream: dict[str, list[str]]) -> JobRecord:
        """Record a job as queued and emit ``job.queued``.

        ``upstream`` lists for each stage the stages that feed it.
        """
        ttl = get_settings().job_ttl
        created = await self._run(
            "create",
            spec.id,
            [
                _dumps(spec.model_dump(mode="json")),
                _dumps(spec.stages),
                _dumps(upstream),
                spec.id,
                repr(spec.created),
                int(ttl * 1000),
                "" if spec.deadline is None else repr(spec.deadline),
            ],
            keys.jobs_index(),
        )
        if not created:
            raise InvalidRequest(f"job {spec.id} exists already")
        return JobRecord(
            spec=spec, state=JobState.QUEUED, stages={s: StageRecord() for s in spec.stages}
        )

    async def discard(self, job_id: str) -> None:
        """Take back a job whose message could not be published."""
        await self._run("discard", job_id, [job_id], keys.jobs_index())

    async def get(self, job_id: str) -> JobRecord:
        """The job's record.

        Raises:
            JobNotFound: unknown, or its retention has passed.
        """
        with broker_errors():
            raw = await self.redis.hgetall(keys.job(job_id))
        if not raw:
            raise _not_found(job_id)
        return _record({k.decode(): v for k, v in raw.items()})

    async def list(
        self,
        *,
        states: Collection[JobState] | None = None,
        pipeline: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> tuple[list[JobRecord], str | None]:
        """Up to ``limit`` jobs, newest first, and the cursor of the next page (None at the end).

        Raises:
            InvalidRequest: the cursor is not one this method returned.
        """
        offset = _offset(cursor)
        found: list[JobRecord] = []
        page = PAGE if states or pipeline else min(PAGE, limit + 1)
        while True:
            with broker_errors():
                ids = await self.redis.zrevrange(keys.jobs_index(), offset, offset + page - 1)
                pipe = self.redis.pipeline(transaction=False)
                for job_id in ids:
                    pipe.hgetall(keys.job(job_id.decode()))
                rows = await pipe.execute()
            gone = [i for i, row in zip(ids, rows, strict=True) if not row]
            for position, row in enumerate(rows):
                if not row:
                    continue
                record = _record({k.decode(): v for k, v in row.items()})
                if (states and record.state not in states) or (
                    pipeline and record.spec.pipeline != pipeline
                ):
                    continue
                if len(found) == limit:
                    return found, str(offset + position)
                found.append(record)
            if gone:
                with broker_errors():
                    await self.redis.zrem(keys.jobs_index(), *gone)
            if len(ids) < page:
                return found, None
            offset += page - len(gone)

    # -- running a stage ---------------------------------------------------------------------

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
        verdict, fence, attempt, spec, payload, state = await self._run(
            "begin_stage",
            job_id,
            [stage, worker, int(redelivered), max_deliveries],
        )
        found = Verdict(verdict.decode())
        body = orjson.loads(payload)
        return StageGrant(
            verdict=found,
            fence=fence,
            attempt=attempt,
            spec=JobSpec.model_validate_json(spec) if spec else None,
            upstream=body if found is Verdict.RUN else {},
            outputs=body if found is Verdict.DONE else {},
            state=JobState(state.decode()) if state else None,
        )

    async def progress(self, job_id: str, stage: str, fence: int, step: int, total: int) -> bool:
        """Note that ``step`` of ``total`` units are done.

        False: this run is no longer wanted (cancelled, or another run took over).
        """
        data = _dumps({"step": step, "total": total})
        return bool(
            await self._run("progress", job_id, [stage, fence, "stage.progress", data, step, total])
        )

    async def delta(self, job_id: str, stage: str, fence: int, output: str, value: Any) -> bool:
        """Pass a piece of an output on to whoever watches the job. False as in :meth:`progress`."""
        data = _dumps({"output": output, "value": value})
        return bool(
            await self._run("progress", job_id, [stage, fence, "stage.delta", data, "", ""])
        )

    async def finish_stage(self, job_id: str, stage: str, fence: int, result: StageResult) -> bool:
        """Write a run's outputs once; ends the job with its last stage.

        False: refused (another run took over, or the job has ended or is being cancelled); the
        caller frees the blobs it wrote.
        """
        artifacts = {
            n: (_dumps({**a.model_dump(mode="json"), "key": a.key})).decode()
            for n, a in result.artifacts.items()
        }
        return bool(
            await self._run(
                "finish_stage",
                job_id,
                [
                    stage,
                    fence,
                    _dumps(result.outputs),
                    _dumps(result.metrics),
                    _dumps([ref.model_dump_json() for ref in result.blobs]),
                    _dumps({n: _dumps(v).decode() for n, v in result.values.items()}),
                    _dumps(artifacts),
                ],
            )
        )

    async def retry_stage(
        self, job_id: str, stage: str, fence: int, error: dict[str, Any], delay: float
    ) -> bool:
        """The run failed and will be tried again in ``delay`` seconds. False: it must not be."""
        return await self._end_run(job_id, stage, fence, "retry", error=error, delay=delay)

    async def release_stage(self, job_id: str, stage: str, fence: int) -> bool:
        """A worker that stops gives the run back unharmed; it counts as no attempt."""
        return await self._end_run(job_id, stage, fence, "release")

    async def fail_stage(self, job_id: str, stage: str, fence: int, error: dict[str, Any]) -> bool:
        """The run failed for good, and the job with it. False: refused."""
        return await self._end_run(job_id, stage, fence, "fail", error=error)

    async def stop_stage(self, job_id: str, stage: str, fence: int) -> bool:
        """A cancelled run has really stopped; the job ends as cancelled with the last of them."""
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
    ) -> bool:
        body = _dumps(error) if error is not None else ""
        return bool(await self._run("end_run", job_id, [stage, fence, how, body, repr(delay)]))

    async def cancel(self, job_id: str) -> JobRecord:
        """Ask a job to stop: at once if nothing runs, else ``cancelling`` until it has stopped.

        A job that has ended is returned as it is.

        Raises:
            JobNotFound: unknown job.
        """
        state = await self._run("cancel", job_id, [job_id], keys.cancel_channel())
        if not state:
            raise _not_found(job_id)
        return await self.get(job_id)

    # -- results -----------------------------------------------------------------------------

    async def put_artifact(self, job_id: str, name: str, fence: int, data: bytes) -> str:
        """Store one result file for the time of retention; returns its key.

        It becomes visible with the ``finish_stage`` that names the key.
        """
        settings = get_settings()
        if len(data) > settings.max_artifact_bytes:
            raise InvalidRequest(
                f"artifact {name!r} has {len(data)} bytes; OMNIQ_MAX_ARTIFACT_BYTES allows "
                f"{settings.max_artifact_bytes}"
            )
        key = keys.artifact(job_id, name, fence)
        ttl = settings.job_ttl + settings.retention
        with broker_errors():
            await self.redis.set(key, data, px=int(ttl * 1000))
        return key

    async def get_artifact(self, job_id: str, name: str) -> tuple[bytes, ArtifactInfo]:
        """Bytes and description of one result file.

        Raises:
            JobNotFound: unknown job.
            ArtifactNotFound: the job has none of that name (yet).
        """
        record = await self.get(job_id)
        info = record.artifacts.get(name)
        if info is None:
            have = ", ".join(record.artifacts) or "none yet"
            raise ArtifactNotFound(f"job {job_id} has no artifact {name!r}; it has: {have}")
        with broker_errors():
            data = await self.redis.get(info.key)
        if data is None:
            raise ArtifactNotFound(f"artifact {name!r} of job {job_id} is no longer kept")
        return data, info

    async def events(
        self, job_id: str, after: str = "0", *, block: float = 15.0
    ) -> AsyncGenerator[JobEvent | None, None]:
        """Events behind stream id ``after``, then live ones, up to the final event.

        Yields None after every ``block`` seconds of silence, so that a server can write heartbeats.

        Raises:
            JobNotFound: unknown job.
            InvalidRequest: ``after`` is no stream id.
        """
        if not EVENT_ID.match(after):
            raise InvalidRequest(
                f"{after!r} is no event id",
                fields=[{"field": "Last-Event-ID", "message": "must look like 1700000000000-0"}],
            )
        stream, last = keys.job_events(job_id), after
        milliseconds = max(1, int(min(block, BLOCK_LIMIT) * 1000))
        while True:
            # Without blocking first: a job that ended before `after` sends nothing any more.
            with broker_errors():
                found = await self.redis.xread({stream: last}, count=PAGE)
            if not found:
                if (await self.get(job_id)).state.final and not await self._more(stream, last):
                    return
                with broker_errors():
                    found = await self._blocking.xread(
                        {stream: last}, count=PAGE, block=milliseconds
                    )
                if not found:
                    yield None
                    continue
            for entry_id, fields in _entries(found):
                last = entry_id
                event = _event(entry_id, fields)
                yield event
                if event.final:
                    return

    async def _more(self, stream: str, last: str) -> bool:
        with broker_errors():
            return bool(await self.redis.xread({stream: last}, count=1))

    async def wait(self, job_id: str, timeout: float | None = None) -> JobRecord:
        """The record once the job has ended, or as it is after ``timeout`` seconds.

        Raises:
            JobNotFound: unknown job.
        """
        loop = asyncio.get_running_loop()
        end = math.inf if timeout is None else loop.time() + timeout
        # Short reads and a look at the clock instead of a cancelled long one: on Python 3.11 a
        # cancellation that meets redis-py's own timeout in the same tick is lost.
        block = 1.0 if timeout is None else min(1.0, timeout)
        async with contextlib.aclosing(self.events(job_id, block=block)) as events:
            async for _ in events:
                if loop.time() >= end:
                    break
        return await self.get(job_id)


def _not_found(job_id: str) -> JobNotFound:
    return JobNotFound(f"no job {job_id!r}: it never existed, or its retention has passed")


def _offset(cursor: str | None) -> int:
    if cursor is None:
        return 0
    if not cursor.isascii() or not cursor.isdigit() or len(cursor) > 12:
        raise InvalidRequest(
            f"{cursor!r} is no cursor",
            fields=[{"field": "cursor", "message": "must be a cursor that this route returned"}],
        )
    return int(cursor)


def _entries(found: Any) -> list[tuple[str, dict[bytes, bytes]]]:
    """XREAD answers a list of pairs under RESP2, a mapping under RESP3."""
    pairs = found.items() if isinstance(found, dict) else found
    entries: list[tuple[str, dict[bytes, bytes]]] = []
    for _, items in pairs:
        flat = items[0] if items and isinstance(items[0], list) else items
        entries += [(i.decode(), f) for i, f in flat]
    return entries


def _event(entry_id: str, fields: dict[bytes, bytes]) -> JobEvent:
    return JobEvent(
        id=entry_id,
        type=fields[b"type"].decode(),
        stage=fields[b"stage"].decode() or None,
        time=float(fields[b"time"]),
        data=orjson.loads(fields[b"data"]),
    )


def _record(raw: dict[str, bytes]) -> JobRecord:
    spec = JobSpec.model_validate_json(raw["spec"])

    def number(field: str) -> float | None:
        return float(raw[field]) if field in raw else None

    def parsed(field: str) -> Any:
        return orjson.loads(raw[field]) if field in raw else None

    def stage(name: str) -> StageRecord:
        def of(field: str) -> str:
            return f"{name}|{field}"

        worker = raw.get(of("worker"))
        return StageRecord(
            state=raw[of("state")].decode(),
            attempts=int(raw.get(of("attempts"), 0)),
            worker=worker.decode() if worker else None,
            queued=number(of("queued")),
            started=number(of("started")),
            finished=number(of("finished")),
            step=int(raw[of("step")]) if of("step") in raw else None,
            total=int(raw[of("total")]) if of("total") in raw else None,
            metrics=parsed(of("metrics")) or {},
            error=parsed(of("error")),
        )

    return JobRecord(
        spec=spec,
        state=JobState(raw["state"].decode()),
        started=number("started"),
        finished=number("finished"),
        stages={s: stage(s) for s in spec.stages},
        values={f[2:]: orjson.loads(v) for f, v in raw.items() if f.startswith("v:")},
        artifacts={
            f[2:]: ArtifactInfo.model_validate_json(v) for f, v in raw.items() if f.startswith("a:")
        },
        error=parsed("error"),
    )

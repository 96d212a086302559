"""The job store: every change of a job is one of these calls, each one atomic in Redis.

The record, not Celery's result, is the truth about a job. A stage run is fenced: ``begin_stage``
hands out a growing number, and only the holder of the newest one may write, so that a run whose
task was delivered again elsewhere cannot double or overwrite anything.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from omniq import keys
from omniq.errors import (
    ArtifactNotFound,
    IdempotencyConflict,
    InvalidRequest,
    JobGone,
    JobNotFound,
    JobUnreadable,
)
from omniq.jobs.admission import NOBODY, Admission, Again, Share, Usage, refusal
from omniq.jobs.clock import ServerClock
from omniq.jobs.input_files import InputFiles
from omniq.jobs.model import (
    ArtifactInfo,
    Finished,
    JobEvent,
    JobRecord,
    JobSpec,
    JobState,
    StageGrant,
    StageRecord,
    StageResult,
    Verdict,
)
from omniq.jobs.record import read_record
from omniq.jobs.scripts import JobScripts
from omniq.jobs.watch import SILENCE, Watching, not_found
from omniq.publish import Post, event_channel
from omniq.redis_client import Client, broker_errors, connect
from omniq.settings import get_settings

logger = logging.getLogger(__name__)

PAGE = 200
#: Where a page of jobs begins: when the last one before it was created, and its id.
CURSOR = re.compile(r"^[0-9]{1,15}(\.[0-9]{1,20})?~[a-z0-9-]{1,64}$")


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


class JobStore:
    """Async access to jobs; one instance per event loop, safe for many tasks at once.

    All methods raise :class:`~omniq.errors.BrokerUnavailable` when Redis cannot be used.
    One of a tenant (:meth:`of`) knows no other tenant's jobs.
    """

    share = Share()
    #: What is left of the share after the last job that was let in.
    usage: Usage | None = None

    def __init__(self, redis: Client) -> None:
        self.redis = redis
        self.clock = ServerClock(redis)
        self._watching = Watching(redis, self._end)
        #: Runs one of the job scripts; for modules that add to this one.
        self.run_script = self._run = JobScripts(redis).run
        #: Files for jobs that are yet to be created.
        self.inputs = InputFiles(self._run)

    @classmethod
    def from_settings(cls) -> JobStore:
        """A store on the configured broker; connects on first use."""
        return cls(connect())

    def of(self, share: Share) -> JobStore:
        """The same store, over the same connections, for one tenant."""
        store = copy.copy(self)
        store.share, store.usage = share, None
        return store

    async def close(self) -> None:
        """Close the connections."""
        self._watching.close()
        self.inputs.close()
        await self.redis.aclose()

    # -- accepting and reading ---------------------------------------------------------------

    async def create(
        self,
        spec: JobSpec,
        upstream: dict[str, list[str]],
        posts: Sequence[Post] = (),
        *,
        awaited: bool = False,
        admission: Admission | None = None,
        again: Again | None = None,
        hook: str | None = None,
        room_for: int = 1,
    ) -> JobRecord:
        """Record a job as queued, emit ``job.queued`` and send the messages that start it.

        Args:
            spec: the blobs of its files are the job's from now on, and freed with it.
            upstream: for each stage the stages that feed it.
            awaited: :meth:`wait` will be called for it at once, and then need not ask the server.
            admission: limits of its pipeline; by default those of the settings.
            again: if a job was made with this key already, that one is the answer.
            hook: JSON of whom to tell of the job's end (:mod:`omniq.jobs.webhooks`).
            room_for: jobs, with this one, for which there must be room.

        Raises:
            Refused: a limit is reached; the job leaves no trace.
            IdempotencyConflict: the key was used for something else.
        """
        admission = admission or Admission.of_spec(spec)
        channel = ""
        if awaited:
            channel = await self._watching.expect(spec.id, await self._left(spec.deadline))
        answer: Any = None
        try:
            answer = await self._run(
                "create",
                spec.id,
                [
                    spec.to_json(),
                    _dumps(spec.stages),
                    _dumps(upstream),
                    spec.id,
                    repr(spec.created),
                    int(get_settings().job_ttl * 1000),
                    "" if spec.deadline is None else repr(spec.deadline),
                    channel,
                    _dumps([ref.model_dump_json() for ref in spec.files.values()]),
                    admission.ask(spec, self.share, again=again, hook=hook, room_for=room_for),
                    _dumps(spec.partial) if spec.partial else "",
                    *posted(posts),
                ],
                keys.jobs_index(),
                *(p.queue for p in posts),
            )
        finally:
            if answer is None or answer[0] != b"created":
                self._watching.forget(spec.id)
        return await self._admitted(spec, answer)

    async def _admitted(self, spec: JobSpec, answer: Sequence[Any]) -> JobRecord:
        """The job that ``create.lua`` answers with; raises as :meth:`create`."""
        match answer[0]:
            case b"created":
                self.usage = Usage.read(answer[1:])
            case b"same":
                return (await self.get(answer[1].decode())).model_copy(update={"replayed": True})
            case b"conflict":
                raise _conflict()
            case b"refused":
                refused = refusal(answer)
                self.usage = self.share.after(refused)
                raise refused
            case _:
                raise InvalidRequest(f"job {spec.id} exists already")
        return JobRecord(
            spec=spec, state=JobState.QUEUED, stages={s: StageRecord() for s in spec.stages}
        )

    async def known(self, again: Again) -> JobRecord | None:
        """The job of an earlier request with this key, if it is kept; :meth:`create` looks as well.

        Raises:
            IdempotencyConflict: the key was used for something else.
        """
        with broker_errors():
            found = await self.redis.get(keys.idempotency(self.share.tenant, again.key))
        if found is None:
            return None
        asked, job_id = found.decode().split()
        try:
            record = await self.get(job_id)
        except JobNotFound:
            return None
        if asked != again.print:
            raise _conflict()
        return record.model_copy(update={"replayed": True})

    async def get(self, job_id: str) -> JobRecord:
        """The job's record.

        Raises:
            JobNotFound: unknown, or another tenant's.
            JobGone: its retention has passed.
        """
        with broker_errors():
            raw = await self.redis.hgetall(keys.job(job_id))
        if not raw:
            raise await self._absent(job_id)
        record = self._own(read_record(raw))
        if not record.state.final and await self._is_late(record) and await self._expire(job_id):
            return await self.get(job_id)
        return record

    async def _left(self, deadline: float | None) -> float:
        """Seconds until a deadline, by the clock that decides; None is one that never comes."""
        return math.inf if deadline is None else deadline - await self.clock.now()

    async def _is_late(self, record: JobRecord) -> bool:
        return await self._left(record.spec.deadline) < 0

    def _own(self, record: JobRecord) -> JobRecord:
        """The record, unless it is another tenant's."""
        if self.share.tenant not in (NOBODY, record.spec.tenant):
            raise not_found(record.id)
        return record

    async def _absent(self, job_id: str) -> JobNotFound:
        """Why a job has no record."""
        tenant = self.share.tenant
        with broker_errors():
            for index in (keys.jobs_index(tenant), keys.jobs_gone(tenant)):
                if await self.redis.zscore(index, job_id) is not None:
                    return JobGone(f"job {job_id} is no longer kept")
        return not_found(job_id)

    async def _expire(self, job_id: str) -> bool:
        """End a job whose deadline has passed while nothing of it runs."""
        return bool(await self._run("expire", job_id, []))

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
        place = _place(cursor)
        found: list[JobRecord] = []
        page = PAGE if states or pipeline else min(PAGE, limit + 1)
        tenant = self.share.tenant
        while True:
            with broker_errors():
                newest = "+inf" if place is None else repr(place[0])
                index: list[tuple[bytes, float]] = await self.redis.zrevrangebyscore(
                    keys.jobs_index(tenant), newest, "-inf", start=0, num=page, withscores=True
                )
                places = [(score, job_id.decode()) for job_id, score in index]
                pipe = self.redis.pipeline(transaction=False)
                for _, job_id in places:
                    pipe.hgetall(keys.job(job_id))
                rows = await pipe.execute()
            gone = [at[1] for at, row in zip(places, rows, strict=True) if not row]
            for at, row in zip(places, rows, strict=True):
                if not row or (place is not None and at >= place):
                    continue
                try:
                    record = read_record(row)
                except JobUnreadable as exc:
                    logger.warning("job %s is not listed: %s", at[1], exc.message)
                    continue
                if (states and record.state not in states) or (
                    pipeline and record.spec.pipeline != pipeline
                ):
                    continue
                if len(found) == limit:
                    last = found[-1].spec
                    return found, f"{last.created!r}~{last.id}"
                found.append(record)
            if gone:
                await self._bury(gone)
            if len(places) < page:
                return found, None
            if place is None or places[-1] < place:
                place = places[-1]
            else:  # so many were created at that very moment
                page *= 2

    async def _bury(self, gone: Iterable[str]) -> None:
        """Have no list look again for jobs that are no longer kept."""
        kept, tenant = get_settings().tombstones, self.share.tenant
        now, graves = await self.clock.now(), keys.jobs_gone(self.share.tenant)
        with broker_errors():
            async with self.redis.pipeline(transaction=True) as pipe:
                pipe.zrem(keys.jobs_index(tenant), *gone)
                pipe.zadd(graves, dict.fromkeys(gone, now))
                pipe.zremrangebyscore(graves, "-inf", now - kept)
                pipe.pexpire(graves, math.ceil(kept * 1000))
                await pipe.execute()

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
        arguments = [stage, worker, int(redelivered), max_deliveries]
        return read_grant(await self._run("begin_stage", job_id, arguments))

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

    async def preview(self, job_id: str, stage: str, fence: int, value: dict[str, Any]) -> bool:
        """Pass a look at an unfinished picture on to whoever watches the job. False as in
        :meth:`progress`.
        """
        arguments = [stage, fence, "stage.preview", _dumps(value), "", ""]
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
            n: (_dumps({**a.model_dump(mode="json"), "key": a.key})).decode()
            for n, a in result.artifacts.items()
        }
        done, known, *garbage = await self._run(
            "finish_stage",
            job_id,
            [
                stage,
                fence,
                _dumps(result.outputs),
                _dumps(result.metrics),
                _dumps([ref.to_json().decode() for ref in result.blobs]),
                _dumps({n: _dumps(v).decode() for n, v in result.values.items()}),
                _dumps(artifacts),
                host,
                _dumps(freed),
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
        body = _dumps(error) if error is not None else ""
        arguments = [stage, fence, how, body, repr(delay), job_id, traceback]
        return bool(await self._run("end_run", job_id, arguments, keys.cancel_channel()))

    async def cancel(self, job_id: str) -> JobRecord:
        """Ask a job to stop: at once if nothing runs, else ``cancelling`` until it has stopped.

        A job that has ended is returned as it is.

        Raises:
            JobNotFound: unknown job.
        """
        if self.share.tenant:
            await self.get(job_id)
        state = await self._run("cancel", job_id, [job_id], keys.cancel_channel())
        if not state:
            raise await self._absent(job_id)
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
        files = keys.job_files(job_id)
        with broker_errors():
            # Noted first: what is stored is freed with the job, whether or not its run is the one.
            async with self.redis.pipeline(transaction=False) as pipe:
                pipe.sadd(files, key)
                pipe.pexpire(files, int(ttl * 1000))
                pipe.set(key, data, px=int(ttl * 1000))
                await pipe.execute()
        return key

    async def get_artifact(self, job_id: str, name: str) -> tuple[bytes, ArtifactInfo]:
        """Bytes and description of one result file.

        Raises:
            JobNotFound: unknown job.
            ArtifactNotFound: the job has none of that name (yet).
        """
        return await self.read_artifact(await self.get(job_id), name)

    async def read_artifact(self, record: JobRecord, name: str) -> tuple[bytes, ArtifactInfo]:
        """As :meth:`get_artifact`, of a job whose record is at hand.

        Raises:
            ArtifactNotFound: the record has none of that name.
        """
        job_id, info = record.id, record.artifacts.get(name)
        if info is None:
            have = ", ".join(record.artifacts) or "none yet"
            raise ArtifactNotFound(f"job {job_id} has no artifact {name!r}; it has: {have}")
        with broker_errors():
            data = await self.redis.get(info.key)
        if data is None:
            raise ArtifactNotFound(f"artifact {name!r} of job {job_id} is no longer kept")
        return data, info

    # -- watching ----------------------------------------------------------------------------

    async def events(
        self, job_id: str, after: str = "0", *, block: float = SILENCE
    ) -> AsyncGenerator[JobEvent | None]:
        """Events behind stream id ``after``, then live ones, up to the final event.

        Yields None after every ``block`` seconds of silence, so that a server can write heartbeats;
        and then a job that nobody has begun before its deadline expires.
        All watchers of a store share one connection (:mod:`omniq.jobs.watch`). When the broker
        goes, they end with :class:`~omniq.errors.BrokerUnavailable` and may go on from their last
        id once it is back.

        Raises:
            JobNotFound: unknown job.
            InvalidRequest: ``after`` is no stream id.
        """
        if self.share.tenant:
            await self.get(job_id)
        async with aclosing(self._watching.events(job_id, after, block=block)) as events:
            async for event in events:
                yield event
                if event is None:
                    await self._expire(job_id)

    async def wait(self, job_id: str, timeout: float | None = None) -> JobRecord:
        """The record once the job has ended, or as it is after ``timeout`` seconds.

        Raises:
            JobNotFound: unknown job.
        """
        raw = await self._watching.ended(job_id, timeout)
        return await self.get(job_id) if raw is None else self._own(read_record(raw))

    async def _end(self, job_id: str, channel: str) -> dict[bytes, bytes] | float:
        """See :data:`omniq.jobs.watch.Look`."""
        found = await self._run("wait_end", job_id, [channel])
        if found == 0:
            raise await self._absent(job_id)
        if isinstance(found, bytes):
            return await self._left(float(found) if found else None)
        return dict(zip(found[::2], found[1::2], strict=True))

    def stop_watching(self) -> None:
        """End every :meth:`events` and :meth:`wait` of this store, now and later, as if time were
        up; for a server that stops.
        """
        self._watching.stop()


def _conflict() -> IdempotencyConflict:
    return IdempotencyConflict(
        "this idempotency key was used for a request that asked for something else",
        hint="use a new key for every new request",
    )


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


def posted(posts: Sequence[Post]) -> list[Any]:
    """Arguments of a script that sends ``posts``; their queues are its last keys."""
    if not posts:
        return [0, ""]
    return [len(posts), event_channel(), *(x for p in posts for x in p.arguments)]


def _place(cursor: str | None) -> tuple[float, str] | None:
    """When the last job of the page before was created, and its id; None: at the newest one."""
    if cursor is None:
        return None
    if not CURSOR.fullmatch(cursor):
        raise InvalidRequest(
            f"{cursor!r} is no cursor",
            fields=[{"field": "cursor", "message": "must be a cursor that this route returned"}],
        )
    created, _, job_id = cursor.partition("~")
    return float(created), job_id

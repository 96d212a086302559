"""The job store: every change of a job is one of these calls, each one atomic in Redis.

The record, not Celery's result, is the truth about a job. Here jobs are accepted, read, cancelled
and watched; what workers say of their runs of stages is in :mod:`omniq.jobs.stage_runs`.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import re
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from omniq import keys
from omniq.errors import (
    ArtifactNotFound,
    BrokerUnavailable,
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
    JobEvent,
    JobRecord,
    JobSpec,
    JobState,
    StageRecord,
    Standing,
)
from omniq.jobs.record import read_outline, read_record
from omniq.jobs.scripts import JobScripts
from omniq.jobs.stage_runs import StageRuns, dumps
from omniq.jobs.watch import SILENCE, Watching, not_found
from omniq.publish import Post, posted
from omniq.redis_client import Client, broker_errors, connect
from omniq.settings import get_settings

logger = logging.getLogger(__name__)

PAGE = 200
LATE = 0.05
"""Seconds behind a deadline: this host knows the server's clock to some milliseconds."""
#: Where a page of jobs begins: when the last one before it was created, and its id.
CURSOR = re.compile(r"^[0-9]{1,15}(\.[0-9]{1,20})?~[a-z0-9-]{1,64}$")


class JobStore(StageRuns):
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
                    dumps(spec.stages),
                    dumps(upstream),
                    spec.id,
                    repr(spec.created),
                    int(get_settings().job_ttl * 1000),
                    "" if spec.deadline is None else repr(spec.deadline),
                    channel,
                    dumps([ref.model_dump_json() for ref in spec.files.values()]),
                    admission.ask(spec, self.share, again=again, hook=hook, room_for=room_for),
                    dumps(spec.partial) if spec.partial else "",
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
        record = self._own(read_record(await self._fields(job_id)))
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

    async def _fields(self, job_id: str) -> dict[bytes, bytes]:
        """The job's hash, whichever tenant's it is; raises as :meth:`get`."""
        with broker_errors():
            raw: dict[bytes, bytes] = await self.redis.hgetall(keys.job(job_id))
        if not raw:
            raise await self._absent(job_id)
        return raw

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

    async def standing(self, job_id: str, stage: str) -> Standing | None:
        """Where a job and one of its stages are, whatever version has recorded them; None: there is
        no such job.
        """
        fields = ("state", f"{stage}|state", f"{stage}|attempts")
        with broker_errors():
            found = await self.redis.execute_command("HMGET", keys.job(job_id), *fields)
        job, its, attempts = (b"" if value is None else value for value in found)
        return Standing(job.decode(), its.decode(), int(attempts or 0)) if job else None

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

    # -- ending and results ------------------------------------------------------------------

    async def cancel(self, job_id: str) -> JobRecord:
        """Ask a job to stop: at once if nothing runs, else ``cancelling`` until it has stopped.

        A job that has ended is returned as it is; of one that another version of omniq has
        recorded, and this one cannot read, states and times.

        Raises:
            JobNotFound: unknown job.
        """
        if self.share.tenant:
            await self._outline(job_id)
        state = await self._run("cancel", job_id, [job_id], keys.cancel_channel())
        if not state:
            raise await self._absent(job_id)
        try:
            return await self.get(job_id)
        except JobUnreadable:
            return await self._outline(job_id)

    async def _outline(self, job_id: str) -> JobRecord:
        """What every version can read of a job; raises as :meth:`get`."""
        return self._own(read_outline(job_id, await self._fields(job_id)))

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

    async def drop_artifacts(self, job_id: str, names: Sequence[str]) -> None:
        """Delete result files by their keys, which no record names."""
        if names:
            with broker_errors():
                async with self.redis.pipeline(transaction=False) as pipe:
                    pipe.unlink(*names)
                    pipe.srem(keys.job_files(job_id), *names)
                    await pipe.execute()

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

        Yields None after every ``block`` seconds of silence, so that a server can write heartbeats.
        A job that nobody has begun before its deadline expires then, as it is watched.
        All watchers of a store share one connection (:mod:`omniq.jobs.watch`). When the broker
        goes, they end with :class:`~omniq.errors.BrokerUnavailable` and may go on from their last
        id once it is back.

        Raises:
            JobNotFound: unknown job.
            InvalidRequest: ``after`` is no stream id.
        """
        if self.share.tenant:
            await self.get(job_id)
        with broker_errors():
            deadline = await self.redis.hget(keys.job(job_id), "deadline")
        expiry = None
        if deadline is not None:
            expiry = asyncio.create_task(self._expire_at(job_id, float(deadline)))
        try:
            async with aclosing(self._watching.events(job_id, after, block=block)) as events:
                async for event in events:
                    yield event
                    if event is None:
                        await self._expire(job_id)
        finally:
            if expiry is not None:
                expiry.cancel()

    async def _expire_at(self, job_id: str, deadline: float) -> None:
        """Look at the job when its deadline has passed; whoever else looks later finds it ended."""
        with suppress(BrokerUnavailable):
            await asyncio.sleep(max(0.0, await self._left(deadline)) + LATE)
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

"""The job store against a real Valkey: states, fences, joins, cancellation, expiry."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis.asyncio
from omniq_workers.cancel import Cancellation

from omniq import keys
from omniq.blobs.base import BlobRef
from omniq.errors import InvalidRequest, JobNotFound
from omniq.jobs.model import (
    ArtifactInfo,
    JobRecord,
    JobSpec,
    JobState,
    StageResult,
    StageState,
    Verdict,
    new_job_id,
)
from omniq.jobs.store import JobStore

CHAIN = {"a": [], "b": ["a"]}
DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}


@pytest.fixture
async def store(broker: object) -> Any:
    store = JobStore.from_settings()
    yield store
    await store.close()


async def create(store: JobStore, upstream: dict[str, list[str]] = CHAIN, **kw: Any) -> JobRecord:
    now = time.time()
    spec = JobSpec(
        id=new_job_id(now),
        pipeline=kw.pop("pipeline", "p"),
        inputs={"prompt": "x"},
        parameters={},
        stages=list(upstream),
        created=now,
        **kw,
    )
    return await store.create(spec, upstream)


async def begin(store: JobStore, job: JobRecord, stage: str, worker: str = "w", **kw: Any) -> Any:
    return await store.begin_stage(
        job.id, stage, worker, redelivered=kw.pop("redelivered", False), **kw
    )


async def finish(store: JobStore, job: JobRecord, stage: str, fence: int, **kw: Any) -> bool:
    return await store.finish_stage(job.id, stage, fence, StageResult(**kw))


async def run(store: JobStore, job: JobRecord, stage: str, **kw: Any) -> None:
    grant = await begin(store, job, stage)
    assert grant.verdict is Verdict.RUN
    assert await finish(store, job, stage, grant.fence, **kw)


async def types(store: JobStore, job: JobRecord, after: str = "0") -> list[str]:
    return [e.type async for e in store.events(job.id, after) if e is not None]


async def test_a_job_runs_through_its_stages_to_success(store: JobStore) -> None:
    job = await create(store)
    assert job.state is JobState.QUEUED
    assert (await begin(store, job, "b")).verdict is Verdict.WAIT
    grant = await begin(store, job, "a")
    assert (grant.verdict, grant.attempt) == (Verdict.RUN, 1)
    assert grant.spec is not None and grant.spec.inputs == {"prompt": "x"}
    fence = grant.fence
    assert await store.progress(job.id, "a", fence, 3, 10)
    assert await store.delta(job.id, "a", fence, "text", {"text": "hé"})
    assert await finish(store, job, "a", fence, outputs={"t": {"value": 7}}, metrics={"tokens": 3})
    grant = await begin(store, job, "b")
    assert grant.upstream == {"a": {"t": {"value": 7}}}
    artifact = ArtifactInfo(name="image", content_type="image/png", nbytes=3)
    artifact.key = await store.put_artifact(job.id, "image", grant.fence, b"png")
    outputs = {"values": {"text": "hi"}, "artifacts": {"image": artifact}}
    assert await finish(store, job, "b", grant.fence, **outputs)

    record = await store.get(job.id)
    assert record.state is JobState.SUCCEEDED
    assert record.values == {"text": "hi"}
    assert record.stages["a"].metrics == {"tokens": 3}
    assert (record.stages["a"].step, record.stages["a"].total) == (3, 10)
    assert record.started <= record.stages["b"].started <= record.finished  # type: ignore[operator]
    assert (await store.get_artifact(job.id, "image"))[0] == b"png"
    assert 0 < await store.redis.ttl(artifact.key) <= 86_400
    assert await types(store, job) == [
        "job.queued", "job.started", "stage.started", "stage.progress", "stage.delta",
        "stage.succeeded", "stage.started", "stage.succeeded", "job.succeeded",
    ]  # fmt: skip


async def test_a_redelivered_finished_stage_only_repeats_its_continuation(store: JobStore) -> None:
    job = await create(store)
    await run(store, job, "a", outputs={"t": {"value": 1}})
    grant = await begin(store, job, "a", redelivered=True)
    assert grant.verdict is Verdict.DONE
    assert grant.outputs == {"t": {"value": 1}}


async def test_a_redelivery_takes_over_and_the_zombie_is_refused(store: JobStore) -> None:
    job = await create(store)
    old = await begin(store, job, "a", "w1")
    assert (await begin(store, job, "a", "w2")).verdict is Verdict.DUPLICATE
    new = await begin(store, job, "a", "w2", redelivered=True)
    assert (new.verdict, new.attempt) == (Verdict.RUN, 2)
    assert new.fence > old.fence
    assert not await store.progress(job.id, "a", old.fence, 1, 2)
    assert not await finish(store, job, "a", old.fence, values={"text": "zombie"})
    assert not await store.fail_stage(job.id, "a", old.fence, {"code": "x", "message": "late"})
    assert await finish(store, job, "a", new.fence, values={"text": "right"})
    assert (await store.get(job.id)).values == {"text": "right"}


async def test_a_join_runs_once_when_its_last_input_is_there(store: JobStore) -> None:
    job = await create(store, DIAMOND)
    await run(store, job, "a")
    await run(store, job, "b", outputs={"x": {"value": "b"}})
    assert (await begin(store, job, "d")).verdict is Verdict.WAIT
    await run(store, job, "c", outputs={"x": {"value": "c"}})
    first, second = await begin(store, job, "d", "w1"), await begin(store, job, "d", "w2")
    assert first.verdict is Verdict.RUN
    assert first.upstream == {"b": {"x": {"value": "b"}}, "c": {"x": {"value": "c"}}}
    assert second.verdict is Verdict.DUPLICATE


async def test_cancelling_a_queued_job_is_immediate(store: JobStore) -> None:
    job = await create(store)
    assert (await store.cancel(job.id)).state is JobState.CANCELLED
    assert (await begin(store, job, "a")).verdict is Verdict.STOP
    assert (await store.get(job.id)).stages["a"].state is StageState.CANCELLED


async def test_cancelling_a_running_job_waits_until_it_has_stopped(
    store: JobStore, aredis: redis.asyncio.Redis
) -> None:
    job = await create(store)
    grant = await begin(store, job, "a")
    async with aredis.pubsub() as pubsub:
        await pubsub.subscribe(keys.cancel_channel())
        assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"
        assert (await store.cancel(job.id)).state is JobState.CANCELLING
        message = await pubsub.get_message(timeout=5)
    assert message["data"] == job.id.encode()
    assert not await store.progress(job.id, "a", grant.fence, 1, 2)
    assert (await store.get(job.id)).state is JobState.CANCELLING
    assert await store.stop_stage(job.id, "a", grant.fence)
    assert (await store.get(job.id)).state is JobState.CANCELLED
    assert (await types(store, job))[-2:] == ["job.cancelling", "job.cancelled"]


async def test_a_cancelled_run_that_ends_before_it_hears_of_it_has_stopped(store: JobStore) -> None:
    """Its worker is told when it runs no more: else the job would be cancelling for ever."""
    job = await create(store, DIAMOND)
    await run(store, job, "a")
    one, two = await begin(store, job, "b"), await begin(store, job, "c")
    assert (await store.cancel(job.id)).state is JobState.CANCELLING
    assert not await finish(store, job, "b", one.fence, values={"text": "late"})
    record = await store.get(job.id)
    assert (record.state, record.stages["b"].state) == (JobState.CANCELLING, StageState.CANCELLED)
    assert not await finish(store, job, "c", two.fence)
    record = await store.get(job.id)
    assert (record.state, record.values) == (JobState.CANCELLED, {})
    assert (await types(store, job))[-2:] == ["job.cancelling", "job.cancelled"]
    assert not await store.stop_stage(job.id, "c", two.fence), "it has been said"


async def test_the_end_of_a_job_stops_its_other_runs_and_no_later_ones(
    store: JobStore, aredis: redis.asyncio.Redis
) -> None:
    """Who hears of it late must not stop the run of a dead letter that is tried again."""
    job = await create(store, DIAMOND)
    await run(store, job, "a")
    left, right = await begin(store, job, "b"), await begin(store, job, "c")
    async with aredis.pubsub() as pubsub:
        await pubsub.subscribe(keys.cancel_channel())
        assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"
        error = {"code": "engine_error", "message": "oops"}
        assert await store.fail_stage(job.id, "b", left.fence, error, "Traceback")
        message = await pubsub.get_message(timeout=5)
        assert message["data"] == f"{job.id} c {right.fence}".encode()
        assert await pubsub.get_message(timeout=0.2) is None, "the others have no run"
    told = Cancellation.parse(message["data"].decode())
    assert told.means(job.id, "c", right.fence)
    assert not told.means(job.id, "c", right.fence + 1)
    assert not told.means(job.id, "b", left.fence)
    assert Cancellation.parse(job.id).means(job.id, "b", left.fence)


async def test_many_blobs_are_freed_with_their_job(store: JobStore) -> None:
    """A script can name no more than some thousands; the list of garbage has them all."""
    job = await create(store, {"a": []})
    grant = await begin(store, job, "a")
    refs = [
        BlobRef(id=f"{job.id}.a.1.x.{i}", store="shm", host="h1", nbytes=8, place=f"e.{i}.1")
        for i in range(9000)
    ]
    await store.redis.sadd(keys.job_blobs(job.id), *(ref.to_json() for ref in refs))
    done = await store.finish_stage(job.id, "a", grant.fence, StageResult(), host="h1")
    assert done and 0 < len(done.garbage) < 8000
    assert await store.redis.scard(keys.host_garbage("h1")) == len(refs)


async def test_cancelling_with_a_dead_worker_ends_with_the_redelivery(store: JobStore) -> None:
    job = await create(store)
    await begin(store, job, "a")
    await store.cancel(job.id)
    grant = await begin(store, job, "a", "w2", redelivered=True)
    assert grant.verdict is Verdict.STOP
    assert (await store.get(job.id)).state is JobState.CANCELLED


async def test_cancelling_an_ended_job_changes_nothing(store: JobStore) -> None:
    job = await create(store, {"a": []})
    await run(store, job, "a")
    assert (await store.cancel(job.id)).state is JobState.SUCCEEDED


async def test_a_retry_keeps_the_job_running_and_the_failure_ends_it(store: JobStore) -> None:
    job = await create(store)
    error = {"code": "engine_error", "message": "oops"}
    grant = await begin(store, job, "a")
    assert await store.retry_stage(job.id, "a", grant.fence, error, 1.5)
    record = await store.get(job.id)
    assert (record.state, record.stages["a"].state) == (JobState.RUNNING, StageState.RETRYING)
    grant = await begin(store, job, "a")
    assert (grant.verdict, grant.attempt) == (Verdict.RUN, 2)
    assert await store.fail_stage(job.id, "a", grant.fence, error)
    record = await store.get(job.id)
    assert (record.state, record.error) == (JobState.FAILED, error)
    assert record.stages["b"].state is StageState.CANCELLED
    assert "stage.retrying" in await types(store, job)


async def test_a_released_run_counts_as_no_attempt(store: JobStore) -> None:
    job = await create(store)
    for _ in range(5):
        grant = await begin(store, job, "a", max_deliveries=2)
        assert (grant.verdict, grant.attempt) == (Verdict.RUN, 1)
        assert await store.release_stage(job.id, "a", grant.fence)


async def test_a_stage_that_kills_its_workers_fails_the_job_as_poison(store: JobStore) -> None:
    job = await create(store)
    for _ in range(3):
        grant = await begin(store, job, "a", redelivered=True, max_deliveries=3)
        assert grant.verdict is Verdict.RUN
    grant = await begin(store, job, "a", redelivered=True, max_deliveries=3)
    assert grant.verdict is Verdict.STOP
    record = await store.get(job.id)
    assert record.error is not None and record.error["code"] == "delivery_limit"


async def test_an_overdue_job_expires_instead_of_starting(store: JobStore) -> None:
    job = await create(store, deadline=time.time() - 1)
    assert (await begin(store, job, "a")).verdict is Verdict.STOP
    record = await store.get(job.id)
    assert record.state is JobState.EXPIRED
    assert record.error is not None and record.error["code"] == "deadline_exceeded"


async def test_an_overdue_job_that_nobody_takes_expires_when_it_is_looked_at(
    store: JobStore,
) -> None:
    """By a reader, and by whoever watches it; never while it runs."""
    late = time.time() - 1
    assert (await store.get((await create(store, deadline=late)).id)).state is JobState.EXPIRED
    watched = await create(store, deadline=late)
    seen = [e.type async for e in store.events(watched.id, block=0.05) if e is not None]
    assert seen == ["job.queued", "job.expired"]
    running = await create(store, deadline=time.time() + 0.2)
    grant = await begin(store, running, "a")
    while time.time() < (running.spec.deadline or 0):
        await asyncio.sleep(0.05)
    assert (await store.get(running.id)).state is JobState.RUNNING
    error = {"code": "deadline_exceeded", "message": "too late"}
    assert await store.expire_stage(running.id, "a", grant.fence, error)
    record = await store.get(running.id)
    assert (record.state, record.error) == (JobState.EXPIRED, error)
    assert record.stages["a"].error == error
    assert not await store.expire_stage(running.id, "a", grant.fence, error)


async def test_the_end_of_a_job_frees_its_blobs_and_bounds_its_life(
    store: JobStore, aredis: redis.asyncio.Redis
) -> None:
    job = await create(store)
    grant = await begin(store, job, "a")
    refs = [
        BlobRef(id=f"{job.id}.a.1.r", store="redis", nbytes=1),
        BlobRef(id=f"{job.id}.a.1.s", store="shm", host="h1", nbytes=1),
    ]
    await aredis.set(keys.blob(refs[0].id), b"x")
    assert await finish(store, job, "a", grant.fence, blobs=refs)
    assert await aredis.exists(keys.blob(refs[0].id))
    await store.cancel(job.id)
    assert not await aredis.exists(keys.blob(refs[0].id), keys.job_blobs(job.id))
    garbage = await aredis.smembers(keys.host_garbage("h1"))
    assert [BlobRef.model_validate_json(g) for g in garbage] == [refs[1]]
    for key in (keys.job(job.id), keys.job_events(job.id), keys.host_garbage("h1")):
        assert 0 < await aredis.ttl(key) <= 86_400


async def test_events_resume_without_gap_or_repeat(store: JobStore) -> None:
    job = await create(store)
    seen = []

    async def watch(after: str, until: int) -> str:
        async for event in store.events(job.id, after, block=5):
            assert event is not None
            seen.append(event.type)
            after = event.id
            if len(seen) == until:
                break
        return after

    first = asyncio.create_task(watch("0", 2))
    grant = await begin(store, job, "a")
    last = await asyncio.wait_for(first, 5)
    second = asyncio.create_task(watch(last, 99))
    await finish(store, job, "a", grant.fence)
    await run(store, job, "b")
    await asyncio.wait_for(second, 5)
    assert seen == await types(store, job)
    assert [e async for e in store.events(job.id, last, block=1)][-1].type == "job.succeeded"  # type: ignore[union-attr]


async def test_events_after_the_end_return_at_once(store: JobStore) -> None:
    job = await create(store, {"a": []})
    await run(store, job, "a")
    last = [e.id async for e in store.events(job.id) if e][-1]
    began = time.monotonic()
    assert await types(store, job, last) == []
    assert time.monotonic() - began < 1


async def test_silence_yields_none(store: JobStore) -> None:
    job = await create(store)
    events = store.events(job.id, block=0.05)
    assert (await anext(events)).type == "job.queued"  # type: ignore[union-attr]
    assert await anext(events) is None


async def test_wait_returns_the_running_record_at_its_timeout(store: JobStore) -> None:
    job = await create(store)
    assert (await store.wait(job.id, 0.1)).state is JobState.QUEUED
    waiting = asyncio.create_task(store.wait(job.id, 10))
    await run(store, job, "a")
    await run(store, job, "b")
    assert (await asyncio.wait_for(waiting, 5)).state is JobState.SUCCEEDED


async def test_unknown_jobs_are_not_found(store: JobStore) -> None:
    for call in (
        store.get("no"),
        store.cancel("no"),
        store.wait("no", 1),
        store.get_artifact("no", "x"),
    ):
        with pytest.raises(JobNotFound):
            await call
    assert (await store.begin_stage("no", "a", "w", redelivered=False)).verdict is Verdict.STOP


async def test_list_filters_and_pages_newest_first(store: JobStore) -> None:
    jobs = [await create(store, {"a": []}, pipeline="pq"[i % 2]) for i in range(7)]
    await run(store, jobs[3], "a")
    got, cursor = await store.list(limit=3)
    more, end = await store.list(limit=10, cursor=cursor)
    assert [j.id for j in got + more] == [j.id for j in reversed(jobs)]
    assert end is None
    assert [j.id for j in (await store.list(states={JobState.SUCCEEDED}))[0]] == [jobs[3].id]
    assert len((await store.list(pipeline="q"))[0]) == 3
    with pytest.raises(InvalidRequest):
        await store.list(cursor="-1")
    with pytest.raises(InvalidRequest):
        await store.list(cursor="nan~x")


async def test_pages_keep_their_place_while_jobs_come_and_go(store: JobStore) -> None:
    jobs = [await create(store, {"a": []}) for _ in range(5)]
    page, cursor = await store.list(limit=2)
    await create(store, {"a": []})
    await store.redis.delete(keys.job(jobs[4].id), keys.job(jobs[2].id))
    rest, end = await store.list(limit=2, cursor=cursor)
    assert [j.id for j in page + rest] == [jobs[i].id for i in (4, 3, 1, 0)]
    assert end is None


async def test_jobs_created_at_the_same_moment_are_all_listed(store: JobStore) -> None:
    jobs = [await create(store, {"a": []}) for _ in range(7)]
    await store.redis.zadd(keys.jobs_index(), {j.id: 1000.0 for j in jobs})
    for j in jobs:
        spec = j.spec.model_copy(update={"created": 1000.0})
        await store.redis.hset(keys.job(j.id), "spec", spec.model_dump_json())
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page, cursor = await store.list(limit=1, cursor=cursor)
        seen += [j.id for j in page]
        if cursor is None:
            break
    assert sorted(seen) == sorted(j.id for j in jobs)


async def test_only_one_of_many_racing_workers_runs_a_stage(store: JobStore) -> None:
    job = await create(store)
    grants = await asyncio.gather(*(begin(store, job, "a", f"w{i}") for i in range(20)))
    assert sum(g.verdict is Verdict.RUN for g in grants) == 1
    fence = max(g.fence for g in grants)
    finished = await asyncio.gather(*(finish(store, job, "a", fence) for _ in range(20)))
    assert sum(map(bool, finished)) == 1

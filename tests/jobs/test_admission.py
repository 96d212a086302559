"""Who is let in: limits, shares, idempotency keys; and what is left of jobs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis.asyncio
from admission_helpers import (
    ADA,
    BOB,
    PIPELINE,
    finish,
    new,
    serve,
)

from omniq import keys
from omniq.config import get_pipeline
from omniq.errors import (
    IdempotencyConflict,
    InvalidRequest,
    JobGone,
    JobNotFound,
    Overloaded,
    ShareUsed,
)
from omniq.jobs.admission import Admission, Share, pool_pressure
from omniq.jobs.model import JobRecord, JobState
from omniq.jobs.store import JobStore
from omniq.jobs.webhooks import Webhook
from omniq.jobs.workers import WorkerRegistry
from omniq.settings import get_settings
from omniq.submit import submit

pytestmark = pytest.mark.usefixtures("small")


# -- limits of the system ----------------------------------------------------------------------


async def test_a_full_pipeline_refuses_and_leaves_no_trace(store: JobStore, setting: Any) -> None:
    setting("max_jobs", 3)
    jobs = [await new(store) for _ in range(3)]
    before = await store.redis.keys("*")
    with pytest.raises(Overloaded) as refused:
        await new(store)
    assert (refused.value.limit, refused.value.value, refused.value.size) == ("pipeline_jobs", 3, 3)
    assert refused.value.retry_after > 0
    assert sorted(await store.redis.keys("*")) == sorted(before)
    for job, end in zip(jobs, (finish, lambda s, j: s.cancel(j.id)), strict=False):
        await end(store, job)
        await new(store)
        with pytest.raises(Overloaded):
            await new(store)


async def test_simultaneous_submissions_do_not_get_past_a_limit(
    store: JobStore, setting: Any
) -> None:
    setting("max_jobs", 7)
    results = await asyncio.gather(*(new(store) for _ in range(40)), return_exceptions=True)
    assert sum(isinstance(r, JobRecord) for r in results) == 7
    assert sum(isinstance(r, Overloaded) for r in results) == 33


async def test_a_full_stage_refuses_jobs_of_its_pipeline(store: JobStore, setting: Any) -> None:
    setting("max_waiting", 4)
    for _ in range(4):
        await new(store, priority=3)
    with pytest.raises(Overloaded) as refused:
        await new(store, priority=9)
    assert refused.value.limit == "waiting:omniq.small.ar"
    for _ in range(4):
        assert await serve(store, "ar")
    with pytest.raises(Overloaded) as refused:
        await new(store)
    assert refused.value.limit == "waiting:omniq.small.dit", "also a stage further on"
    await serve(store, "dit")
    await new(store)


async def test_a_pipelines_file_says_its_own_limits(store: JobStore, tmp_path: Any) -> None:
    config = get_pipeline(PIPELINE)
    stages = [s.model_copy(update={"max_waiting": 5}) for s in config.stages[:1]]
    config = config.model_copy(update={"max_jobs": 9, "stages": stages + config.stages[1:]})
    admission = Admission.of(config)
    assert admission.most == 9
    assert list(admission.limits) == [5, *[get_settings().max_waiting] * 2]


async def test_jobs_whose_record_was_dropped_take_up_no_room(store: JobStore, setting: Any) -> None:
    setting("max_jobs", 1)
    setting("job_ttl", 0.2)
    await new(store)
    with pytest.raises(Overloaded):
        await new(store)
    await asyncio.sleep(0.3)
    await new(store)


async def test_who_is_refused_is_told_when_there_will_be_room(
    store: JobStore, setting: Any
) -> None:
    """A place comes free every 50 ms; the tenth that is refused comes back after ten of them."""
    setting("max_jobs", 20)
    jobs = [await new(store) for _ in range(20)]
    for job in jobs[:10]:
        await asyncio.sleep(0.05)
        await store.cancel(job.id)
        await new(store)
    began = time.time()
    told = []
    for _ in range(10):
        with pytest.raises(Overloaded) as refused:
            await new(store)
        told.append(refused.value.retry_after)
    ends = [float(t) for t in await store.redis.lrange("omniq:ends:small", 0, -1)]
    each = (ends[-1] - ends[0]) / 10
    assert told == sorted(told)
    late = time.time() - began
    assert told[0] == pytest.approx(each, rel=0.5, abs=late)
    assert told[-1] == pytest.approx(10 * each, rel=0.5, abs=10 * late)
    for _ in range(40):  # never later than all that is there will be done
        with pytest.raises(Overloaded) as refused:
            await new(store)
    assert refused.value.retry_after <= 20 * (each + late) + 0.1


async def test_nothing_is_accepted_that_would_fill_the_brokers_memory(own_valkey: Any) -> None:
    """Refused before anything is lost: what was accepted can still be finished."""
    store = JobStore.from_settings()
    try:
        await store.redis.config_set("maxmemory", "16mb")
        accepted = []
        for _ in range(100_000):
            try:
                accepted.append(await new(store))
            except Overloaded as exc:
                assert exc.limit == "broker_memory"
                assert exc.value == int(0.85 * 16 * 2**20) < exc.size
                break
        assert len(accepted) > 100
        for job in accepted[:50]:
            await finish(store, job)
        await store.redis.config_set("maxmemory", "60mb")
        await asyncio.sleep(0.15)
        await new(store)
    finally:
        await store.close()


async def test_a_host_whose_shared_memory_is_near_full_stops_its_pipeline(
    store: JobStore,
) -> None:
    from omniq.blobs.choice import BlobUse
    from omniq.jobs.workers import WorkerInfo, WorkerState

    def worker(used: int) -> WorkerInfo:
        use = BlobUse(
            mode="auto", shared_memory=True, slab_bytes=1000, used_bytes=used, host_bytes=1000,
            max_bytes=1000,
        )  # fmt: skip
        return WorkerInfo(
            id="w", pipeline=PIPELINE, stage="ar", state=WorkerState.READY, host="h",
            hostname="h", pid=1, since=time.time(), seen=time.time(), blobs=use,
        )  # fmt: skip

    registry = WorkerRegistry(store.redis)
    await registry.beat(worker(800))
    await new(store)
    await registry.beat(worker(900))
    with pytest.raises(Overloaded) as refused:
        await new(store)
    assert (refused.value.limit, refused.value.size) == ("shared_memory", 900)
    assert pool_pressure(1 << 60, 1 << 60) is None


async def test_input_files_wait_within_a_bound(store: JobStore, setting: Any) -> None:
    setting("max_waiting_input_bytes", 1000)
    await store.inputs.reserve("a" * 28, PIPELINE, 600)
    with pytest.raises(Overloaded) as refused:
        await store.inputs.reserve("b" * 28, PIPELINE, 600)
    assert (refused.value.limit, refused.value.value, refused.value.size) == (
        "input_bytes", 1000, 600,
    )  # fmt: skip
    await store.inputs.drop("a" * 28, 600, [])
    await store.inputs.reserve("b" * 28, PIPELINE, 600)
    await store.inputs.drop("a" * 28, 600, [])
    assert int(await store.redis.get("omniq:inputs:bytes")) == 600, "given up once"


# -- shares of tenants -------------------------------------------------------------------------


async def test_a_tenant_has_so_many_jobs_at_once(store: JobStore) -> None:
    share = Share(tenant="ada", max_jobs=2)
    first = await new(store, share)
    await new(store, share)
    with pytest.raises(ShareUsed) as refused:
        await new(store, share)
    assert (refused.value.limit, refused.value.value) == ("concurrent_jobs", 2)
    await new(store, BOB)
    await finish(store, first)
    await new(store, share)


async def test_a_tenant_has_so_many_jobs_a_day(store: JobStore) -> None:
    mine = store.of(Share(tenant="ada", daily=3))
    for left in (2, 1, 0):
        job = await submit(mine, pipeline=PIPELINE, inputs={"prompt": "x"})
        assert mine.usage is not None and mine.usage.today == left
        await finish(store, job)
    before = time.time()
    with pytest.raises(ShareUsed) as refused:
        await submit(mine, pipeline=PIPELINE, inputs={"prompt": "x"})
    assert refused.value.limit == "daily_jobs"
    midnight = (before // 86_400 + 1) * 86_400
    assert midnight - time.time() <= refused.value.retry_after + 0.001 <= midnight - before + 0.002


async def test_a_tenant_has_so_many_jobs_a_second(store: JobStore) -> None:
    mine = store.of(Share(tenant="ada", rate=20, burst=4))
    left = []
    with pytest.raises(ShareUsed) as refused:
        for _ in range(50):
            await submit(mine, pipeline=PIPELINE, inputs={"prompt": "x"})
            assert mine.usage is not None
            left.append(mine.usage.at_once)
    assert refused.value.limit == "rate"
    assert left[0] == 3 and left[-1] == 0
    assert 0 < refused.value.retry_after <= 1 / 20 + 0.002
    await asyncio.sleep(refused.value.retry_after)
    await submit(mine, pipeline=PIPELINE, inputs={"prompt": "x"})


async def test_a_tenants_priorities_have_a_highest(store: JobStore) -> None:
    share = Share(tenant="ada", max_priority=3)
    assert (await new(store, share)).spec.priority == 3
    with pytest.raises(InvalidRequest, match="0 to 3"):
        await new(store, share, priority=4)


# -- the same request again --------------------------------------------------------------------


async def test_the_same_request_again_is_the_same_job(store: JobStore) -> None:
    first = await new(store, idempotency_key="k")
    again = await new(store, idempotency_key="k")
    assert (again.id, again.spec.parameters) == (first.id, first.spec.parameters)
    assert (first.replayed, again.replayed) == (False, True)
    await finish(store, first)
    assert (await new(store, idempotency_key="k")).state is JobState.SUCCEEDED
    assert (await new(store, ADA, idempotency_key="k")).id != first.id, "keys are a tenant's own"
    assert (await new(store)).id != first.id
    with pytest.raises(IdempotencyConflict):
        await new(store, idempotency_key="k", priority=6)


async def test_simultaneous_requests_with_one_key_are_one_job(store: JobStore) -> None:
    jobs = await asyncio.gather(*(new(store, idempotency_key="k") for _ in range(20)))
    assert len({job.id for job in jobs}) == 1
    assert sum(not job.replayed for job in jobs) == 1
    assert await store.redis.zcard(keys.jobs_index()) == 1


async def test_a_request_that_was_refused_may_come_again_by_its_key(
    store: JobStore, setting: Any
) -> None:
    setting("max_jobs", 1)
    job = await new(store)
    with pytest.raises(Overloaded):
        await new(store, idempotency_key="k")
    await store.cancel(job.id)
    made = await new(store, idempotency_key="k")
    assert (await new(store, idempotency_key="k")).id == made.id, "also when there is no room"


@pytest.mark.parametrize("key", ["", "x" * 256, "a\nb", "é"])
async def test_faulty_keys_are_refused(store: JobStore, key: str) -> None:
    with pytest.raises(InvalidRequest, match="idempotency_key"):
        await new(store, idempotency_key=key)


async def test_jobs_of_one_request_have_one_key_and_are_told_apart(store: JobStore) -> None:
    """A key of the greatest length fits all of them, and stands for so many jobs."""
    key = "k" * 255
    jobs = [await new(store, idempotency_key=key, part=(i, 3)) for i in range(3)]
    again = [await new(store, idempotency_key=key, part=(i, 3)) for i in range(3)]
    assert len({job.id for job in jobs}) == 3
    assert [job.id for job in again] == [job.id for job in jobs]
    for parts in (1, 2, 4):
        with pytest.raises(IdempotencyConflict):
            await new(store, idempotency_key=key, part=(0, parts))
    await new(store, idempotency_key="a", part=(1, 2))
    assert not (await new(store, idempotency_key="a#1", part=(0, 2))).replayed


async def test_a_request_of_several_jobs_is_refused_before_it_uses_up_anything(
    store: JobStore, setting: Any
) -> None:
    share = Share(tenant="ada", rate=0.01, burst=4, daily=5, max_jobs=6)
    for _ in range(2):
        await new(store, share)
    with pytest.raises(ShareUsed) as refused:
        await new(store, share, room_for=3)
    assert refused.value.limit == "rate"
    assert 90 < refused.value.retry_after <= 100, "until there is room for all three"
    for left in (2, 1):
        await new(store, share, room_for=left)
    for limits, count in (({"daily": 5}, 2), ({"max_jobs": 5}, 2)):
        with pytest.raises(ShareUsed):
            await new(store, Share(tenant="ada", **limits), room_for=count)
    setting("max_jobs", 5)
    with pytest.raises(Overloaded):
        await new(store, BOB, room_for=2)
    await new(store, BOB)


async def test_a_request_that_comes_again_needs_nothing_of_what_it_names(
    store: JobStore, setting: Any
) -> None:
    """Its webhook's host may be gone by then, or there may be no room for its files."""
    hook = Webhook(url="https://8.8.8.8/")
    first = await new(store, idempotency_key="k", webhook=hook)
    setting("webhook_allow", '["example.com"]')
    assert (await new(store, idempotency_key="k", webhook=hook)).id == first.id
    with pytest.raises(IdempotencyConflict):
        await new(store, idempotency_key="k", priority=6, webhook=hook)
    with pytest.raises(InvalidRequest, match="not allowed"):
        await new(store.of(BOB), BOB, idempotency_key="k", webhook=hook)
    with pytest.raises(InvalidRequest, match="not allowed"):
        await new(store, idempotency_key="other", webhook=hook)


# -- leaving nothing ---------------------------------------------------------------------------


async def test_nothing_is_left_of_a_job_but_that_it_was(
    store: JobStore, setting: Any, aredis: redis.asyncio.Redis
) -> None:
    setting("retention", 0.3)
    setting("idempotency_ttl", 0.3)
    share = Share(tenant="ada", rate=1000, max_jobs=5, daily=100)
    job = await new(store, share, idempotency_key="k")
    await store.put_artifact(job.id, "image", 1, b"x")
    await finish(store, job)
    with pytest.raises(JobNotFound) as unknown:
        await store.get("0" * 28)
    assert not isinstance(unknown.value, JobGone)
    await asyncio.sleep(0.5)
    for reader in (store, store.of(share)):
        with pytest.raises(JobGone):
            await reader.get(job.id)
        assert await reader.list() == ([], None)
        with pytest.raises(JobGone):
            await reader.get(job.id)
    with pytest.raises(JobNotFound) as others:
        await store.of(BOB).get(job.id)
    assert not isinstance(others.value, JobGone)
    left = {k.decode().partition(":")[2] for k in await aredis.keys("omniq:*")}
    day = int(time.time() // 86_400)
    assert left <= {"gone", "gone:ada", f"tenant:ada:day:{day}", "memory"}, left


async def test_memory_returns_to_where_it_was(store: JobStore, setting: Any) -> None:
    """Records, events and result files, also those of a run that another has taken over."""
    setting("retention", 0.3)
    setting("tombstones", 0)

    async def round_of_jobs() -> None:
        for job in [await new(store) for _ in range(20)]:
            await store.put_artifact(job.id, "image", 1, bytes(100_000))
            await finish(store, job)
        while (await store.list())[0]:
            await asyncio.sleep(0.05)

    async def used() -> int:
        info = await store.redis.info("memory")
        return int(info["used_memory"]) - int(info["mem_not_counted_for_evict"])

    await round_of_jobs()  # scripts are loaded, tables grown
    before = await used()
    for _ in range(3):
        await round_of_jobs()  # 6 MB together
    deadline = time.monotonic() + 10
    while (now := await used()) > before + 300_000:
        assert time.monotonic() < deadline, (before, now)
        await asyncio.sleep(0.1)
    left = {k.decode().partition(":")[2] for k in await store.redis.keys("omniq:*")}
    assert left <= {"ends:small", "memory"}, left

"""Who is let in, and in which order: limits, shares, fair turns, idempotency keys."""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import omniq
from omniq import chain, keys
from omniq.celery import celery_priority, queue_keys
from omniq.config import available_pipelines, get_pipeline
from omniq.errors import (
    IdempotencyConflict,
    InvalidRequest,
    JobGone,
    JobNotFound,
    Overloaded,
    ShareUsed,
)
from omniq.jobs.admission import Admission, Share, pool_pressure
from omniq.jobs.model import JobRecord, JobState, StageResult, Verdict
from omniq.jobs.store import JobStore
from omniq.jobs.webhooks import Webhook
from omniq.jobs.workers import WorkerRegistry
from omniq.publish import Parent, post
from omniq.settings import get_settings
from omniq.submit import submit

STAGES = ("ar", "dit", "decode")
PIPELINE = "small"
NOBODYS = Share()
ADA, BOB = Share(tenant="ada"), Share(tenant="bob")


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline as tiny-omni, whose engines take one request at a time."""
    text = (Path(omniq.__file__).parent / "pipelines/tiny-omni.yaml").read_text()
    text = re.sub(r"max_in_flight: \d+", "max_in_flight: 1", text)
    file = tmp_path / "small.yaml"
    file.write_text(text.replace("name: tiny-omni", f"name: {PIPELINE}"))
    monkeypatch.setenv("OMNIQ_PIPELINES", json.dumps([str(file)]))


@pytest.fixture
async def store(broker: object) -> Any:
    available_pipelines.cache_clear()
    store = JobStore.from_settings()
    yield store
    await store.close()


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets one of omniq's settings."""

    def change(name: str, value: object) -> None:
        monkeypatch.setenv(f"OMNIQ_{name.upper()}", str(value))
        get_settings.cache_clear()

    return change


async def new(store: JobStore, share: Share = NOBODYS, **more: Any) -> JobRecord:
    return await submit(store.of(share), pipeline=PIPELINE, inputs={"prompt": "x"}, **more)


async def serve(store: JobStore, stage: str) -> str | None:
    """Take one message of a stage as stock Celery does and do its work; the job's id."""
    names = queue_keys(keys.stage_queue(PIPELINE, stage))
    popped = await store.redis.execute_command("LMPOP", len(names), *names, "RIGHT")
    if popped is None:
        return None
    job_id: str = json.loads(popped[1][0])["headers"]["id"].partition(".")[0]
    await run(store, job_id, stage)
    return job_id


async def run(store: JobStore, job_id: str, stage: str) -> None:
    """As a worker that has the stage's message; what follows is sent."""
    grant = await store.begin_stage(job_id, stage, "w", redelivered=False)
    if grant.verdict is not Verdict.RUN:
        return
    spec = grant.spec
    assert spec is not None
    behind = list(STAGES[STAGES.index(stage) + 1 :])
    parent = Parent(f"{job_id}.{stage}", job_id, celery_priority(spec.priority))
    posts = [post(chain._stage(spec, s), parent=parent) for s in behind[:1]]
    assert await store.finish_stage(job_id, stage, grant.fence, StageResult(), posts)


async def finish(store: JobStore, job: JobRecord) -> None:
    for stage in STAGES:
        await run(store, job.id, stage)
    assert (await store.get(job.id)).state is JobState.SUCCEEDED


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


# -- turns -------------------------------------------------------------------------------------


async def let_share(store: JobStore) -> None:
    """There is a tenant's key."""
    await store.redis.hset(keys.api_keys(), "x", "y")


async def drain(store: JobStore) -> list[str]:
    """Serve all there is, one at a time; the jobs in the order in which their first stage ran."""
    order = []
    while True:
        served = [await serve(store, stage) for stage in reversed(STAGES)]
        if served[-1] is not None:
            order.append(served[-1])
        if not any(served):
            return order


async def test_a_flood_of_one_tenant_does_not_stand_before_another(
    store: JobStore, setting: Any
) -> None:
    setting("fair_window", 8)
    await let_share(store)
    flood = [await new(store, ADA) for _ in range(60)]
    few = [await new(store, BOB) for _ in range(10)]
    owner = {job.id: job.spec.tenant for job in flood + few}
    order = [owner[job_id] for job_id in await drain(store)]
    assert collections.Counter(order) == {"ada": 60, "bob": 10}
    assert order.index("bob") <= 8 + 1, "only what was let go already is before him"
    of_bob = [i for i, tenant in enumerate(order) if tenant == "bob"]
    assert all(b - a <= 2 for a, b in itertools.pairwise(of_bob)), order
    assert not await store.redis.keys("omniq:pen:*"), "nothing is left"


async def test_without_tenants_every_job_goes_to_its_queue_at_once(
    store: JobStore, setting: Any
) -> None:
    setting("fair_window", 2)
    for _ in range(10):
        await new(store)
    assert await store.redis.llen(queue_keys("omniq.small.ar")[celery_priority(5)]) == 10


async def test_jobs_held_back_go_by_priority_and_none_starves(
    store: JobStore, setting: Any
) -> None:
    setting("fair_window", 2)
    await let_share(store)
    low = [await new(store, ADA, priority=0) for _ in range(6)]
    high = [await new(store, ADA, priority=9) for _ in range(40)]
    order = await drain(store)
    assert sorted(order) == sorted(j.id for j in low + high)
    places = sorted(order.index(j.id) for j in low)
    assert places[2] >= 8, "two were let go before; then eight of the higher priority at least"
    assert places[3] < 36, "but a lower one comes now and then"


async def test_jobs_held_back_that_end_are_passed_over(store: JobStore, setting: Any) -> None:
    setting("fair_window", 1)
    await let_share(store)
    jobs = [await new(store, ADA) for _ in range(10)]
    late = await new(store, ADA, timeout=0.05)
    for job in jobs[:8]:
        await store.cancel(job.id)
    await asyncio.sleep(0.1)
    assert set(await drain(store)) >= {jobs[8].id, jobs[9].id}
    assert (await store.get(late.id)).state is JobState.EXPIRED
    for job in jobs[8:]:
        assert (await store.get(job.id)).state is JobState.SUCCEEDED


async def test_nothing_is_left_of_jobs_that_end_while_they_are_held_back(
    store: JobStore, setting: Any
) -> None:
    """Whoever makes and cancels jobs for ever, while nothing is served, fills no list."""
    setting("fair_window", 2)
    await let_share(store)
    first = [(await new(store, ADA)).id for _ in range(2)]
    held = [await new(store, ADA, priority=i % 10) for i in range(20)]
    late = await new(store, ADA, timeout=0.05)
    lists = await store.redis.keys("omniq:pen:small|ada|*")
    assert sum([await store.redis.llen(key) for key in lists]) == 21
    for job in held:
        await store.cancel(job.id)
        assert not await store.redis.hexists(keys.job(job.id), "held")
    await asyncio.sleep(0.1)
    assert (await store.get(late.id)).state is JobState.EXPIRED
    assert not await store.redis.keys("omniq:pen:small|ada|*")
    last = await new(store, ADA)
    assert await drain(store) == [*first, last.id]
    assert not await store.redis.keys("omniq:pen:*")


async def test_a_lost_message_does_not_keep_the_others_back(store: JobStore, setting: Any) -> None:
    """Room is what the queues have, not what was counted: nothing that dies can use it up."""
    setting("fair_window", 2)
    await let_share(store)
    jobs = [await new(store, ADA) for _ in range(6)]
    for name in queue_keys("omniq.small.ar"):
        await store.redis.delete(name)
    await WorkerRegistry(store.redis)._run("let_go", "-", [PIPELINE])
    assert len(await drain(store)) == 4, [j.id for j in jobs]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("new"), st.sampled_from("abc"), st.integers(0, 9)),
            st.tuples(st.just("serve"), st.sampled_from(STAGES), st.integers(1, 4)),
        ),
        min_size=20,
        max_size=90,
    )
)
def test_tenants_with_work_get_equal_shares(
    broker: Any, monkeypatch: pytest.MonkeyPatch, steps: list[Any]
) -> None:
    """Whatever comes in whatever order: while two tenants have jobs held back, neither is let go
    more than two more than the other; all are served in the end, each once.
    """
    monkeypatch.setenv("OMNIQ_FAIR_WINDOW", "4")
    get_settings.cache_clear()
    available_pipelines.cache_clear()

    async def play() -> None:
        store = JobStore.from_settings()
        try:
            await store.redis.flushall()
            await let_share(store)
            made: dict[str, str] = {}
            since: dict[frozenset[str], collections.Counter[str]] = {}

            async def held() -> dict[str, int]:
                found: collections.Counter[str] = collections.Counter()
                for job_id, tenant in made.items():
                    found[tenant] += await store.redis.hexists(keys.job(job_id), "held")
                return dict(found)

            for step in steps:
                before = await held()
                if step[0] == "new":
                    job = await new(store, Share(tenant=step[1]), priority=step[2])
                    made[job.id] = step[1]
                    before[step[1]] = before.get(step[1], 0) + 1
                else:
                    for _ in range(step[2]):
                        await serve(store, step[1])
                after = await held()
                for a, b in (("a", "b"), ("a", "c"), ("b", "c")):
                    pair = frozenset((a, b))
                    if not (after.get(a) and after.get(b)):
                        since.pop(pair, None)
                    elif before.get(a) and before.get(b) and pair in since:
                        for tenant in pair:
                            since[pair][tenant] += before[tenant] - after[tenant]
                        assert abs(since[pair][a] - since[pair][b]) <= 2, since
                    else:
                        since[pair] = collections.Counter()
            order = await drain(store)
            assert len(order) == len(set(order))
            for job_id in made:
                assert (await store.get(job_id)).state is JobState.SUCCEEDED
        finally:
            await store.close()

    asyncio.run(play())


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


async def test_jobs_held_back_do_not_starve_when_the_last_key_is_revoked(
    store: JobStore, setting: Any
) -> None:
    setting("fair_window", 2)
    await let_share(store)
    held = [await new(store, ADA) for _ in range(6)]
    await store.redis.delete(keys.api_keys())
    order = []
    for _ in range(30):
        await new(store)
        order.append([await serve(store, stage) for stage in reversed(STAGES)][-1])
    assert {job.id for job in held} <= set(order)


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

"""In which order jobs are let go once there are tenants, and that no count drifts."""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import re
from typing import Any

import pytest
from admission_helpers import (
    ADA,
    BOB,
    PIPELINE,
    STAGES,
    drain,
    finish,
    let_share,
    new,
    serve,
    take,
)
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omniq import keys
from omniq.celery import celery_priority, queue_keys
from omniq.cli.inspect import inspect
from omniq.config import available_pipelines, get_pipeline
from omniq.jobs.admission import Share, held_back
from omniq.jobs.dead import DeadLetters
from omniq.jobs.model import JobRecord, JobState, Verdict
from omniq.jobs.reconcile import Reconciler
from omniq.jobs.store import JobStore
from omniq.jobs.workers import WorkerRegistry
from omniq.settings import get_settings

pytestmark = pytest.mark.usefixtures("small")


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


async def test_inspect_counts_jobs_that_are_held_back(store: JobStore, setting: Any) -> None:
    setting("fair_window", 2)
    await let_share(store)
    for share, count in ((ADA, 7), (BOB, 4)):
        for i in range(count):
            await new(store, share, priority=i % 10)
    held = await held_back(store.redis, PIPELINE)
    assert held == {"ada": 5, "bob": 4}
    seen = await asyncio.to_thread(CliRunner().invoke, inspect, ["--json"])
    assert json.loads(seen.output)["held_back"] == {PIPELINE: held}
    table = (await asyncio.to_thread(CliRunner().invoke, inspect, [])).output
    assert re.search(rf"{PIPELINE} +ada +5\n{PIPELINE} +bob +4", table), table
    await drain(store)
    assert await held_back(store.redis, PIPELINE) == {}


async def test_jobs_held_back_are_not_taken_for_lost(store: JobStore, setting: Any) -> None:
    """They have no message, which the reconciler would send."""
    setting("fair_window", 2)
    await let_share(store)
    jobs = [await new(store, ADA) for _ in range(6)]
    report = await Reconciler(store, get_pipeline(PIPELINE)).reconcile(grace=0)
    assert (report.open_jobs, report.messages, report.lost) == (6, 2, [])
    assert sorted(await drain(store)) == sorted(job.id for job in jobs)


async def test_a_dead_letter_that_is_tried_again_takes_its_place_again(store: JobStore) -> None:
    """Of the pipeline and of the tenant, and gives it up at its end."""
    job = await new(store, ADA)

    async def places() -> list[int]:
        names = (keys.open_jobs(PIPELINE), "omniq:tenant:ada:open")
        return [await store.redis.zcard(name) for name in names]

    grant = await store.begin_stage(job.id, "ar", "w", redelivered=False)
    error = {"code": "engine_error", "message": "broken"}
    assert await store.fail_stage(job.id, "ar", grant.fence, error, "Traceback")
    assert await places() == [0, 0]
    await DeadLetters(store).retry(job.id)
    assert await places() == [1, 1]
    assert (await store.get(job.id)).spec.tenant == "ada"
    await finish(store, job)
    assert await places() == [0, 0]


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


async def counts_are_right(store: JobStore, made: list[JobRecord]) -> None:
    """Of the unfinished jobs of both tenants and of the pipeline."""
    open_jobs: collections.Counter[str] = collections.Counter()
    for job in made:
        state = (await store.redis.hget(keys.job(job.id), "state")).decode()
        open_jobs[job.spec.tenant] += not JobState(state).final
    for tenant in "ab":
        assert await store.redis.zcard(f"omniq:tenant:{tenant}:open") == open_jobs[tenant]
    assert await store.redis.zcard(f"omniq:open:{PIPELINE}") == open_jobs.total()


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("new", "new", "late", "serve", "die", "fail", "cancel", "look")),
            st.sampled_from("ab"),
            st.sampled_from(STAGES),
            st.integers(0, 9),
        ),
        min_size=20,
        max_size=80,
    )
)
def test_whatever_happens_to_jobs_no_count_drifts(
    broker: Any, monkeypatch: pytest.MonkeyPatch, steps: list[Any]
) -> None:
    """Jobs that are served, fail, are cancelled or expire, held back or not, and lose workers."""
    monkeypatch.setenv("OMNIQ_FAIR_WINDOW", "2")
    get_settings.cache_clear()
    available_pipelines.cache_clear()

    async def play() -> None:
        store = JobStore.from_settings()
        made: list[JobRecord] = []
        dead: list[tuple[str, str]] = []

        async def step(what: str, tenant: str, stage: str, number: int) -> None:
            job = made[number % len(made)] if made else None
            if what in ("new", "late"):
                timeout = 0.002 if what == "late" else None
                more = {"timeout": timeout, "priority": number}
                made.append(await new(store, Share(tenant=tenant), **more))
            elif what == "serve":
                await serve(store, stage)
            elif what == "cancel" and job:
                await store.cancel(job.id)
            elif what == "look" and job:
                await store.get(job.id)
            elif what in ("die", "fail"):
                job_id = await take(store, stage)
                if job_id is not None:
                    grant = await store.begin_stage(job_id, stage, "w", redelivered=False)
                    if grant.verdict is Verdict.RUN and what == "die":
                        dead.append((job_id, stage))
                    elif grant.verdict is Verdict.RUN:
                        await store.fail_stage(job_id, stage, grant.fence, {"code": "x"})

        try:
            await store.redis.flushall()
            await let_share(store)
            for each in steps:
                await step(*each)
                await counts_are_right(store, made)
            for job_id, stage in dead:  # their messages come again, to be done by another worker
                grant = await store.begin_stage(job_id, stage, "w2", redelivered=True)
                if grant.verdict is Verdict.RUN:
                    await store.fail_stage(job_id, stage, grant.fence, {"code": "x"})
            await drain(store)
            for job in made:
                assert (await store.get(job.id)).state.final
            await counts_are_right(store, made)
            assert not await store.redis.keys("omniq:pen:*")
        finally:
            await store.close()

    asyncio.run(play())


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

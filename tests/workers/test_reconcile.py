"""Jobs whose message is lost are found, and only those."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from support import wait_until

from omniq import keys
from omniq.celery import queue_keys
from omniq.config import get_pipeline
from omniq.jobs.model import JobRecord, JobState, StageState
from omniq.jobs.reconcile import Reconciler, Report
from omniq.jobs.store import JobStore
from omniq.submit import submit

Notes = Callable[..., list[str]]


async def start_job(store: JobStore, prompt: str = "x", **more: Any) -> JobRecord:
    return await submit(store, pipeline="p", inputs={"prompt": prompt}, **more)


async def look(store: JobStore, *, send: bool = True) -> Report:
    return await Reconciler(store, get_pipeline("p")).reconcile(grace=0, send=send)


def purge(client: redis.Redis, stage: str = "a") -> None:
    client.delete(*queue_keys(keys.stage_queue("p", stage)))


async def test_a_purged_message_is_sent_again(
    stages: Any, store: JobStore, redis_client: redis.Redis, notes: Notes
) -> None:
    """By the workers themselves; the stage before is not repeated."""
    stages.define("a>b")
    stages.start("a", OMNIQ_RECONCILE_INTERVAL=0.5)
    job = await start_job(store)
    while (await store.get(job.id)).stages["a"].state is not StageState.SUCCEEDED:
        await asyncio.sleep(0.02)
    purge(redis_client, "b")
    while not redis_client.exists(*queue_keys(keys.stage_queue("p", "b"))):
        await asyncio.sleep(0.02)
    stages.start("b")
    record = await store.wait(job.id, 30)
    assert record.state is JobState.SUCCEEDED
    assert notes("run a") == [f"run a {job.id}"] and notes("run b") == [f"run b {job.id}"]
    events = [e.type async for e in store.events(job.id) if e is not None]
    assert events.count("stage.requeued") == 1
    assert redis_client.zcard(keys.open_jobs("p")) == 0


async def test_only_lost_jobs_are_sent_again(
    stages: Any, store: JobStore, redis_client: redis.Redis
) -> None:
    """Queued, held, finished, cancelled and expired ones are not; a second look finds nothing."""
    stages.define("a>b")
    lost, late = await start_job(store, "lost"), await start_job(store, timeout=0.01)
    purge(redis_client)
    queued, held = await start_job(store, "queued"), await start_job(store, "held")
    cancelled = await start_job(store)
    await store.cancel(cancelled.id)
    list_key = keys.stage_queue("p", "a")
    (name,) = [k for k in queue_keys(list_key) if redis_client.exists(k)]
    found = [
        m for m in redis_client.lrange(name, 0, -1) if held.id in json.loads(m)["headers"]["id"]
    ]
    redis_client.lrem(name, 1, found[0])
    record = json.dumps([json.loads(found[0]), "", list_key])
    redis_client.hset(keys.unacked(), "tag", record)

    assert late.spec.deadline is not None
    await asyncio.sleep(max(0, late.spec.deadline - time.time()))
    dry = await look(store, send=False)
    assert [(x.job, x.stage, x.state) for x in dry.lost] == [(lost.id, "a", "queued")]
    assert (dry.open_jobs, dry.sent) == (3, 0)
    assert (await store.get(late.id)).state is JobState.EXPIRED, "the look ends it"
    assert (await look(store)).sent == 1
    again = await look(store)
    assert (again.lost, again.messages, again.open_jobs) == ([], 4, 3)
    assert {queued.id, held.id, lost.id} == {
        i.decode() for i in redis_client.zrange(keys.open_jobs("p"), 0, -1)
    }


async def test_a_run_without_message_or_worker_is_given_up(
    stages: Any, store: JobStore, redis_client: redis.Redis
) -> None:
    """Its late write is refused; a job that was being cancelled ends."""
    stages.define("a>b")
    lost, cancelled = await start_job(store), await start_job(store)
    purge(redis_client)
    grant, _ = [
        await store.begin_stage(job.id, "a", "gone@nowhere", redelivered=False)
        for job in (lost, cancelled)
    ]
    assert (await store.cancel(cancelled.id)).state is JobState.CANCELLING
    assert (await look(store)).sent == 2
    assert (await store.get(cancelled.id)).state is JobState.CANCELLED
    assert not await store.fail_stage(lost.id, "a", grant.fence, {"code": "x", "message": "late"})
    newer = await store.begin_stage(lost.id, "a", "w", redelivered=False)
    assert newer.verdict == "run" and newer.fence > grant.fence


async def test_a_run_of_a_live_worker_needs_no_message(
    stages: Any, store: JobStore, redis_client: redis.Redis, notes: Notes
) -> None:
    stages.define("a")
    stages.start("a", OMNIQ_RECONCILE_INTERVAL=0.5, OMNIQ_VISIBILITY_TIMEOUT=60)
    job = await start_job(store, "a:sleep=4")
    await asyncio.to_thread(wait_until, lambda: notes("run a"))
    redis_client.delete(keys.unacked(), f"{keys.unacked()}_index")
    record = await store.wait(job.id, 30)
    assert (record.state, record.stages["a"].attempts) == (JobState.SUCCEEDED, 1)


async def test_every_branch_of_a_graph_has_its_message(
    stages: Any, store: JobStore, redis_client: redis.Redis
) -> None:
    stages.define("a>b", "a>c", "b>d", "c>d")
    job = await start_job(store)
    purge(redis_client)
    assert [x.stage for x in (await look(store)).lost] == ["a"]
    stages.start("a")
    while (await store.get(job.id)).stages["a"].state is not StageState.SUCCEEDED:
        await asyncio.sleep(0.02)
    purge(redis_client, "c")
    assert [x.stage for x in (await look(store)).lost] == ["c"], "b has one, d waits"
    stages.start("b", "c", "d")
    record = await store.wait(job.id, 30)
    assert record.state is JobState.SUCCEEDED
    assert [s.attempts for s in record.stages.values()] == [1, 1, 1, 1]


@pytest.mark.parametrize("args", [[], ["--json"]])
async def test_the_command_reports_what_it_did(
    stages: Any, store: JobStore, redis_client: redis.Redis, args: list[str]
) -> None:
    stages.define("a")
    job = await start_job(store)
    purge(redis_client)
    command = [sys.executable, "-m", "omniq", "reconcile", "--pipeline", "p", "--grace", "0"]
    done = await asyncio.to_thread(
        subprocess.run, [*command, *args], capture_output=True, text=True, check=True
    )
    if args:
        (report,) = json.loads(done.stdout)
        assert (report["sent"], report["lost"][0]["job"]) == (1, job.id)
    else:
        assert f"{job.id} a: queued, without a message" in done.stdout

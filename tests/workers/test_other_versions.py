"""Records of another version of omniq: nobody stumbles over them, and they can be tried again."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
import redis

from omniq import keys
from omniq.config import get_pipeline
from omniq.errors import DeadLetterLost, JobUnreadable
from omniq.jobs.dead import DeadLetters
from omniq.jobs.model import JobRecord, JobSpec
from omniq.jobs.reconcile import Reconciler
from omniq.jobs.store import JobStore
from omniq.jobs.workers import WorkerRegistry
from omniq.submit import submit


def test_a_record_names_only_what_is_not_at_its_default() -> None:
    """So that an older version reads it if it asks for nothing new."""
    spec = JobSpec(id="a", pipeline="p", inputs={}, parameters={}, stages=["s"], created=1.0)
    assert set(json.loads(spec.to_json())) == {
        "id", "pipeline", "inputs", "parameters", "stages", "created"
    }  # fmt: skip
    assert JobSpec.from_json(spec.to_json()) == spec
    other = spec.model_copy(update={"priority": 9, "tenant": "t", "stream": False})
    assert JobSpec.from_json(other.to_json()) == other
    with pytest.raises(JobUnreadable, match="pipeline: Field required"):
        JobSpec.from_json(b'{"id": "a"}')


async def test_a_record_that_asks_for_more_fails_and_harms_no_other(
    own_valkey: Any, own_broker_stages: Any, notes: Any
) -> None:
    stages = own_broker_stages
    stages.define("a>b")
    client = redis.Redis(port=own_valkey.port)
    store = JobStore.from_settings()
    odd, lost, good = [await submit(store, pipeline="p", inputs={"prompt": "x"}) for _ in range(3)]
    kept = {}
    for job in (odd, lost):
        kept[job.id] = client.hget(keys.job(job.id), "spec")
        spec = {**json.loads(kept[job.id]), "future": {"more": 1}}
        client.hset(keys.job(job.id), "spec", json.dumps(spec))
    # Of one the message is lost as well: the reconciler meets it.
    queue = keys.stage_queue("p", "a")
    names = list(client.scan_iter(f"{queue}*"))
    held = [(n, i) for n in names for i in client.lrange(n, 0, -1) if lost.id.encode() in i]
    assert [client.lrem(name, 1, item) for name, item in held] == [1]
    stages.start("a", "b", OMNIQ_RECONCILE_INTERVAL=1)
    assert (await store.wait(good.id, 30)).state == "succeeded"
    for job in (odd, lost):
        with pytest.raises(JobUnreadable, match="future: Extra inputs are not permitted"):
            await store.wait(job.id, 30)
        assert client.hget(keys.job(job.id), "state") == b"failed"
        assert json.loads(client.hget(keys.job(job.id), "error"))["code"] == "job_unreadable"
    assert [r.id for r in (await store.list())[0]] == [good.id]

    letters = DeadLetters(store)
    found = {(x.id, x.reason, x.stage) for x in await letters.list()}
    assert found == {(job.id, "job_unreadable", "a") for job in (odd, lost)}
    with pytest.raises(JobUnreadable):
        await letters.retry(odd.id)

    # A process of their version, here: their records as this one writes them.
    for job_id, spec in kept.items():
        client.hset(keys.job(job_id), "spec", spec)
    for job in (odd, lost):
        await letters.retry(job.id)
        assert (await store.wait(job.id, 30)).state == "succeeded", job.id
    assert len(notes(f"run a {odd.id}")) == 1
    await store.close()


async def test_a_job_that_cannot_be_read_can_be_cancelled(
    stages: Any, store: JobStore, redis_client: redis.Redis, pool_app: Any
) -> None:
    """A queued one by Celery, a running one by the store: no process stumbles over its record."""
    stages.define("a>b", window=1)
    stages.start("a")
    running, queued = [
        await submit(store, pipeline="p", inputs={"prompt": "a:sleep=60"}) for _ in range(2)
    ]
    while (await store.get(running.id)).stages["a"].state != "running":
        await asyncio.sleep(0.02)
    for job in (running, queued):
        redis_client.hset(keys.job(job.id), "spec", json.dumps({"id": job.id, "future": 1}))
    pool_app.app.control.revoke(f"{queued.id}.a")

    async def ended(job: JobRecord) -> None:
        async with asyncio.timeout(30):
            while redis_client.hget(keys.job(job.id), "state") != b"cancelled":
                await asyncio.sleep(0.02)

    await ended(queued)
    record = await store.cancel(queued.id)
    assert (record.id, record.state, record.spec.pipeline) == (queued.id, "cancelled", "p")
    assert record.stages["a"].state == "cancelled" and record.finished is not None
    # Who was away when it was announced looks into the records.
    assert redis_client.client_kill_filter(_type="pubsub") > 0
    assert (await store.cancel(running.id)).state == "cancelling"
    await ended(running)
    last = await submit(store, pipeline="p", inputs={"prompt": "x"})
    async with asyncio.timeout(30):
        while (await store.get(last.id)).stages["a"].state != "succeeded":
            await asyncio.sleep(0.02)
    assert stages.workers["a"].popen.poll() is None


async def test_a_worker_that_cannot_be_read_lives(
    stages: Any, store: JobStore, redis_client: redis.Redis
) -> None:
    """Its runs are not given up; it is passed over where its status would be shown."""
    stages.define("a>b")
    job = await submit(store, pipeline="p", inputs={"prompt": "x"})
    assert (await store.begin_stage(job.id, "a", "newer", redelivered=False)).verdict == "run"
    redis_client.delete(*redis_client.scan_iter("omniq.p.*"))
    redis_client.set(keys.worker("newer"), json.dumps({"id": "newer", "state": "resting"}))
    redis_client.zadd(keys.workers_index(), {"newer": time.time()})
    reconciler = Reconciler(store, get_pipeline("p"))
    assert (await reconciler.reconcile(grace=0)).lost == []
    assert await WorkerRegistry(store.redis).all() == []
    redis_client.delete(keys.worker("newer"))
    assert (await reconciler.reconcile(grace=0)).sent == 1


async def test_a_lost_job_of_a_pipeline_that_has_other_stages_now_is_a_dead_letter(
    stages: Any, store: JobStore, redis_client: redis.Redis
) -> None:
    stages.define("a>old")
    job = await submit(store, pipeline="p", inputs={"prompt": "x"})
    redis_client.delete(*redis_client.scan_iter("omniq.p.*"))
    stages.define("a>new")
    report = await Reconciler(store, get_pipeline("p")).reconcile(grace=0)
    assert (report.sent, [lost.job for lost in report.lost]) == (1, [job.id])
    record = await store.get(job.id)
    assert record.state == "failed" and record.error is not None
    assert record.error["code"] == "pipeline_changed"
    letters = DeadLetters(store)
    assert [(x.id, x.resumes_at) for x in await letters.list()] == [(job.id, [])]
    with pytest.raises(DeadLetterLost, match="it needs a, old; there are a, new"):
        await letters.retry(job.id)
    stages.define("a>old")
    await letters.retry(job.id)
    stages.start("a", "old")
    assert (await store.wait(job.id, 30)).state == "succeeded"

"""With OMNIQ_MESSAGE_KEYS workers run what was signed, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import redis
from celery import Celery
from test_celery_command import celery

from omniq import keys, signing
from omniq.celery import app, celery_priority, queue_keys
from omniq.config import get_pipeline
from omniq.jobs.dead import DeadLetters
from omniq.jobs.model import JobRecord, JobState
from omniq.jobs.store import JobStore
from omniq.settings import get_settings
from omniq.submit import submit
from omniq.tasks import submit_job

OLD, NEW = "an old secret, long enough", "a new secret, long enough"
Notes = Callable[..., list[str]]


@pytest.fixture
def signed_by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the keys of this process, and of workers started from now on."""

    def change(*secrets: str) -> None:
        monkeypatch.setenv("OMNIQ_MESSAGE_KEYS", json.dumps(secrets))
        get_settings.cache_clear()
        app.follow_settings()

    return change


async def start_job(store: JobStore, prompt: str = "x") -> JobRecord:
    return await submit(store, pipeline="p", inputs={"prompt": prompt})


async def set_aside(store: JobStore, count: int) -> list[str]:
    """Why messages were refused, once there are so many."""
    while len(found := await DeadLetters(store).list()) < count:
        await asyncio.sleep(0.02)
    return [letter.reason for letter in found]


@pytest.mark.parametrize("edges", [("a>b", "b>c"), ("a>b", "a>c", "b>d", "c>d")])
async def test_signed_jobs_run_through_retries_and_lost_workers(
    stages: Any, store: JobStore, signed_by: Callable[..., None], edges: tuple[str, ...]
) -> None:
    """Continuations, a retry by Celery, a redelivery: the signature goes with all of them."""
    stages.define(*edges)
    signed_by(NEW)
    stages.start(*get_pipeline("p").topological_order())
    jobs = [await start_job(store, prompt) for prompt in ("x", "b:retry=1", "b:die=1")]
    await asyncio.to_thread(stages.workers["b"].popen.wait, 20)
    stages.start("b")
    for job in jobs:
        assert (await store.wait(job.id, 30)).state is JobState.SUCCEEDED
    assert await DeadLetters(store).list() == []


async def test_what_is_not_signed_does_not_run_and_no_job_is_lost(
    stages: Any,
    store: JobStore,
    signed_by: Callable[..., None],
    redis_client: redis.Redis,
    notes: Notes,
) -> None:
    """Messages are replaced in their queue; the reconciler sends the right ones again."""
    stages.define("a>b")
    signed_by(NEW)
    jobs = [await start_job(store) for _ in range(3)]
    queue = queue_keys(keys.stage_queue("p", "a"))[celery_priority(5)]
    unsigned, wrong, changed = [json.loads(redis_client.rpop(queue)) for _ in jobs]  # type: ignore[arg-type]
    del unsigned["headers"][signing.HEADER]
    wrong["headers"][signing.HEADER] = "0" * 64
    changed["headers"]["task"] = "omniq.cancel"
    for message in (unsigned, wrong, changed):
        redis_client.lpush(queue, json.dumps(message))
    stages.start("a", "b", OMNIQ_RECONCILE_INTERVAL=0.5)
    for job in jobs:
        assert (await store.wait(job.id, 30)).state is JobState.SUCCEEDED
        assert notes(f"run a {job.id}") == [f"run a {job.id}"]
    assert await set_aside(store, 3) == ["bad_signature"] * 3
    log = stages.workers["a"].output()
    assert "it is not signed" in log and "another key" in log and "Traceback" not in log


async def test_a_message_handed_to_a_worker_is_looked_at_too(
    stages: Any, store: JobStore, signed_by: Callable[..., None], notes: Notes
) -> None:
    """Of a sender with another key the run that has begun is given back."""
    stages.define("a")
    signed_by(NEW)
    stages.start("a", OMNIQ_RECONCILE_INTERVAL=0.5)
    signed_by(OLD)
    job = await start_job(store)
    signed_by(NEW)
    assert await set_aside(store, 1) == ["bad_signature"]
    record = await store.wait(job.id, 30)
    assert record.state is JobState.SUCCEEDED, "the reconciler's is signed by the right key"
    assert (notes("run a"), record.stages["a"].attempts) == ([f"run a {job.id}"], 1)


async def test_old_keys_are_good_while_they_are_listed(
    stages: Any, store: JobStore, signed_by: Callable[..., None]
) -> None:
    stages.define("a>b")
    signed_by(OLD)
    job = await start_job(store)
    signed_by(NEW, OLD)
    stages.start("a", "b")
    assert (await store.wait(job.id, 30)).state is JobState.SUCCEEDED
    assert await DeadLetters(store).list() == []


async def test_celery_clients_need_the_application_and_its_keys(
    stages: Any, store: JobStore, broker: Any, signed_by: Callable[..., None]
) -> None:
    """``celery -A omniq call`` signs; a plain client is refused."""
    stages.define("a>b")
    signed_by(NEW)
    stages.start("a", "b")
    call = json.dumps({"pipeline": "p", "inputs": {"prompt": "x"}})
    task = (await asyncio.to_thread(celery, "call", "omniq.submit", "--kwargs", call)).strip()
    started = await asyncio.to_thread(submit_job.AsyncResult(task).get, timeout=20)
    assert (await store.wait(started["id"], 20)).state is JobState.SUCCEEDED
    plain = Celery("plain", broker=broker.url, set_as_current=False)
    plain.send_task("omniq.submit", ["p"], {"prompt": "x"}, queue="omniq.control")
    assert await set_aside(store, 1) == ["bad_signature"]
    plain.close()
    jobs, _ = await store.list()
    assert [job.id for job in jobs] == [started["id"]]

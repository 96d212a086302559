"""Jobs that failed for good are kept, and tried again from where they failed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis
from support import wait_until

from omniq import keys
from omniq.errors import DeadLetterLost, DeadLetterNotFound
from omniq.jobs.dead import DeadLetters
from omniq.jobs.model import JobRecord, JobState
from omniq.jobs.store import JobStore
from omniq.settings import get_settings
from omniq.submit import submit

Notes = Callable[..., list[str]]


async def failed(store: JobStore, prompt: str, **more: Any) -> JobRecord:
    job = await submit(store, pipeline="p", inputs={"prompt": prompt}, **more)
    record = await store.wait(job.id, 30)
    assert record.state is JobState.FAILED
    return record


async def omniq(*args: str) -> str:
    command = [sys.executable, "-m", "omniq", *args]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_dead_letter_is_tried_again_where_it_failed(
    stages: Any, store: JobStore, redis_client: redis.Redis, notes: Notes
) -> None:
    """Values are still there; tensors are not, so that the stage that made them runs again. By the
    command, with a deadline that has passed; who reads the events anew sees the new end.
    """
    stages.define("a>b")
    stages.start("a", "b")
    letters = DeadLetters(store)
    value = await failed(store, "b:retry=3", timeout=20)
    tensor = await failed(store, "a:tensors b:retry=3")
    invalid = await failed(store, "b:invalid")
    found = {x.id: x for x in await letters.list()}
    assert set(found) == {value.id, tensor.id}, "a bad request is none"
    letter = found[value.id]
    assert (letter.stage, letter.reason, letter.attempts) == ("b", "engine_out_of_memory", 3)
    assert letter.traceback is not None and "not this time" in letter.traceback
    assert "stage_engines.py" in letter.traceback
    assert (letter.inputs, letter.resumes_at) == ({"a.text": "value"}, ["b"])
    letter = found[tensor.id]
    assert letter.resumes_at == ["a"] and letter.inputs["a.text"].startswith(f"{tensor.id}.a.")

    shown = await omniq("dlq", "show", value.id)
    assert "a retry begins at b" in shown and "not this time" in shown
    assert value.id in await omniq("dlq", "list")
    await omniq("dlq", "retry", value.id, tensor.id)
    for job, runs in ((value, 1), (tensor, 2)):
        record = await store.wait(job.id, 30)
        assert record.state is JobState.SUCCEEDED and record.error is None
        assert len(notes(f"run a {job.id}")) == runs
        assert len(notes(f"run b {job.id}")) == 4
        types = [e.type async for e in store.events(job.id) if e is not None]
        assert types[-1] == "job.succeeded" and "job.requeued" in types
        assert "job.failed" not in types
    assert await letters.list() == []
    for job in (value, invalid):
        with pytest.raises(DeadLetterNotFound):
            await letters.retry(job.id)
    wait_until(lambda: redis_client.hlen(keys.unacked()) == 0)


async def test_a_poisonous_job_is_a_dead_letter(stages: Any, store: JobStore) -> None:
    stages.define("a>b")
    job = await submit(store, pipeline="p", inputs={"prompt": "x"}, timeout=60)
    begin = partial(store.begin_stage, job.id, "a", "w", max_deliveries=1)
    first, second = [await begin(redelivered=True) for _ in range(2)]
    assert second.state is JobState.FAILED
    letter = await DeadLetters(store).get(job.id)
    assert (letter.reason, letter.deliveries, letter.worker) == ("delivery_limit", 2, "w")
    assert letter.inputs == {"input.prompt": "value"}
    record = await DeadLetters(store).retry(job.id)
    assert (record.state, record.spec.deadline) == (JobState.QUEUED, None)
    grant = await begin(redelivered=False)
    assert grant.verdict == "run", "deliveries begin anew"
    assert grant.fence > first.fence, "fences go on growing"


async def test_dead_letters_are_bounded_and_can_be_dropped(
    stages: Any, store: JobStore, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages.define("a>b")
    monkeypatch.setenv("OMNIQ_MAX_DEAD_LETTERS", "2")
    monkeypatch.setenv("OMNIQ_RETENTION", "60")
    get_settings.cache_clear()
    letters, jobs = DeadLetters(store), []
    for _ in range(3):
        jobs.append(await submit(store, pipeline="p", inputs={"prompt": "x"}))
        grant = await store.begin_stage(jobs[-1].id, "a", "w", redelivered=False)
        error = {"code": "engine_error", "message": "no"}
        assert await store.fail_stage(jobs[-1].id, "a", grant.fence, error, "Traceback: no")
    assert [x.id for x in await letters.list()] == [jobs[2].id, jobs[1].id]
    with pytest.raises(DeadLetterNotFound):
        await letters.get(jobs[0].id)
    ttl = [redis_client.pttl(keys.job(j.id)) / 1000 for j in jobs]
    assert ttl[0] <= 60 < ttl[1], "a dead letter's record stays longer"
    await letters.drop(jobs[1].id)
    assert redis_client.pttl(keys.job(jobs[1].id)) <= 60_000
    with pytest.raises(DeadLetterNotFound):
        await letters.drop(jobs[1].id)
    redis_client.delete(keys.job(jobs[2].id))
    assert await letters.list() == [] and redis_client.zcard(keys.dead_letters()) == 0


async def test_what_is_no_message_lies_there_too(
    stages: Any, store: JobStore, redis_client: redis.Redis
) -> None:
    stages.define("a")
    stages.start("a")
    redis_client.lpush(keys.stage_queue("p", "a"), b"\xff no message")
    letters = DeadLetters(store)
    while not (found := await letters.list()):
        await asyncio.sleep(0.02)
    (letter,) = found
    assert (letter.kind, letter.reason) == ("message", "undecodable")
    assert "no message" in (await letters.get(letter.id)).message
    with pytest.raises(DeadLetterLost, match="only be dropped"):
        await letters.retry(letter.id)
    await letters.drop(letter.id)
    assert await letters.list() == []

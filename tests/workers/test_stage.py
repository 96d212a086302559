"""Jobs through real stage workers: what a stage run does, and what happens when it does not."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from omniq_workers.devices import visible_gpus
from support import blobs_in, wait_until

from omniq.celery import queue_keys
from omniq.jobs.model import JobRecord, JobState, StageState, Verdict
from omniq.jobs.store import JobStore
from omniq.jobs.workers import WorkerRegistry, WorkerState
from omniq.submit import submit

HERE = Path(__file__).parent
Notes = Callable[..., list[str]]
on_gpu = pytest.mark.skipif(not visible_gpus(), reason="only a CUDA device is lost so")


async def start_job(store: JobStore, prompt: str = "x", **more: Any) -> JobRecord:
    return await submit(store, pipeline="p", inputs={"prompt": prompt}, **more)


async def ended(store: JobStore, job: JobRecord, timeout: float = 30) -> JobRecord:
    record = await store.wait(job.id, timeout)
    assert record.state.final, record
    return record


async def noted(notes: Notes, prefix: str, count: int = 1, timeout: float = 20) -> None:
    await asyncio.to_thread(
        wait_until, lambda: len(notes(prefix)) >= count, timeout, f"{count} x {prefix!r}"
    )


async def test_a_job_runs_through_its_stages(
    stages: Any, store: JobStore, notes: Notes, unacked: Any
) -> None:
    """Also: ready before the first task, progress and deltas in order, tensors by blob."""
    stages.define("a>b", a={"load": 0.5})
    job = await start_job(store, "a:say=hello a:tensors a:sleep=0.3 b:sleep=0.2")
    stages.start("a", "b")
    record = await ended(store, job)
    assert record.state is JobState.SUCCEEDED
    assert record.values["text"].startswith("a:say=hello")
    assert [s.attempts for s in record.stages.values()] == [1, 1]
    assert notes("tensors b") == ["tensors b a [[0, 1, 2], [3, 4, 5]]"]
    log = stages.workers["a"].output()
    assert "stage_ready pipeline=p stage=a" in log
    assert notes().index("loaded a") < notes().index(f"run a {job.id}")

    events = [e async for e in store.events(job.id) if e is not None]
    said = [e.data["value"]["text"] for e in events if e.type == "stage.delta"]
    assert "".join(said) == "hello"
    steps = [e.data["step"] for e in events if e.type == "stage.progress" and e.stage == "a"]
    assert steps == sorted(steps) and steps[-1] == 3
    wait_until(lambda: unacked() == 0)
    assert await store.redis.keys("omniq:blob:*") == [], "blobs are freed with the job"
    for worker in stages.workers.values():
        assert await asyncio.to_thread(worker.stop) == 0
    assert list(stages.shm.iterdir()) == [], "and workers leave no shared memory"


async def test_a_deadline_ends_a_run_and_a_wait(stages: Any, store: JobStore, notes: Notes) -> None:
    """The engine is told of it and stopped; a job still in the queue is not begun."""
    stages.define("a>b", window=1)
    stages.start("a", "b")
    job = await start_job(store, "a:sleep=60", timeout=1.5)
    await noted(notes, f"run a {job.id}")
    waiting = await start_job(store, "x", timeout=1.0)
    for each in (job, waiting):
        record = await ended(store, each)
        assert record.state is JobState.EXPIRED
        assert record.error is not None and record.error["code"] == "deadline_exceeded"
    assert "while stage 'a' ran" in (await store.get(job.id)).error["message"]
    assert notes("stopped a") == [f"stopped a {job.id}"]
    left = float(notes("deadline a")[0].split()[-1])
    assert 0 < left <= 1.5
    assert not notes(f"run a {waiting.id}")
    assert (await ended(store, await start_job(store, "x"))).state is JobState.SUCCEEDED


async def test_a_workers_blobs_outlive_it(stages: Any, store: JobStore, notes: Notes) -> None:
    stages.define("a>b", window=1)
    stages.start("a", "b")
    busy = await start_job(store, "b:sleep=3")
    await noted(notes, f"run b {busy.id}")
    job = await start_job(store, "a:tensors")
    await noted(notes, f"done a {job.id}")
    while (await store.get(job.id)).stages["a"].state is not StageState.SUCCEEDED:
        await asyncio.sleep(0.02)
    assert await store.redis.keys("omniq:blob:*") == [], "on one host they travel in memory"
    assert await asyncio.to_thread(stages.workers["a"].stop) == 0
    assert not notes(f"run b {job.id}"), "it has not read them yet"
    assert (await ended(store, job)).state is JobState.SUCCEEDED
    assert notes("tensors b") == ["tensors b a [[0, 1, 2], [3, 4, 5]]"]


@pytest.mark.parametrize("workers", ["ab", "a"], ids=["shared memory", "redis"])
async def test_the_blobs_of_a_refused_outcome_are_freed(
    stages: Any, store: JobStore, notes: Notes, workers: str
) -> None:
    """Another worker got the stage meanwhile: its run counts, and this one leaves nothing.

    Without a worker of the next stage the blob goes to Redis.
    """
    stages.define("a>b")
    stages.start(*workers)
    job = await start_job(store, "a:until=taken-over a:tensors")
    await noted(notes, f"run a {job.id}")
    newer = await store.begin_stage(job.id, "a", "another", redelivered=True)
    assert newer.verdict is Verdict.RUN
    with Path(os.environ["POOL_NOTES"]).open("a") as file:
        file.write("0 0 taken-over\n")
    await asyncio.to_thread(stages.workers["a"].wait_for, "the outcome is no longer wanted")
    wait_until(lambda: blobs_in(stages.shm) == [])

    async def written() -> dict[str, int]:
        found = await WorkerRegistry(store.redis).all()
        return next(w.blobs.puts for w in found if w.stage == "a")

    expected = {"shm": 1, "redis": 0} if workers == "ab" else {"shm": 0, "redis": 1}
    while await written() != expected:  # with the next heartbeat
        await asyncio.sleep(0.05)
    assert await store.redis.keys("omniq:blob:*") == []
    assert (await store.get(job.id)).stages["a"].state is StageState.RUNNING


async def test_a_join_runs_once_and_holds_no_worker(
    stages: Any, store: JobStore, notes: Notes
) -> None:
    stages.define("a>b", "a>c", "b>d", "c>d", window=1)
    stages.start("a", "b", "c", "d")
    slow = await start_job(store, "b:sleep=3")
    await noted(notes, f"done c {slow.id}")
    quick = await start_job(store, "x", priority=9)
    # Stage b is busy with the slow job; what the quick one waits for is b, not d.
    records = [await ended(store, j) for j in (slow, quick)]
    assert [r.state for r in records] == [JobState.SUCCEEDED] * 2
    assert sorted(notes("run d")) == sorted(f"run d {j.id}" for j in (slow, quick))
    assert records[0].stages["d"].metrics == {"inputs": 2}


async def test_failures_are_retried_or_not(stages: Any, store: JobStore, notes: Notes) -> None:
    stages.define("a>b", limit="1.0")
    stages.start("a", "b")
    passing, stubborn, invalid, broken, late = [
        await start_job(store, prompt)
        for prompt in ("b:retry=2", "b:retry=9", "a:invalid", "a:error", "a:sleep=20")
    ]
    record = await ended(store, passing)
    assert record.state is JobState.SUCCEEDED
    assert (record.stages["a"].attempts, record.stages["b"].attempts) == (1, 3)

    for job, attempts, stage, code in (
        (stubborn, 3, "b", "engine_out_of_memory"),
        (invalid, 1, "a", "invalid_request"),
        (broken, 1, "a", "engine_error"),
        (late, 1, "a", "stage_timeout"),
    ):
        record = await ended(store, job)
        assert record.state is JobState.FAILED
        assert record.error is not None and record.error["code"] == code
        assert record.stages[stage].attempts == attempts
        assert record.stages[stage].state is StageState.FAILED
    assert notes(f"stopped a {late.id}"), "the engine was told to stop"


async def test_cancelling_stops_a_running_stage(
    stages: Any, store: JobStore, notes: Notes, unacked: Any, queued: Any
) -> None:
    stages.define("a>b", window=1)
    stages.start("a")
    running = await start_job(store, "a:sleep=30")
    await noted(notes, f"run a {running.id}")
    waiting = await start_job(store)
    assert (await store.cancel(waiting.id)).state is JobState.CANCELLED
    began = time.monotonic()
    await store.cancel(running.id)
    assert (await ended(store, running, 5)).state is JobState.CANCELLED
    assert time.monotonic() - began < 1
    await noted(notes, f"stopped a {running.id}")
    after = await start_job(store, "x")
    await noted(notes, f"done a {after.id}")
    assert notes(f"run a {waiting.id}") == []
    wait_until(lambda: unacked() == 0)
    assert queued("omniq.p.b") == 1, "only the job that goes on"


async def test_a_killed_workers_stage_runs_again(
    stages: Any, store: JobStore, notes: Notes
) -> None:
    """The process is killed, then a request kills every process that takes it."""
    stages.define("a>b")
    stages.start("a", "b")
    job = await start_job(store, "b:sleep=1.5")
    await noted(notes, f"run b {job.id}")
    stages.workers["b"].kill()
    stages.start("b")
    record = await ended(store, job)
    assert record.state is JobState.SUCCEEDED
    assert (record.stages["a"].attempts, record.stages["b"].attempts) == (1, 2)
    assert len(notes(f"run a {job.id}")) == 1, "the stage before is not repeated"


@pytest.mark.slow
async def test_poison_fails_after_its_deliveries(
    stages: Any, store: JobStore, notes: Notes
) -> None:
    """And takes none along that ran beside it: from the second delivery on each is alone."""
    stages.define("a>b")
    beside = [await start_job(store, "a:sleep=1") for _ in range(2)]
    job = await start_job(store, "a:die=99")
    beside.append(await start_job(store, "a:sleep=1"))
    for _ in range(3):
        stages.start("a", ready=False)
        await asyncio.to_thread(stages.workers["a"].popen.wait, 30)
    stages.start("a", "b")
    record = await ended(store, job)
    assert record.error is not None and record.error["code"] == "delivery_limit"
    assert len(notes(f"run a {job.id}")) == 3
    for j in beside:
        assert (await ended(store, j)).state is JobState.SUCCEEDED
        assert len(notes(f"run a {j.id}")) in {1, 2}, "beside it at most once, and alone"


async def test_a_suspect_that_runs_alone_costs_no_other_its_deadline(
    stages: Any, store: JobStore, notes: Notes, tmp_path: Path
) -> None:
    stages.define("a>b")
    suspect = await start_job(store, "a:until=released")
    for count in (1, 2):
        stages.start("a")
        await noted(notes, f"run a {suspect.id}", count)
        if count == 1:
            stages.workers["a"].kill()
    late = await start_job(store, timeout=1)
    assert (await ended(store, late)).state is JobState.EXPIRED
    assert notes(f"run a {late.id}") == []
    with (tmp_path / "notes").open("a") as file:
        file.write("0 0 released\n")
    stages.start("b")
    assert (await ended(store, suspect)).state is JobState.SUCCEEDED


@pytest.mark.slow
async def test_a_time_limit_ends_a_suspect_that_waits_to_be_alone(
    stages: Any, store: JobStore, notes: Notes, redis_client: redis.Redis
) -> None:
    """Celery drops its message then: with no end on record nobody would hear of the job again."""
    stages.define("a>b")
    suspect = await start_job(store, "a:until=released")
    (name,) = [k for k in queue_keys("omniq.p.a") if redis_client.llen(k)]
    message = json.loads(redis_client.lpop(name))  # type: ignore[arg-type]
    message["headers"]["timelimit"] = [None, 12]
    redis_client.lpush(name, json.dumps(message))
    stages.start("a")
    await noted(notes, f"run a {suspect.id}")
    second = stages.spawn("second", [sys.executable, str(HERE / "run_stage.py"), "a"])
    second.wait_for("stage_ready")
    stages.workers["a"].kill()
    other = await start_job(store, "a:until=released")
    await noted(notes, f"run a {other.id}")
    record = await ended(store, suspect)
    assert record.state is JobState.FAILED and record.error is not None
    assert record.error["code"] == "stage_timeout"
    assert (await store.get(other.id)).state is JobState.RUNNING
    assert record.stages["a"].attempts == 2 and len(notes(f"run a {suspect.id}")) == 1


@pytest.mark.parametrize("how", ["dead", pytest.param("assert", marks=[pytest.mark.gpu, on_gpu])])
async def test_a_dead_engine_ends_its_worker_and_no_job(
    stages: Any, store: JobStore, notes: Notes, how: str
) -> None:
    """``assert``: because a kernel failed on a real device."""
    device = "0" if how == "assert" else "cpu"
    says = {"dead": "the device fell off the bus", "assert": "device-side assert"}[how]
    stages.define("a>b")
    stages.start("a", "b", STAGE_DEVICE=device)
    bystander = await start_job(store, "a:sleep=4")
    await noted(notes, f"run a {bystander.id}")
    job = await start_job(store, f"a:{how}=1")
    assert await asyncio.to_thread(stages.workers["a"].popen.wait, 30) == 1
    assert says in stages.workers["a"].output()
    stages.start("a", STAGE_DEVICE=device)
    for j, attempts in ((job, 2), (bystander, 1)):
        record = await ended(store, j)
        assert (record.state, record.stages["a"].attempts) == (JobState.SUCCEEDED, attempts)


async def test_a_stuck_engine_ends_its_worker(stages: Any, store: JobStore, notes: Notes) -> None:
    """It did not stop a request that took too long; the next worker gets it again."""
    stages.define("a>b", limit="1.0, stop_limit: 1.0")
    stages.start("a", "b")
    job = await start_job(store, "a:stuck=1")
    assert await asyncio.to_thread(stages.workers["a"].popen.wait, 20) == 1
    assert "did not stop a request within 1 s" in stages.workers["a"].output()
    stages.start("a")
    record = await ended(store, job)
    assert (record.state, record.stages["a"].attempts) == (JobState.SUCCEEDED, 2)


async def test_a_stopping_worker_gives_its_stages_back(
    stages: Any, store: JobStore, notes: Notes, unacked: Any, queued: Any
) -> None:
    """Nothing is lost, nothing counts as an attempt, and the registry forgets the worker."""
    stages.define("a>b")
    stages.start("a", OMNIQ_DRAIN_SECONDS=1)
    short, long = await start_job(store, "a:sleep=0.8"), await start_job(store, "a:sleep=4")
    await noted(notes, "run a", 2)
    began = time.monotonic()
    assert await asyncio.to_thread(stages.workers["a"].stop) == 0
    assert time.monotonic() - began < 4
    assert (unacked(), queued("omniq.p.a"), queued("omniq.p.b")) == (0, 1, 1)
    assert (await store.get(long.id)).stages["a"].state is StageState.QUEUED
    assert await WorkerRegistry(store.redis).all("p") == []
    stages.start("a", "b")
    for job in (short, long):
        record = await ended(store, job)
        assert (record.state, record.stages["a"].attempts) == (JobState.SUCCEEDED, 1)


@pytest.mark.parametrize("how", ["broken", "crash"])
async def test_a_worker_that_cannot_load_says_why_and_exits(
    stages: Any, store: JobStore, how: str
) -> None:
    stages.define("a>b", a={how: "no weights here"})
    stages.start("a", ready=False)
    worker = stages.workers["a"]
    assert await asyncio.to_thread(worker.popen.wait, 30) == 1
    assert "stage a of p cannot start" in worker.output()
    assert "no weights here" in worker.output()
    assert ("Traceback" in worker.output()) == (how == "crash")
    (info,) = await WorkerRegistry(store.redis).all("p")
    assert info.state is WorkerState.FAILED
    assert info.reason is not None and "no weights here" in info.reason
    assert any("no weights here" in line for line in info.last_log)


async def test_a_worker_can_be_stopped_while_it_loads(stages: Any, store: JobStore) -> None:
    stages.define("a>b", a={"load": 60})
    stages.start("a", ready=False)
    await asyncio.to_thread(stages.workers["a"].wait_for, "loading")
    (info,) = await WorkerRegistry(store.redis).all("p")
    assert (info.state, info.devices, info.stage) == (WorkerState.LOADING, ["cpu"], "a")
    began = time.monotonic()
    assert await asyncio.to_thread(stages.workers["a"].stop) == 0
    assert time.monotonic() - began < 3


async def test_jobs_survive_a_broker_restart(
    own_valkey: Any, own_broker_stages: Any, notes: Notes
) -> None:
    stages = own_broker_stages
    stages.define("a>b")
    stages.start("a", "b")
    store = JobStore.from_settings()
    job = await start_job(store, "a:sleep=3")
    await store.close()  # it would notice the restart by an error
    await noted(notes, f"run a {job.id}")
    await asyncio.to_thread(own_valkey.stop)
    await asyncio.sleep(1)
    await asyncio.to_thread(own_valkey.start)
    store = JobStore.from_settings()
    record = await ended(store, job)
    assert (record.state, record.stages["a"].attempts) == (JobState.SUCCEEDED, 1)
    assert len(notes(f"run a {job.id}")) == 1
    await store.close()


async def test_higher_priority_jobs_go_first(stages: Any, store: JobStore, notes: Notes) -> None:
    stages.define("a", window=1)
    jobs = [await start_job(store, "x", priority=p) for p in (0, 5, 9, 5)]
    stages.start("a")
    for job in jobs:
        await ended(store, job)
    assert notes("run a") == [f"run a {jobs[i].id}" for i in (2, 1, 3, 0)]

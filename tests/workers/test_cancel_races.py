"""Cancellations that meet a run at its beginning, at its end, or before it may begin."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import redis
from proxy import Proxy
from support import wait_until

from omniq import keys
from omniq.jobs.model import JobRecord, JobState, StageState
from omniq.jobs.store import JobStore
from omniq.submit import submit

HERE = Path(__file__).parent
Notes = Callable[..., list[str]]


async def start_job(store: JobStore, prompt: str = "x", **more: Any) -> JobRecord:
    return await submit(store, pipeline="p", inputs={"prompt": prompt}, **more)


async def noted(notes: Notes, prefix: str, count: int = 1) -> None:
    await asyncio.to_thread(
        wait_until, lambda: len(notes(prefix)) >= count, 30, f"{count} x {prefix!r}"
    )


async def test_jobs_that_are_cancelled_at_any_moment_end(
    stages: Any, store: JobStore, unacked: Callable[[], int]
) -> None:
    """Many end by themselves just as they are cancelled."""
    stages.define("a>b", window=8)
    stages.start("a", "b")
    chance, few = random.Random(7), asyncio.Semaphore(6)

    async def one() -> str:
        async with few:
            pause = chance.choice([0, 0.01])
            prompt = f"a:sleep={pause} b:sleep={pause}" if pause else "x"
            job = await start_job(store, prompt)
            await asyncio.sleep(chance.uniform(0.0, 0.012 + 2.5 * pause))
            await store.cancel(job.id)
            return job.id

    found = await asyncio.gather(*(one() for _ in range(300)))
    ends = Counter([(await store.wait(job, 10)).state for job in found])
    assert set(ends) <= {JobState.CANCELLED, JobState.SUCCEEDED}, ends
    wait_until(lambda: unacked() == 0)


@pytest.mark.parametrize("how", ["revoked", "cancelled"])
async def test_a_run_is_stopped_whose_begin_is_answered_late(  # noqa: PLR0917
    how: str, stages: Any, store: JobStore, broker: Any, notes: Notes, pool_app: Any
) -> None:
    """The record says that it runs before its worker knows."""
    stages.define("a>b")
    job = await start_job(store, "a:sleep=60")
    await store.begin_stage("none", "a", "w", redelivered=False)  # the server knows the script
    proxy = Proxy(broker.port)
    digest = store.run_script.__self__._scripts["begin_stage"]._digest  # type: ignore[attr-defined]
    proxy.hold = digest.encode()
    url = f"redis://127.0.0.1:{proxy.port}/0"
    stages.start("a", ready=False, OMNIQ_BROKER_URL=url)
    assert await asyncio.to_thread(proxy.held.wait, 30)
    assert (await store.get(job.id)).stages["a"].state is StageState.RUNNING
    if how == "cancelled":
        assert (await store.cancel(job.id)).state is JobState.CANCELLING
    else:
        pool_app.app.control.revoke(f"{job.id}.a", terminate=True)
        wait_until(lambda: f"Terminating {job.id}.a" in stages.workers["a"].output(), 10)
    await asyncio.sleep(0.2)  # the broker's word travels by a connection that nothing holds up
    proxy.released.set()
    assert (await store.wait(job.id, 20)).state is JobState.CANCELLED
    assert not notes(f"done a {job.id}")
    proxy.close()


@pytest.mark.parametrize("how", ["cancelled", pytest.param("late", marks=pytest.mark.slow)])
async def test_a_suspect_that_is_not_wanted_any_more_holds_nobody_up(
    how: str, stages: Any, store: JobStore, notes: Notes
) -> None:
    """It is cancelled, or its deadline passes, while it waits to be by itself."""
    stages.define("a>b")
    stages.start("a")
    suspect = await start_job(store, "a:until=never", timeout=20 if how == "late" else None)
    await noted(notes, f"run a {suspect.id}")
    second = stages.spawn("second", [sys.executable, str(HERE / "run_stage.py"), "a"])
    second.wait_for("stage_ready")
    stages.workers["a"].kill()
    busy = await start_job(store, "a:until=never")
    await noted(notes, f"run a {busy.id}")
    begun = 0
    async with aclosing(store.events(suspect.id)) as events:
        async for event in events:
            begun += event is not None and event.type == "stage.started"
            if begun == 2:
                break
    while (await store.get(suspect.id)).stages["a"].state is not StageState.QUEUED:
        await asyncio.sleep(0.02)
    behind = await start_job(store)
    if how == "cancelled":
        assert (await store.cancel(suspect.id)).state is JobState.CANCELLED
    await noted(notes, f"run a {behind.id}")
    assert (await store.get(busy.id)).state is JobState.RUNNING, "and did not have to end for that"
    ends = {"cancelled": JobState.CANCELLED, "late": JobState.EXPIRED}
    assert (await store.get(suspect.id)).state is ends[how]
    assert len(notes(f"run a {suspect.id}")) == 1


async def test_a_cancelled_run_is_given_up_whose_message_and_worker_are_lost(
    stages: Any, store: JobStore, redis_client: redis.Redis
) -> None:
    """Also that of a stage whose input will never be complete: the one before was cancelled."""
    from test_reconcile import look

    stages.define("a>b")
    job = await start_job(store)
    first = await store.begin_stage(job.id, "a", "w", redelivered=False)
    # As by chunks: the reader runs beside what feeds it.
    redis_client.hset(keys.job(job.id), mapping={"b|state": "running", "b|fence": "1"})
    await store.cancel(job.id)
    assert await store.stop_stage(job.id, "a", first.fence)
    redis_client.delete(*redis_client.scan_iter("omniq.p.*"))
    assert (await store.get(job.id)).state is JobState.CANCELLING
    for _ in range(5):  # this host's idea of the server's time may be ahead by a moment
        if (await look(store)).sent:
            break
    assert (await store.get(job.id)).state is JobState.CANCELLED

"""`omniq worker --restart`: a worker that ends comes back, and readiness says why it is away."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from omniq_process import alive, descendants, omniq_processes
from stand_in import stand_in
from support import wait_until

from omniq.config import get_pipeline
from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore
from omniq.jobs.workers import WorkerInfo, WorkerRegistry, WorkerState
from omniq.runtime.ready import readiness
from omniq.submit import submit

WORKER = ("worker", "--pipeline", "stand-in", "--devices", "cpu", "--restart", "--stage")


async def workers(store: JobStore, state: WorkerState) -> list[WorkerInfo]:
    found = await WorkerRegistry(store.redis).all("stand-in")
    return [w for w in found if w.state is state]


async def one(store: JobStore, state: WorkerState) -> WorkerInfo:
    while not (found := await workers(store, state)):
        await asyncio.sleep(0.02)
    return found[0]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_worker_comes_back_and_its_job_ends(
    broker: Any, tmp_path: Path, end: signal.Signals
) -> None:
    """Also: it ends with the restarter, however that ends."""
    with stand_in(tmp_path) as env, omniq_processes(tmp_path) as start:
        store = JobStore.from_settings()
        first = start(*WORKER, "first", **env, OMNIQ_VISIBILITY_TIMEOUT="2")
        start(*WORKER, "second", **env)
        job = await submit(store, pipeline="stand-in", inputs={"prompt": "die"})
        for _ in range(2):  # each time it takes the job, it dies
            down = await one(store, WorkerState.FAILED)
            assert down.reason is not None and "ended with status 9" in down.reason
            assert "started again in" in down.reason and down.pid == first.process.pid
            stage, _ = await readiness(WorkerRegistry(store.redis), get_pipeline("stand-in"))
            assert not stage.ready
            while down.id in [w.id for w in await workers(store, WorkerState.FAILED)]:
                await asyncio.sleep(0.02)
        await store.cancel(job.id)
        good = await submit(store, pipeline="stand-in", inputs={"prompt": "a word"})
        assert (await store.wait(good.id, 60)).state is JobState.SUCCEEDED
        children = descendants(first.process.pid)
        assert children
        first.process.send_signal(end)
        code = await asyncio.to_thread(first.process.wait, 20)
        assert code == (0 if end is signal.SIGTERM else -signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: not alive(children), 20)
        await store.close()


async def test_what_is_configured_wrongly_is_not_tried_again(broker: Any, tmp_path: Path) -> None:
    with stand_in(tmp_path) as env, omniq_processes(tmp_path) as start:
        args = [a if a != "cpu" else "99" for a in WORKER]
        worker = start(*args, "first", **env)
        assert await asyncio.to_thread(worker.process.wait, 30) == 2
        assert "started again" not in worker.output()

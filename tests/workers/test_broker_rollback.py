"""A broker that comes back without its newest writes: restored from a snapshot, or after a power
failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from support import Valkey, wait_until

from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore
from omniq.submit import submit


async def test_a_run_that_the_broker_has_forgotten_harms_no_newer_one(
    own_valkey: Valkey, own_broker_stages: Any, notes: Callable[..., list[str]], tmp_path: Path
) -> None:
    """It is begun a second time while it goes on; whichever ends last takes nothing from the other.

    The worker says in a line each what it has lost.
    """
    own_valkey.stop()
    own_valkey.options = ("--appendonly", "no")
    own_valkey.start()
    stages, client = own_broker_stages, redis.Redis(port=own_valkey.port)
    stages.define("a>b", window=8)
    store = JobStore.from_settings()
    job = await submit(store, pipeline="p", inputs={"prompt": "a:until=go a:tensors"})
    client.save()
    stages.start("a")  # the blob goes to Redis, where its name is its place
    wait_until(lambda: len(notes("run a")) == 1)
    own_valkey.stop(kill=True)
    own_valkey.start()
    await asyncio.to_thread(wait_until, lambda: len(notes("run a")) == 2)
    with (tmp_path / "notes").open("a") as file:
        file.write("0 0 go\n")
    worker = stages.workers["a"]
    await asyncio.to_thread(worker.wait_for, "no longer wanted")
    stages.start("b")
    record = await store.wait(job.id, 30)
    assert record.state is JobState.SUCCEEDED, record.error
    assert notes("tensors b") == ["tensors b a [[0, 1, 2], [3, 4, 5]]"]
    assert len(notes("run b")) == 1
    assert "Traceback" not in worker.output() and "DeprecationWarning" not in worker.output()
    assert worker.output().count("Connection to broker lost") == 1
    await store.close()

"""A broker without memory left: no worker ends, nothing is lost, and accepted work goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis
from support import wait_until

from omniq.errors import BrokerUnavailable
from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore
from omniq.submit import submit


async def test_workers_outlast_a_full_broker(
    own_valkey: Any, own_broker_stages: Any, notes: Any
) -> None:
    """Jobs are refused; those that were accepted end, also after a lease has gone by (3 s). One
    that has to be tried again, whose message cannot be written, goes on when there is room.
    """
    stages = own_broker_stages
    stages.define("a>b", window=2)
    stages.start("a", "b", OMNIQ_RECONCILE_INTERVAL=1)
    client = redis.Redis(port=own_valkey.port)
    store = JobStore.from_settings()
    jobs = [
        await submit(store, pipeline="p", inputs={"prompt": prompt})
        for prompt in ["a:sleep=1 b:sleep=1"] * 8 + ["a:sleep=1 b:retry=1"]
    ]
    await asyncio.to_thread(wait_until, lambda: len(notes("run a")) == 2)
    client.config_set("maxmemory", "100kb")
    with pytest.raises(BrokerUnavailable, match="memory"):
        await submit(store, pipeline="p", inputs={"prompt": "one more"})
    for job in jobs[:-1]:
        record = await store.wait(job.id, 40)
        assert record.state is JobState.SUCCEEDED, record
        assert [s.attempts for s in record.stages.values()] == [1, 1]
    await asyncio.to_thread(wait_until, lambda: notes(f"run b {jobs[-1].id}"))
    logs = "\n".join(worker.output()[-5000:] for worker in stages.workers.values())
    assert all(worker.popen.poll() is None for worker in stages.workers.values()), logs
    client.config_set("maxmemory", "0")
    jobs.append(await submit(store, pipeline="p", inputs={"prompt": "one more"}))
    for job in jobs[-2:]:
        record = await store.wait(job.id, 40)
        assert record.state is JobState.SUCCEEDED, (record, logs)
    wait_until(lambda: client.hlen("omniq:unacked") == 0)
    assert all(worker.popen.poll() is None for worker in stages.workers.values())
    assert "Traceback" not in stages.workers["a"].output()
    await store.close()

"""Real workers killed while they write blobs to Redis: nothing stays once the jobs are over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from support import Valkey, wait_until

from omniq import keys
from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore
from omniq.submit import submit

KILLS, MOST_KILLS = 8, 40
#: Three chunks.
NBYTES = 9 << 20
#: Of these tests' workers, in seconds; what the dead have left is gone after some of them.
LEASE = 3.0


@pytest.fixture(params=["broker", "own server"])
def blobs(
    request: pytest.FixtureRequest,
    redis_client: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[redis.Redis]:
    """The server for blobs: the broker, or one of its own."""
    monkeypatch.setenv("OMNIQ_BLOB_STORE", "redis")
    monkeypatch.setenv("OMNIQ_RECONCILE_INTERVAL", "2")
    if request.param == "broker":
        yield redis_client
        return
    folder = tmp_path / "blobs"
    folder.mkdir()
    server = Valkey(folder, "--appendonly", "no")
    server.start()
    monkeypatch.setenv("OMNIQ_BLOB_REDIS_URL", server.url)
    yield redis.Redis(port=server.port)
    server.stop()


@pytest.mark.slow
async def test_workers_killed_while_they_write_leave_no_blob(
    blobs: redis.Redis, stages: Any, store: JobStore
) -> None:
    """Half of the jobs are cancelled, so that some end before their writer's lease does."""
    stages.define("a>b", window=8)
    stages.start("a", "b")
    rng = random.Random(5)
    jobs: list[str] = []
    orphans = 0

    def there() -> list[bytes]:
        found = ("omniq:blob:*", "omniq:part:*", "omniq:blobs*")
        return [key for pattern in found for key in blobs.scan_iter(pattern)]

    kills = 0
    while kills < KILLS or not orphans:  # when one falls into a write is the scheduler's choice
        kills += 1
        assert kills <= MOST_KILLS, "no kill came between writing and recording"
        prompt = {"prompt": f"a:bytes={NBYTES}"}
        some = [(await submit(store, pipeline="p", inputs=prompt)).id for _ in range(6)]
        await asyncio.to_thread(wait_until, lambda: there() != [], 20)
        await asyncio.sleep(rng.uniform(0, 0.2))
        stages.workers["a"].kill()
        for job in some[::2]:
            await store.cancel(job)
        jobs += some
        recorded = {name for job in jobs for name in await recorded_of(store, job)}
        hashes = list(blobs.scan_iter("omniq:blobs*"))
        noted = {k.decode() for h in hashes for k in blobs.hkeys(h)}  # type: ignore[union-attr]
        orphans += len(noted - recorded)
        await asyncio.to_thread(stages.start, "a")
    for job in jobs:
        record = await store.wait(job, 60)
        limit = (record.error or {}).get("code") == "delivery_limit"
        assert record.state in (JobState.SUCCEEDED, JobState.CANCELLED) or limit, record
    print(f"{kills} workers killed; {orphans} blobs, whole or half, that nobody had recorded")
    await asyncio.to_thread(wait_until, lambda: there() == [], 5 * LEASE, "no blob is left")


async def recorded_of(store: JobStore, job: str) -> list[str]:
    """Ids of the blobs that a job's record names."""
    refs = await store.redis.smembers(keys.job_blobs(job))
    return [orjson.loads(ref)["id"] for ref in refs]

"""The end of a job frees all chunks of its blobs, on the broker and on a server for blobs only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from blob_tools import assert_same, make
from support import Valkey

from omniq import keys
from omniq.blobs import BlobRef, BlobRouter
from omniq.blobs.base import REDIS_HOST
from omniq.cli.config import settings_table
from omniq.errors import BlobNotFound, BrokerUnavailable
from omniq.jobs.model import JobSpec, StageResult, new_job_id
from omniq.jobs.store import JobStore
from omniq.settings import get_settings

#: Three chunks.
NBYTES = 9 << 20


@pytest.fixture
def blob_server(
    configured: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Valkey]:
    """A server for blobs only, which settings name."""
    server = Valkey(tmp_path, "--appendonly", "no")
    server.start()
    monkeypatch.setenv("OMNIQ_BLOB_REDIS_URL", server.url)
    get_settings.cache_clear()
    yield server
    server.stop()


@pytest.fixture
async def jobs(configured: redis.Redis) -> AsyncIterator[JobStore]:
    store = JobStore.from_settings()
    yield store
    await store.close()


@pytest.fixture
def router(configured: redis.Redis) -> Iterator[BlobRouter]:
    router = BlobRouter.from_settings()
    yield router
    router.spill(lambda _: False)
    router.close()


def left(client: redis.Redis) -> list[bytes]:
    """All keys but that of who has swept last, which expires."""
    return [k for k in client.scan_iter() if not k.decode().startswith(keys.blob_sweeper())]


async def start(jobs: JobStore, router: BlobRouter, *, local: bool) -> tuple[str, BlobRef]:
    """A job whose first stage is done, with a blob."""
    now = time.time()
    spec = JobSpec(
        id=new_job_id(now), pipeline="p", inputs={}, parameters={}, stages=["a", "b"], created=now
    )
    await jobs.create(spec, {"a": [], "b": ["a"]})
    grant = await jobs.begin_stage(spec.id, "a", "w", redelivered=False)
    ref = router.put(f"{spec.id}.a.{grant.fence}.out", make(NBYTES), consumers_local=local)
    result = StageResult(outputs={"out": {"blob": ref.model_dump()}}, blobs=[ref])
    assert await jobs.finish_stage(spec.id, "a", grant.fence, result)
    return spec.id, ref


async def test_on_the_broker_all_chunks_go_at_once(
    jobs: JobStore, router: BlobRouter, configured: redis.Redis, namespace: str
) -> None:
    job_id, ref = await start(jobs, router, local=False)
    assert ref.host is None
    assert len(configured.keys(f"{namespace}:blob:*")) == 3  # type: ignore[arg-type]
    await jobs.cancel(job_id)
    assert configured.keys(f"{namespace}:blob:*") == []


async def test_on_a_server_of_their_own_any_worker_frees_them(
    jobs: JobStore, blob_server: Valkey, configured: redis.Redis, namespace: str
) -> None:
    router, other = BlobRouter.from_settings(), BlobRouter.from_settings()
    blobs = redis.Redis(port=blob_server.port)
    job_id, ref = await start(jobs, router, local=False)
    _, kept = await start(jobs, router, local=False)
    assert ref.host == REDIS_HOST
    assert configured.keys(f"{namespace}:blob:*") == []
    assert len(left(blobs)) == 7, "six chunks, and the notes of them"
    assert_same(other.get(ref), make(NBYTES))
    await jobs.cancel(job_id)
    assert await asyncio.to_thread(other.collect) == 1
    assert not configured.exists(keys.host_garbage(REDIS_HOST))
    with pytest.raises(BlobNotFound):
        router.get(ref)
    assert_same(router.get(kept), make(NBYTES))
    assert await asyncio.to_thread(other.collect) == 0
    for each in (router, other):
        each.close()


async def test_what_a_stopping_worker_moved_there_ends_with_its_job(
    jobs: JobStore, blob_server: Valkey, configured: redis.Redis
) -> None:
    router, other = BlobRouter.from_settings(), BlobRouter.from_settings()
    blobs = redis.Redis(port=blob_server.port)
    job_id, ref = await start(jobs, router, local=True)
    ended_id, _ = await start(jobs, router, local=True)
    await jobs.cancel(ended_id)
    assert ref.store == "shm"
    assert await asyncio.to_thread(router.spill) == 1
    router.close()
    assert_same(other.get(ref), make(NBYTES))
    assert len(left(blobs)) == 4, "three chunks, and the note of them"
    await jobs.cancel(job_id)
    await asyncio.to_thread(other.collect)
    assert left(blobs) == []
    other.close()


async def test_a_job_that_ends_while_its_blob_is_moved_leaves_nothing(
    jobs: JobStore, blob_server: Valkey, configured: redis.Redis
) -> None:
    router = BlobRouter.from_settings()
    job_id, _ = await start(jobs, router, local=True)
    await jobs.cancel(job_id)
    assert await asyncio.to_thread(router.spill, lambda _: True) == 0
    assert left(redis.Redis(port=blob_server.port)) == []
    assert not configured.exists(keys.job_blobs(job_id))
    router.close()


async def test_a_missing_server_for_blobs_is_named_and_nothing_is_lost(
    jobs: JobStore, blob_server: Valkey, configured: redis.Redis
) -> None:
    router = BlobRouter.from_settings()
    job_id, ref = await start(jobs, router, local=False)
    blob_server.stop()
    with pytest.raises(BrokerUnavailable) as caught:
        router.get(ref)
    assert "OMNIQ_BLOB_REDIS_URL" in str(caught.value.hint)
    await jobs.cancel(job_id)
    with pytest.raises(BrokerUnavailable):
        await asyncio.to_thread(router.collect)
    blob_server.start()
    assert await asyncio.to_thread(router.collect) == 0  # it kept nothing on disk
    assert not configured.exists(keys.host_garbage(REDIS_HOST))
    router.close()


def test_its_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIQ_BLOB_REDIS_URL", "redis://me:secret@127.0.0.1:1/0")
    get_settings.cache_clear()
    shown = {row["name"]: row["value"] for row in settings_table()}
    get_settings.cache_clear()
    assert shown["OMNIQ_BLOB_REDIS_URL"] == "redis://me:***@127.0.0.1:1/0"

"""Which store is taken, what a stopping worker leaves, and how garbage goes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from blob_tools import Writer, assert_same, make, small_tmpfs

from omniq import keys
from omniq.blobs import BlobRef, BlobRouter, RedisStore, SlabStore, host_identity
from omniq.blobs.slabs.sweep import blob_ids
from omniq.errors import (
    BlobNotFound,
    BlobTooLarge,
    BrokerUnavailable,
    ConfigError,
    StoreFull,
)
from omniq.jobs.model import JobSpec, StageResult, new_job_id
from omniq.settings import get_settings

if TYPE_CHECKING:
    from support import Valkey

    from omniq.jobs.store import JobStore

SHM = Path("/dev/shm")
ID = "job.a.1.out"

Routers = Callable[..., BlobRouter]


def wanted(_: str) -> bool:
    return True


def unwanted(_: str) -> bool:
    return False


@pytest.fixture
def routers(configured: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Routers]:
    """Makes routers by settings: ``routers(blob_store="shm")``."""
    made: list[BlobRouter] = []

    def make_router(**settings: Any) -> BlobRouter:
        for name, value in settings.items():
            monkeypatch.setenv(f"OMNIQ_{name.upper()}", str(value))
        get_settings.cache_clear()
        made.append(BlobRouter.from_settings())
        return made[-1]

    yield make_router
    for router in made:
        router.spill(unwanted)
        router.close()


def elsewhere() -> BlobRouter:
    """A router on another host with the same Redis."""
    return BlobRouter("0" * 16, None, RedisStore.from_settings())


# -- the choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "local", "store"),
    [
        ("auto", True, "shm"),
        ("auto", False, "redis"),
        ("shm", True, "shm"),
        ("shm", False, "shm"),
        ("redis", True, "redis"),
        ("redis", False, "redis"),
    ],
)
def test_the_store_follows_setting_and_consumers(
    routers: Routers, mode: str, local: bool, store: str
) -> None:
    router = routers(blob_store=mode)
    ref = router.put(ID, make(), consumers_local=local)
    assert ref.store == store
    assert_same(router.get(ref), make())
    assert router.stats()["counts"] == {f"put_{store}": 1, f"get_{store}": 1}
    assert router.delete(ref)
    assert not router.delete(ref)
    with pytest.raises(BlobNotFound):
        router.get(ref)


def test_full_shared_memory_falls_back_to_redis(
    routers: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    router = routers(shm_max_bytes=3 << 20)
    kept = router.put("job.a.1.x", make(2 << 20), consumers_local=True)
    ref = router.put("job.a.1.y", make(2 << 20, seed=1), consumers_local=True)
    assert (kept.store, ref.store) == ("shm", "redis")
    assert_same(router.get(ref), make(2 << 20, seed=1))
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "job.a.1.y goes to Redis: shared memory is full" in record.getMessage()


def test_a_blob_too_large_for_shared_memory_falls_back_to_redis(routers: Routers) -> None:
    router = routers(shm_max_bytes=1 << 20)
    assert router.put(ID, make(2 << 20), consumers_local=True).store == "redis"


def test_a_full_tmpfs_falls_back_to_redis(routers: Routers, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "shm") as folder:
        router = routers(shm_dir=folder)
        ref = router.put(ID, make(16 << 20), consumers_local=True)
        assert ref.store == "redis"
        assert_same(router.get(ref), make(16 << 20))
        router.close()
        assert list(folder.iterdir()) == []


def test_forced_shared_memory_does_not_fall_back(routers: Routers) -> None:
    router = routers(blob_store="shm", shm_max_bytes=3 << 20)
    with pytest.raises(BlobTooLarge):
        router.put(ID, make(4 << 20), consumers_local=True)
    router.put(ID, make(2 << 20), consumers_local=True)
    with pytest.raises(StoreFull):
        router.put("job.a.2.out", make(2 << 20), consumers_local=True)


def test_redis_serves_where_there_is_no_shared_memory(routers: Routers, tmp_path: Path) -> None:
    router = routers(shm_dir=tmp_path / "missing")
    ref = router.put(ID, make(), consumers_local=True)
    assert ref.store == "redis"
    assert_same(router.get(ref), make())
    assert (router.spill(wanted), router.sweep(wanted)) == (0, 0)
    assert router.stats()["shm"] is None


def test_forced_shared_memory_that_is_missing_is_a_config_error(
    routers: Routers, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="missing"):
        routers(blob_store="shm", shm_dir=tmp_path / "missing")


def test_all_processes_of_a_host_read_its_shared_memory(router: BlobRouter) -> None:
    ref = router.put(ID, make(), consumers_local=True)
    reader = BlobRouter.from_settings()
    assert_same(reader.get(ref), make())
    assert reader.delete(ref)
    reader.close()


def test_shared_memory_of_another_host_is_out_of_reach(router: BlobRouter) -> None:
    """Its blob is named with its host, and is not deleted from here."""
    ref = router.put(ID, make(), consumers_local=True)
    other = elsewhere()
    with pytest.raises(BlobNotFound, match=f"shared memory of host {router.host}"):
        other.get(ref)
    assert not other.delete(ref)
    assert_same(router.get(ref), make())
    other.close()


# -- a worker that stops ---------------------------------------------------------------------------


def test_spilled_blobs_are_read_everywhere_by_their_old_references(
    router: BlobRouter, namespace: str
) -> None:
    keep = router.put("running.a.1.x", make(seed=1), consumers_local=True)
    drop = router.put("ended.a.1.x", make(seed=2), consumers_local=True)
    view = router.get(keep)
    assert router.spill(lambda job_id: job_id == "running") == 1
    router.close()
    assert not list(SHM.glob(f"{namespace}.*"))
    assert_same(view, make(seed=1))
    for reader in (BlobRouter.from_settings(), elsewhere()):
        assert_same(reader.get(keep), make(seed=1))
        with pytest.raises(BlobNotFound):
            reader.get(drop)
        reader.close()
    last = elsewhere()
    assert last.delete(keep)
    assert not last.delete(keep)
    last.close()


def test_only_own_blobs_are_spilled(router: BlobRouter) -> None:
    other = BlobRouter.from_settings()
    ref = other.put(ID, make(), consumers_local=True)
    assert router.spill(unwanted) == 0
    assert_same(router.get(ref), make())
    assert other.spill(unwanted) == 0
    other.close()


def test_a_job_that_ends_while_it_is_spilled_leaves_nothing(
    router: BlobRouter, configured: redis.Redis
) -> None:
    """Its end frees what is in Redis by then; the copy that comes after is taken back."""
    router.put(ID, make(), consumers_local=True)
    answers = iter([True, False])
    assert router.spill(lambda _: next(answers)) == 0
    assert configured.keys() == []


def test_what_redis_does_not_take_stays_readable_here(
    routers: Routers, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And is swept by others when its job has ended."""
    router = routers(redis_blob_max_bytes=10_000)
    large = router.put("job.a.1.large", make(20_000), consumers_local=True)
    small = router.put("job.a.1.small", make(), consumers_local=True)
    assert router.spill(wanted) == 1
    router.close()
    assert "job.a.1.large stays in shared memory" in caplog.text
    reader = routers()
    assert reader.sweep(wanted) == 0
    assert_same(reader.get(large), make(20_000))
    assert_same(reader.get(small), make())
    assert reader.sweep(unwanted) == 1
    assert not list(SHM.glob(f"{namespace}.*"))


def test_without_a_broker_nothing_is_thrown_away(
    own_valkey: Valkey, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIQ_NAMESPACE", namespace)
    get_settings.cache_clear()
    router = BlobRouter.from_settings()
    ref = router.put(ID, make(), consumers_local=True)
    own_valkey.stop()
    for call in (router.spill, router.collect, lambda: router.spill(wanted)):
        with pytest.raises(BrokerUnavailable):
            call()
    assert_same(router.get(ref), make())
    assert router.delete(ref)
    router.close()


# -- jobs that end ---------------------------------------------------------------------------------


@pytest.fixture
async def jobs(configured: redis.Redis) -> Any:
    from omniq.jobs.store import JobStore  # brings Celery, which GPU machines need not have

    store = JobStore.from_settings()
    yield store
    await store.close()


async def start(jobs: JobStore, router: BlobRouter) -> tuple[str, BlobRef]:
    """A job whose first stage is done, with a blob in shared memory."""
    now = time.time()
    spec = JobSpec(
        id=new_job_id(now), pipeline="p", inputs={}, parameters={}, stages=["a", "b"], created=now
    )
    await jobs.create(spec, {"a": [], "b": ["a"]})
    grant = await jobs.begin_stage(spec.id, "a", "w", redelivered=False)
    ref = router.put(f"{spec.id}.a.{grant.fence}.out", make(), consumers_local=True)
    result = StageResult(outputs={"out": {"blob": ref.model_dump()}}, blobs=[ref])
    assert await jobs.finish_stage(spec.id, "a", grant.fence, result)
    return spec.id, ref


async def test_any_worker_of_the_host_frees_what_ended_jobs_held(
    jobs: JobStore, router: BlobRouter, configured: redis.Redis
) -> None:
    job_id, ended = await start(jobs, router)
    _, running = await start(jobs, router)
    other = BlobRouter.from_settings()
    assert await asyncio.to_thread(other.collect) == 0
    await jobs.cancel(job_id)
    assert await asyncio.to_thread(other.collect) == 1
    assert not configured.exists(keys.host_garbage(router.host))
    with pytest.raises(BlobNotFound):
        router.get(ended)
    assert_same(router.get(running), make())
    assert await asyncio.to_thread(other.collect) == 0
    other.close()


async def test_a_stopping_worker_moves_what_unfinished_jobs_hold(
    jobs: JobStore, router: BlobRouter, configured: redis.Redis, namespace: str
) -> None:
    """By default the job's record decides; its end then frees the moved blob too."""
    ended_id, ended = await start(jobs, router)
    await jobs.cancel(ended_id)
    running_id, running = await start(jobs, router)
    unknown = router.put("unknown.a.1.out", make(), consumers_local=True)
    assert await asyncio.to_thread(router.spill) == 1
    assert router.shm is not None and router.shm.own() == []
    assert_same(router.get(running), make())
    for ref in (ended, unknown):
        with pytest.raises(BlobNotFound):
            router.get(ref)
    await jobs.cancel(running_id)
    assert not configured.exists(keys.blob(running.id))


async def test_a_killed_workers_blobs_live_as_long_as_their_jobs(
    jobs: JobStore, router: BlobRouter, namespace: str
) -> None:
    """They go by the extent, which holds many blobs: when the last of its jobs has ended."""
    ended_id, _ = await start(jobs, router)
    running_id, _ = await start(jobs, router)
    await jobs.cancel(ended_id)
    assert await asyncio.to_thread(router.collect_garbage) == 1
    writer = await asyncio.to_thread(Writer, namespace, f"{ended_id}.b.1.x", f"{running_id}.b.1.x")
    assert await asyncio.to_thread(router.sweep) == 0
    writer.kill()
    assert await asyncio.to_thread(router.sweep) == 0
    assert_same(router.get(writer.refs[1]), make(seed=1))
    await jobs.cancel(running_id)
    assert await asyncio.to_thread(router.collect_garbage) == 1
    assert await asyncio.to_thread(router.sweep) == 2
    with pytest.raises(BlobNotFound):
        BlobRouter.from_settings().get(writer.refs[1])


async def test_a_blob_that_no_record_names_goes_with_its_job(
    jobs: JobStore, router: BlobRouter
) -> None:
    """The worker that wrote it could not say so, and lives on: no end of a job would free it."""
    job_id, _ = await start(jobs, router)
    lost = router.put(f"{job_id}.b.1.out", make(seed=1), consumers_local=True)
    assert await asyncio.to_thread(router.collect) == 0
    assert_same(router.get(lost), make(seed=1))
    await jobs.cancel(job_id)
    assert await asyncio.to_thread(router.collect) == 2
    assert router.shm is not None and router.shm.own() == []


def test_more_garbage_than_fits_one_page_is_collected(
    router: BlobRouter, configured: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """References that are none are dropped with a warning and stop nothing."""
    refs = [router.put(f"job.a.{n}.x", make(1), consumers_local=True) for n in range(600)]
    garbage = [ref.model_dump_json() for ref in refs]
    configured.sadd(keys.host_garbage(router.host), "no reference", *garbage)
    assert router.collect_garbage() == 600
    assert not configured.exists(keys.host_garbage(router.host))
    assert "no blob reference" in caplog.text
    assert router.stats()["counts"]["collected"] == 600


def test_a_router_needs_what_its_mode_names(redis_store: RedisStore) -> None:
    with pytest.raises(ConfigError):
        BlobRouter("h", None, redis_store, "shm")


def test_the_stores_are_chosen_by_settings(router: BlobRouter, namespace: str) -> None:
    assert isinstance(router.shm, SlabStore)
    assert router.host == host_identity()
    ref = router.put(ID, make(), consumers_local=True)
    extents = [p for p in SHM.glob(f"{namespace}.slab.*") if p.suffix != ".lock"]
    assert [(blob, str(ref.place).startswith(p.name.split(".slab.")[1])) for p in extents
            for blob in blob_ids(p)] == [(ID, True)]  # fmt: skip

"""Blobs in Redis that no record names are freed once nobody may read them, and no others."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis
from blob_tools import assert_same, make
from support import Valkey, wait_until

from omniq import keys
from omniq.blobs import BlobRef, BlobRouter
from omniq.blobs.redis import RedisStore
from omniq.blobs.redis_sweep import UNRECORDED
from omniq.errors import StoreFull
from omniq.jobs.model import JobSpec, StageResult, new_job_id
from omniq.jobs.store import JobStore
from omniq.settings import get_settings

#: Three chunks.
NBYTES = 9 << 20


@pytest.fixture(params=["broker", "own server"])
def blobs(
    request: pytest.FixtureRequest,
    configured: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[redis.Redis]:
    """The server for blobs: the broker, or one of its own."""
    if request.param == "broker":
        yield configured
        return
    server = Valkey(tmp_path, "--appendonly", "no")
    server.start()
    monkeypatch.setenv("OMNIQ_BLOB_REDIS_URL", server.url)
    get_settings.cache_clear()
    yield redis.Redis(port=server.port)
    server.stop()


def system() -> str:
    store = RedisStore.from_settings()
    try:
        return store.system
    finally:
        store.close()


@pytest.fixture
async def jobs(configured: redis.Redis) -> AsyncIterator[JobStore]:
    store = JobStore.from_settings()
    yield store
    await store.close()


@pytest.fixture
def router(blobs: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlobRouter]:
    monkeypatch.setenv("OMNIQ_BLOB_STORE", "redis")
    get_settings.cache_clear()
    router = BlobRouter.from_settings()
    yield router
    router.close()


@pytest.fixture
def left(blobs: redis.Redis, namespace: str) -> Callable[[], list[bytes]]:
    """Sweeps as a worker does with its heartbeat; what is there of blobs and notes afterwards."""
    other = BlobRouter.from_settings()

    def look() -> list[bytes]:
        blobs.delete(keys.blob_sweeper(system()))  # as if the last one had been a while ago
        other.collect()
        found = (f"{namespace}:{kind}" for kind in ("blob:*", "part:*", "blobs*"))
        return [key for pattern in found for key in blobs.scan_iter(pattern)]

    return look


async def begin(jobs: JobStore) -> tuple[str, int]:
    """A job whose first stage runs, and that run's fence."""
    now = time.time()
    spec = JobSpec(
        id=new_job_id(now), pipeline="p", inputs={}, parameters={}, stages=["a", "b"], created=now
    )
    await jobs.create(spec, {"a": [], "b": ["a"]})
    grant = await jobs.begin_stage(spec.id, "a", "w", redelivered=False)
    return spec.id, grant.fence


async def finish(jobs: JobStore, job: str, fence: int, ref: BlobRef) -> None:
    result = StageResult(outputs={"out": {"blob": ref.model_dump()}}, blobs=[ref])
    assert await jobs.finish_stage(job, "a", fence, result)


@pytest.mark.parametrize("nbytes", [1000, NBYTES])
async def test_what_was_written_and_not_recorded_goes_with_the_job(
    jobs: JobStore, router: BlobRouter, left: Callable[[], list[bytes]], nbytes: int
) -> None:
    job, fence = await begin(jobs)
    ref = router.put(f"{job}.a.{fence}.out", make(nbytes), consumers_local=True)
    left()
    assert_same(router.get(ref), make(nbytes))  # its run may still record it
    await jobs.cancel(job)
    await jobs.stop_stage(job, "a", fence)
    assert await asyncio.to_thread(left) == []


async def test_what_a_run_left_that_another_took_over_goes_while_the_job_goes_on(
    jobs: JobStore, router: BlobRouter, left: Callable[[], list[bytes]]
) -> None:
    job, fence = await begin(jobs)
    lost = router.put(f"{job}.a.{fence}.out", make(NBYTES), consumers_local=True)
    second = await jobs.begin_stage(job, "a", "w2", redelivered=True)
    kept = router.put(f"{job}.a.{second.fence}.out", make(NBYTES, 1), consumers_local=True)
    await asyncio.to_thread(left)
    assert not router.delete(lost)
    await finish(jobs, job, second.fence, kept)
    await asyncio.to_thread(left)
    assert_same(router.get(kept), make(NBYTES, 1))
    await jobs.cancel(job)
    assert await asyncio.to_thread(left) == []


async def test_what_a_zombie_writes_after_the_end_goes(
    jobs: JobStore, router: BlobRouter, left: Callable[[], list[bytes]]
) -> None:
    job, fence = await begin(jobs)
    await jobs.cancel(job)
    await jobs.stop_stage(job, "a", fence)
    assert await asyncio.to_thread(left) == []
    router.put(f"{job}.a.{fence}.out", make(NBYTES), consumers_local=True)
    assert await asyncio.to_thread(left) == []


@pytest.mark.parametrize("nbytes", [1000, NBYTES])
async def test_a_job_that_ends_well_leaves_no_note(
    jobs: JobStore, router: BlobRouter, blobs: redis.Redis, nbytes: int
) -> None:
    job, fence = await begin(jobs)
    ref = router.put(f"{job}.a.{fence}.out", make(nbytes), consumers_local=True)
    await finish(jobs, job, fence, ref)
    assert blobs.hgetall(keys.blob_notes(system())) == {ref.id.encode(): str(ref.nbytes).encode()}
    await jobs.cancel(job)
    router.collect_garbage()
    assert not blobs.exists(keys.blob_notes(system()))


WRITER = """
import sys
from omniq.blobs import BlobRouter
from omniq.blobs.redis import _Writing
from blob_tools import make
router, sent = BlobRouter.from_settings(), 0
send = _Writing._confirmed
def confirmed(self, commands):
    global sent
    send(self, commands)
    sent += 1
    if sent == 2:
        print("half", flush=True)
        sys.stdin.read()
_Writing._confirmed = confirmed
router.put(sys.argv[1], make(int(sys.argv[2])), consumers_local=True)
"""


async def test_what_was_half_written_when_its_writer_was_killed_goes(
    jobs: JobStore,
    router: BlobRouter,
    blobs: redis.Redis,
    left: Callable[[], list[bytes]],
    namespace: str,
) -> None:
    job, fence = await begin(jobs)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, f"{job}.a.{fence}.out", str(NBYTES)],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None and writer.stdout.readline() == b"half\n"
    writer.kill()
    writer.communicate()
    assert len(list(blobs.scan_iter(f"{namespace}:part:*"))) >= 2
    assert await asyncio.to_thread(left) != []
    await jobs.begin_stage(job, "a", "w2", redelivered=True)
    assert await asyncio.to_thread(left) == []


async def test_files_of_a_job_to_come_stay_for_a_while(
    jobs: JobStore,
    router: BlobRouter,
    left: Callable[[], list[bytes]],
) -> None:
    """They are written before the record; of an API process that then died they go later, by the
    server's clock.
    """
    now = await jobs.clock.now()
    new = await jobs.inputs.put(new_job_id(now), "image", b"x" * 100)
    old = await jobs.inputs.put(new_job_id(now - UNRECORDED - 2), "image", b"x" * 100)
    await asyncio.to_thread(left)
    assert router.redis.client.exists(keys.blob(new.id))
    assert not router.redis.client.exists(keys.blob(old.id))


async def test_files_of_a_dead_letter_stay(
    jobs: JobStore, router: BlobRouter, left: Callable[[], list[bytes]]
) -> None:
    """Who retries it needs them; once it is dropped, nobody does."""
    now = time.time()
    job = new_job_id(now)
    file = await jobs.inputs.put(job, "image", b"x" * 100)
    spec = JobSpec(
        id=job, pipeline="p", inputs={}, parameters={}, stages=["a"], created=now,
        files={"image": file},
    )  # fmt: skip
    await jobs.create(spec, {"a": []})
    grant = await jobs.begin_stage(job, "a", "w", redelivered=False)
    assert await jobs.fail_stage(job, "a", grant.fence, {"code": "x"}, traceback="here")
    await asyncio.to_thread(left)
    assert router.redis.client.exists(keys.blob(file.id))
    assert await jobs.run_script("drop_dead", job, [])
    assert await asyncio.to_thread(left) == []


async def test_one_sweeps_for_all(
    jobs: JobStore, router: BlobRouter, blobs: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one comes after ``reconcile_interval``."""
    monkeypatch.setenv("OMNIQ_RECONCILE_INTERVAL", "0.5")
    get_settings.cache_clear()
    assert router.collect() == 0
    router.put("gone.a.1.out", make(1000), consumers_local=True)
    assert blobs.pttl(keys.blob_sweeper(system())) <= 500  # type: ignore[operator]
    wait_until(lambda: router.collect() == 1, 5)


async def test_a_full_server_takes_no_note_either(
    blobs: redis.Redis, router: BlobRouter, namespace: str
) -> None:
    """What is refused leaves neither blob nor note."""
    used = int(blobs.info("memory")["used_memory"])  # type: ignore[index]
    blobs.config_set("maxmemory", used + (6 << 20))
    try:
        with pytest.raises(StoreFull):
            router.put("job.a.1.out", make(30 << 20), consumers_local=True)
    finally:
        blobs.config_set("maxmemory", 0)
    assert not list(blobs.scan_iter(f"{namespace}:*"))


@pytest.mark.parametrize("blobs", ["own server"], indirect=True)
async def test_another_system_on_the_same_server_frees_nothing_here(
    blobs: redis.Redis, router: BlobRouter, jobs: JobStore, configured: redis.Redis
) -> None:
    """Its broker has neither these jobs nor this system's name."""
    job, fence = await begin(jobs)
    ref = router.put(f"{job}.a.{fence}.out", make(1000), consumers_local=True)
    assert router.collect() == 0
    configured.flushall()
    other = BlobRouter.from_settings()
    try:
        assert other.collect() == 0
        assert_same(other.get(ref), make(1000))
    finally:
        other.close()

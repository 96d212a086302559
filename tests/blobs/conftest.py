"""Stores in a namespace of each test's own; a test that leaves a file or a key there fails."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from omniq.blobs import BlobRouter, RedisStore, ShmStore, host_identity
from omniq.settings import get_settings

SHM = Path("/dev/shm")


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"test{secrets.token_hex(6)}"
    yield name
    left = sorted(SHM.glob(f"{name}.*"))
    for path in left:
        path.unlink()
    assert not left


@pytest.fixture
def shm_stores(namespace: str) -> Iterator[Callable[..., ShmStore]]:
    """Makes stores on this host; closed at the end."""
    made = []

    def make(folder: Path = SHM, max_bytes: int = 1 << 30) -> ShmStore:
        made.append(ShmStore(folder, namespace, host_identity(folder), max_bytes))
        return made[-1]

    yield make
    for store in made:
        for ref in store.own():
            store.delete(ref)
        store.close()


@pytest.fixture
def shm(shm_stores: Callable[..., ShmStore]) -> ShmStore:
    return shm_stores()


@pytest.fixture
def configured(
    redis_client: redis.Redis, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> redis.Redis:
    """Settings of a system of this test's own; the value is a client of its empty Redis."""
    monkeypatch.setenv("OMNIQ_NAMESPACE", namespace)
    get_settings.cache_clear()
    return redis_client


@pytest.fixture
def redis_store(configured: redis.Redis) -> Iterator[RedisStore]:
    store = RedisStore.from_settings()
    yield store
    store.close()


@pytest.fixture
def router(configured: redis.Redis) -> Iterator[BlobRouter]:
    """A router as a worker makes it, spilled and closed at the end as a worker does."""
    router = BlobRouter.from_settings()
    yield router
    router.spill(lambda _: False)
    router.close()

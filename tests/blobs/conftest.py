"""Stores in a namespace of each test's own; a test that leaves a file or a key there fails."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from omniq.blobs import BlobRouter, RedisStore
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

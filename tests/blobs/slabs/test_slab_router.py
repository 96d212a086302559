"""The router with a small pool of slabs, and many blobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from slab_players import filled, make_store

from omniq import keys
from omniq.blobs import BlobRouter, RedisStore

HOST = "host"


@pytest.fixture
def routers(redis_store: RedisStore, namespace: str) -> Iterator[Callable[..., BlobRouter]]:
    """Makes routers as workers of one host have them."""
    made: list[BlobRouter] = []

    def make(max_bytes: int = 64 << 20) -> BlobRouter:
        store = make_store(namespace, max_bytes)
        made.append(BlobRouter(HOST, store, RedisStore.from_settings()))
        return made[-1]

    yield make
    for router in made:
        router.spill(lambda _: False)
        router.close()
    make_store(namespace).sweep(lambda _: False)


def test_a_full_slab_store_falls_back_to_redis(routers: Callable[..., BlobRouter]) -> None:
    writer = routers(max_bytes=4 << 20)
    refs = [writer.put(f"j.ar.{n}.x", filled(n, 1 << 20), True) for n in range(6)]
    assert {ref.store for ref in refs} == {"shm", "redis"}
    for number, ref in enumerate(refs):
        assert writer.get(ref)["x"].unique().tolist() == [number]
        writer.delete(ref)


def test_ten_thousand_megabytes_pass_through_a_small_pool(
    routers: Callable[..., BlobRouter],
) -> None:
    """Jobs that end free their slots: the pool does not grow and nothing goes to Redis."""
    writer, reader = routers(), routers()
    source = filled(1, 16 << 20)
    for number in range(625):
        ref = writer.put(f"j{number}.ar.1.x", source, True)
        assert ref.store == "shm"
        tensor = reader.get(ref)["x"]
        writer.redis.client.sadd(keys.host_garbage(HOST), ref.model_dump_json())
        assert reader.collect_garbage() == 1
        assert tensor[0] == 1
        del tensor
    assert writer.shm.stats()["own"]["bytes"] < 64 << 20

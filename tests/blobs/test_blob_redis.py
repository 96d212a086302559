"""The Redis store against a real Valkey: chunks, lifetimes, damage, and a server that refuses."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import redis
import torch
from blob_tools import assert_same, blob_keys, make
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import wait_until

from omniq import keys
from omniq.blobs import BlobRef, RedisStore
from omniq.blobs.redis import PART_TTL, _Writing
from omniq.blobs.redis_frame import CHUNK_BYTES, HEADER_BYTES, TRAILER_BYTES
from omniq.errors import BlobCorrupt, BlobNotFound, BlobTooLarge, BrokerUnavailable, StoreFull
from omniq.jobs.scripts import sources

if TYPE_CHECKING:
    from support import Valkey

ID = "job.a.1.out"


def stored(client: redis.Redis) -> list[bytes]:
    """The chunks of the blob, in order."""
    found = []
    while (chunk := client.get(keys.blob_chunk(ID, len(found)))) is not None:
        found.append(chunk)
    return found  # type: ignore[return-value]


def small_chunks(client: redis.Redis, max_bytes: int = 1 << 30) -> RedisStore:
    return RedisStore(client, ttl=100, max_bytes=max_bytes, chunk_bytes=1000)


@pytest.fixture
def little_memory(configured: redis.Redis) -> Iterator[None]:
    """Valkey takes 3 MB more and no more."""
    used = int(configured.info("memory")["used_memory"])
    configured.config_set("maxmemory", used + (3 << 20))
    yield
    configured.config_set("maxmemory", 0)


def test_a_blob_is_read_back(redis_store: RedisStore) -> None:
    tensors = {
        "a": torch.randn(3, 5).T,
        "b": torch.tensor(7, dtype=torch.bfloat16),
        "c": torch.empty(0, 4, dtype=torch.bool),
    }
    ref = redis_store.put(ID, tensors)
    assert (ref.id, ref.store, ref.host) == (ID, "redis", None)
    assert ref.tensors == {"a": "float32[5,3]", "b": "bfloat16[]", "c": "bool[0,4]"}
    got = redis_store.get(ref)
    assert_same(got, tensors)
    assert redis_store.delete(ref)
    assert not redis_store.delete(ref)
    with pytest.raises(BlobNotFound):
        redis_store.get(ref)
    assert_same(got, tensors)


@pytest.mark.parametrize("nbytes", [1, 900, 1000, 5000, 100_000])
def test_no_chunk_is_larger_than_allowed(configured: redis.Redis, nbytes: int) -> None:
    store = small_chunks(configured)
    ref = store.put(ID, make(nbytes))
    sizes = [len(chunk) - HEADER_BYTES - TRAILER_BYTES for chunk in stored(configured)]
    assert set(sizes[:-1]) <= {1000}
    assert 0 < sizes[-1] <= 1000
    assert sum(sizes) == ref.nbytes
    assert_same(store.get(ref), make(nbytes))


def test_many_small_tensors_share_chunks(configured: redis.Redis) -> None:
    tensors = {f"t{n}": torch.full((n,), n) for n in range(200)}
    store = small_chunks(configured)
    ref = store.put(ID, tensors)
    assert len(stored(configured)) == -(-ref.nbytes // 1000)
    assert_same(store.get(ref), tensors)


def test_tens_of_megabytes(redis_store: RedisStore, configured: redis.Redis) -> None:
    ref = redis_store.put(ID, make(20 << 20))
    assert len(stored(configured)) == 6
    assert_same(redis_store.get(ref), make(20 << 20))
    assert redis_store.delete(ref)
    assert configured.keys() == []


@pytest.mark.parametrize("nbytes", [100, 5000])
def test_every_key_of_a_blob_expires(configured: redis.Redis, nbytes: int) -> None:
    store = small_chunks(configured)
    ref = store.put(ID, make(nbytes))
    names = blob_keys(configured)
    assert len(names) == -(-ref.nbytes // 1000)
    assert all(90 < configured.ttl(name) <= 100 for name in names)  # type: ignore


def test_a_blob_is_invisible_until_it_is_complete(
    configured: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written by then goes by itself should its writer die."""
    store = small_chunks(configured)
    publish = _Writing._publish
    seen: list[Any] = []

    def look(writing: _Writing) -> None:
        with pytest.raises(BlobNotFound):
            store.get(BlobRef(id=ID, store="redis", nbytes=1))
        seen.extend(configured.pttl(name) for name in blob_keys(configured))
        publish(writing)

    monkeypatch.setattr(_Writing, "_publish", look)
    ref = store.put(ID, make(5000))
    assert len(seen) == 6
    assert all(0 < ttl <= PART_TTL * 1000 for ttl in seen)
    assert_same(store.get(ref), make(5000))


def test_a_part_that_redis_dropped_is_noticed(
    configured: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = _Writing._publish

    def lose(writing: _Writing) -> None:
        configured.unlink(writing._parts[1])
        publish(writing)

    monkeypatch.setattr(_Writing, "_publish", lose)
    with pytest.raises(StoreFull, match=ID):
        small_chunks(configured).put(ID, make(5000))
    assert configured.keys() == []


def test_writing_again_replaces(redis_store: RedisStore) -> None:
    old = redis_store.put(ID, make(seed=1))
    new = redis_store.put(ID, make(seed=2))
    assert_same(redis_store.get(new), make(seed=2))
    with pytest.raises(BlobCorrupt, match=r"not the one referred to|checksum"):
        redis_store.get(old)


# -- limits ----------------------------------------------------------------------------------------


def test_a_large_blob_is_refused(configured: redis.Redis) -> None:
    store = small_chunks(configured, max_bytes=5000)
    with pytest.raises(BlobTooLarge):
        store.put(ID, make(5000))
    assert configured.keys() == []
    store.put(ID, make(4000))


@pytest.mark.usefixtures("little_memory")
def test_a_full_redis_is_a_full_store(redis_store: RedisStore, configured: redis.Redis) -> None:
    """What was already written is taken back, and small blobs still fit."""
    with pytest.raises(StoreFull, match="Redis has no memory"):
        redis_store.put(ID, make(40 << 20))
    assert configured.keys() == []
    limit = int(configured.config_get("maxmemory")["maxmemory"])
    wait_until(
        lambda: int(configured.info("memory")["used_memory"]) < limit - (2 << 20),
        what="the server has its memory back",
    )
    assert_same(redis_store.get(redis_store.put(ID, make())), make())


@pytest.mark.timeout(60)
def test_a_stopped_server_is_named_at_once(own_valkey: Valkey) -> None:
    store = RedisStore.from_settings()
    ref = store.put(ID, make())
    own_valkey.stop()
    for call in (lambda: store.put(ID, make()), lambda: store.get(ref), lambda: store.delete(ref)):
        with pytest.raises(BrokerUnavailable):
            call()
    own_valkey.start()
    assert_same(store.get(store.put(ID, make())), make())
    store.close()


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def store(configured: redis.Redis) -> Iterator[RedisStore]:
    store = small_chunks(configured)
    yield store
    store.close()


def change(client: redis.Redis, number: int, value: bytes) -> None:
    client.set(keys.blob_chunk(ID, number), value)


@pytest.mark.parametrize("number", [0, 2, 5])
@pytest.mark.parametrize("place", [HEADER_BYTES, HEADER_BYTES + 70, -TRAILER_BYTES - 1, -1])
def test_a_flipped_bit_is_noticed(
    store: RedisStore, configured: redis.Redis, number: int, place: int
) -> None:
    ref = store.put(ID, make(5000))
    bad = bytearray(stored(configured)[number])
    bad[place] ^= 1
    change(configured, number, bytes(bad))
    with pytest.raises(BlobCorrupt, match=ID):
        store.get(ref)
    assert_same(store.get(store.put(ID, make(5000))), make(5000))


@pytest.mark.parametrize("number", [0, 3, 5])
@pytest.mark.parametrize("length", [0, 10, HEADER_BYTES, 39, 40, 500, 1039, 1041, 100_000])
def test_a_chunk_of_another_length_is_noticed(
    store: RedisStore, configured: redis.Redis, number: int, length: int
) -> None:
    ref = store.put(ID, make(5000))
    change(configured, number, stored(configured)[number][:1040].ljust(length, b"x")[:length])
    with pytest.raises(BlobCorrupt, match=ID):
        store.get(ref)


@pytest.mark.parametrize("number", range(6))
def test_a_missing_chunk_is_a_blob_that_is_gone(
    store: RedisStore, configured: redis.Redis, number: int
) -> None:
    ref = store.put(ID, make(5000))
    configured.unlink(keys.blob_chunk(ID, number))
    with pytest.raises(BlobNotFound, match=ID):
        store.get(ref)


def test_chunks_in_each_others_place_are_noticed(
    store: RedisStore, configured: redis.Redis
) -> None:
    ref = store.put(ID, make(5000))
    second, third = stored(configured)[1:3]
    change(configured, 1, third)
    change(configured, 2, second)
    with pytest.raises(BlobCorrupt, match="chunk 2 in place of chunk 1"):
        store.get(ref)


def test_chunks_of_two_writers_do_not_mix(store: RedisStore, configured: redis.Redis) -> None:
    ref = store.put(ID, make(5000))
    old = stored(configured)[2]
    store.put(ID, make(5000))
    change(configured, 2, old)
    with pytest.raises(BlobNotFound, match="replaced"):
        store.get(ref)


# Fields of a chunk's header: magic, number, bytes in a chunk, bytes of the blob.
LIES = [(0, "4s", b"none"), (4, "I", 1), (8, "Q", 0), (8, "Q", 999), (8, "Q", 1 << 60),
        (16, "Q", 0), (16, "Q", 1 << 60), (16, "Q", (1 << 64) - 1)]  # fmt: skip


@pytest.mark.parametrize(("offset", "kind", "value"), LIES)
def test_a_header_that_lies_is_noticed(
    store: RedisStore, configured: redis.Redis, offset: int, kind: str, value: Any
) -> None:
    ref = store.put(ID, make(5000))
    bad = bytearray(stored(configured)[0])
    struct.pack_into(f"<{kind}", bad, offset, value)
    change(configured, 0, bytes(bad))
    with pytest.raises(BlobCorrupt, match=ID):
        store.get(ref)


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_no_damage_yields_other_tensors(
    store: RedisStore, configured: redis.Redis, data: st.DataObject
) -> None:
    nbytes = data.draw(st.integers(0, 3000), "bytes")
    configured.flushall()
    ref = store.put(ID, make(nbytes)).model_copy(update={"checksum": None})
    chunks = stored(configured)
    number = data.draw(st.integers(0, len(chunks) - 1), "chunk")
    bad = bytearray(chunks[number])
    for place in data.draw(st.lists(st.integers(0, len(bad) - 1), min_size=1, max_size=3)):
        bad[place] = data.draw(st.integers(0, 255))
    change(configured, number, bytes(bad[: data.draw(st.integers(0, 2 * len(bad)), "cut")]))
    try:
        got = store.get(ref)
    except (BlobCorrupt, BlobNotFound):
        return
    assert_same(got, make(nbytes))


def test_a_key_of_another_type_is_noticed(redis_store: RedisStore, configured: redis.Redis) -> None:
    configured.hset(keys.blob(ID), "x", "y")
    with pytest.raises(BlobCorrupt, match=ID):
        redis_store.get(BlobRef(id=ID, store="redis", nbytes=1))


@pytest.mark.parametrize(
    "update",
    [
        {"nbytes": 1},
        {"nbytes": 1 << 60},
        {"checksum": "0" * 16},
        {"tensors": {"x": "float32[1024]"}},
        {"tensors": {"x": "uint8[1,1024]"}},
        {"tensors": {"y": "uint8[1024]"}},
    ],
)
def test_a_reference_to_another_blob_is_noticed(
    redis_store: RedisStore, update: dict[str, Any]
) -> None:
    ref = redis_store.put(ID, make())
    with pytest.raises(BlobCorrupt, match=ID):
        redis_store.get(ref.model_copy(update=update))


def test_bytes_that_are_no_tensors_are_noticed(redis_store: RedisStore) -> None:
    with pytest.raises(BlobCorrupt, match=ID):
        redis_store.get(redis_store.put_bytes(ID, memoryview(b"\xff" * 100)))


def test_an_expired_blob_is_gone(configured: redis.Redis) -> None:
    store = RedisStore(configured, ttl=0.05, max_bytes=1 << 30, chunk_bytes=1000)
    ref = store.put(ID, make(5000))
    wait_until(lambda: not blob_keys(configured), 5, "all chunks expire")
    with pytest.raises(BlobNotFound, match=ID):
        store.get(ref)
    store.close()


def test_chunks_are_as_long_as_the_scripts_believe() -> None:
    assert f"CHUNK_BYTES = {CHUNK_BYTES} " in sources()["create"]

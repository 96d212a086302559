"""The Redis store against a real Valkey: chunks, lifetimes, damage, and a server that refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import redis
import torch
from blob_tools import assert_same, make

from omniq import keys
from omniq.blobs import BlobRef, RedisStore
from omniq.blobs.redis import PART_TTL, _chunks
from omniq.errors import BlobCorrupt, BlobNotFound, BlobTooLarge, BrokerUnavailable, StoreFull
from omniq.settings import get_settings

if TYPE_CHECKING:
    from support import Valkey

ID = "job.a.1.out"


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
    fields: dict[bytes, bytes] = configured.hgetall(keys.blob(ID))  # type: ignore[assignment]
    fields.pop(b"meta")
    sizes = [len(fields[str(n).encode()]) for n in range(len(fields))]
    assert set(sizes[:-1]) <= {1000}
    assert sum(sizes) == ref.nbytes
    assert_same(store.get(ref), make(nbytes))


def test_many_small_tensors_share_chunks(configured: redis.Redis) -> None:
    tensors = {f"t{n}": torch.full((n,), n) for n in range(200)}
    store = small_chunks(configured)
    ref = store.put(ID, tensors)
    assert configured.hlen(keys.blob(ID)) == -(-ref.nbytes // 1000) + 1
    assert_same(store.get(ref), tensors)


def test_pieces_that_lie_in_one_buffer_are_not_copied() -> None:
    data = bytearray(2500)
    pieces = list(_chunks([memoryview(data)[:1000], memoryview(data)[1000:]], 1000))
    data[:] = b"x" * 2500
    assert [bytes(p) for p in pieces[:2]] == [b"x" * 1000] * 2


def test_tens_of_megabytes(redis_store: RedisStore, configured: redis.Redis) -> None:
    ref = redis_store.put(ID, make(20 << 20))
    assert configured.hlen(keys.blob(ID)) == 4
    assert_same(redis_store.get(ref), make(20 << 20))


def test_a_blob_is_one_key_that_expires(redis_store: RedisStore, configured: redis.Redis) -> None:
    redis_store.put(ID, make())
    assert configured.keys() == [keys.blob(ID).encode()]
    ttl = get_settings().blob_ttl
    assert ttl - 10 < configured.ttl(keys.blob(ID)) <= ttl  # type: ignore[operator]


def test_a_blob_is_invisible_until_it_is_complete(
    configured: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written by then goes by itself should its writer die."""
    store = small_chunks(configured)
    publish = store._publish
    seen: list[Any] = []

    def look(part: str, *args: Any) -> None:
        with pytest.raises(BlobNotFound):
            store.get(BlobRef(id=ID, store="redis", nbytes=1))
        seen.append(configured.pttl(part))
        publish(part, *args)

    monkeypatch.setattr(store, "_publish", look)
    ref = store.put(ID, make(5000))
    assert 0 < seen[0] <= PART_TTL * 1000
    assert_same(store.get(ref), make(5000))


def test_a_part_that_redis_dropped_is_noticed(
    configured: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = small_chunks(configured)
    publish = store._publish

    def lose(part: str, *args: Any) -> None:
        configured.hdel(part, "1")
        publish(part, *args)

    monkeypatch.setattr(store, "_publish", lose)
    with pytest.raises(StoreFull):
        store.put(ID, make(5000))
    assert configured.keys() == []


def test_writing_again_replaces(redis_store: RedisStore) -> None:
    old = redis_store.put(ID, make(seed=1))
    new = redis_store.put(ID, make(seed=2))
    assert_same(redis_store.get(new), make(seed=2))
    with pytest.raises(BlobCorrupt, match="not the one referred to"):
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
    assert_same(redis_store.get(redis_store.put(ID, make())), make())


def test_a_stopped_server_is_named_at_once(own_valkey: Valkey) -> None:
    store = RedisStore.from_settings()
    ref = store.put(ID, make())
    own_valkey.stop()
    started = time.monotonic()
    for call in (lambda: store.put(ID, make()), lambda: store.get(ref), lambda: store.delete(ref)):
        with pytest.raises(BrokerUnavailable):
            call()
    assert time.monotonic() - started < 5
    own_valkey.start()
    assert_same(store.get(store.put(ID, make())), make())
    store.close()


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", ["0", "2", "5"])
def test_a_flipped_byte_is_noticed(configured: redis.Redis, chunk: str) -> None:
    store = small_chunks(configured)
    ref = store.put(ID, make(5000))
    raw: bytes = configured.hget(keys.blob(ID), chunk)  # type: ignore[assignment]
    bad = bytearray(raw)
    bad[len(bad) // 2] ^= 1
    configured.hset(keys.blob(ID), chunk, bytes(bad))
    with pytest.raises(BlobCorrupt):
        store.get(ref)


@pytest.mark.parametrize("value", [b"", b"x" * 999, b"x" * 1001, b"x" * 100_000])
def test_a_chunk_of_another_length_is_noticed(configured: redis.Redis, value: bytes) -> None:
    store = small_chunks(configured)
    ref = store.put(ID, make(5000))
    configured.hset(keys.blob(ID), "3", value)
    with pytest.raises(BlobCorrupt):
        store.get(ref)


def test_a_missing_chunk_is_a_blob_that_is_gone(configured: redis.Redis) -> None:
    store = small_chunks(configured)
    ref = store.put(ID, make(5000))
    configured.hdel(keys.blob(ID), "3")
    with pytest.raises(BlobNotFound):
        store.get(ref)


@pytest.mark.parametrize(
    "meta", [b"", b"{}", b"\xff", b'{"nbytes":-1,"chunks":1,"checksum":""}', b"[1]"]
)
def test_damaged_metadata_are_noticed(
    redis_store: RedisStore, configured: redis.Redis, meta: bytes
) -> None:
    ref = redis_store.put(ID, make())
    configured.hset(keys.blob(ID), "meta", meta)
    with pytest.raises(BlobCorrupt):
        redis_store.get(ref)


def test_a_key_of_another_type_is_noticed(redis_store: RedisStore, configured: redis.Redis) -> None:
    configured.set(keys.blob(ID), b"x")
    with pytest.raises(BlobCorrupt):
        redis_store.get(BlobRef(id=ID, store="redis", nbytes=1))


def test_a_reference_to_another_blob_is_noticed(redis_store: RedisStore) -> None:
    ref = redis_store.put(ID, make())
    for update in ({"nbytes": ref.nbytes + 1}, {"checksum": "00000000"}):
        with pytest.raises(BlobCorrupt):
            redis_store.get(ref.model_copy(update=update))


def test_bytes_that_are_no_tensors_are_noticed(redis_store: RedisStore) -> None:
    with pytest.raises(BlobCorrupt):
        redis_store.get(redis_store.put_bytes(ID, memoryview(b"\xff" * 100)))

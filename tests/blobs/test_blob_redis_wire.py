"""The Redis store's connections: broken in the middle, over TLS, Unix sockets, with passwords."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from blob_tools import assert_same, blob_keys, make
from hypothesis import given
from hypothesis import strategies as st
from proxy import Proxy
from support import Valkey

from omniq.blobs import BlobRef, RedisStore
from omniq.blobs.redis_frame import TOKEN_BYTES, Plan, cut, read_header
from omniq.blobs.redis_wire import Wires
from omniq.errors import BlobError, BlobNotFound, BrokerUnavailable

ID = "job.a.1.out"
MB = 1 << 20
StoreOn = Callable[..., RedisStore]


@pytest.fixture
def store_on(configured: redis.Redis) -> Iterator[StoreOn]:
    """Makes a store for a URL of redis-py."""
    made = []

    def make(url: str, **options: Any) -> RedisStore:
        client = redis.Redis.from_url(url, socket_timeout=10.0, **options)
        made.append(RedisStore(client, ttl=100, max_bytes=1 << 30, chunk_bytes=MB))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def proxy(broker: Valkey) -> Iterator[Proxy]:
    proxy = Proxy(broker.port)
    yield proxy
    proxy.close()


# -- the format ------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=50), max_size=10), st.integers(1, 60))
def test_cutting_keeps_every_byte(buffers: list[bytes], chunk_bytes: int) -> None:
    whole = b"".join(buffers)
    plan = Plan(len(whole), chunk_bytes, b"t" * TOKEN_BYTES)
    chunks = [b"".join(parts) for parts in cut(map(memoryview, buffers), plan)]
    assert b"".join(chunks) == whole
    assert len(chunks) == plan.chunks
    spans = [plan.span(number) for number in range(plan.chunks)]
    assert [len(chunk) for chunk in chunks] == [end - start for start, end in spans]
    assert all(read_header(plan.header(n), n, len(whole)) == plan for n in range(plan.chunks))


def test_cutting_copies_nothing() -> None:
    data = bytearray(2500)
    parts = list(cut([memoryview(data)[:700], memoryview(data)[700:]], Plan(2500, 1000, b"")))
    data[:] = b"x" * 2500
    assert [b"".join(chunk) for chunk in parts] == [b"x" * 1000, b"x" * 1000, b"x" * 500]


# -- connections that break ------------------------------------------------------------------------


@pytest.mark.parametrize("after", [300, 70_000, 3 * MB + 5000])
def test_a_put_survives_one_cut(
    store_on: StoreOn, proxy: Proxy, configured: redis.Redis, after: int
) -> None:
    proxy.up, proxy.cuts = after, 1
    store = store_on(f"redis://127.0.0.1:{proxy.port}")
    ref = store.put(ID, make(4 * MB))
    assert proxy.cuts == 0
    assert_same(store.get(ref), make(4 * MB))


@pytest.mark.parametrize("after", [300, 70_000, 3 * MB + 5000])
def test_a_get_survives_one_cut(store_on: StoreOn, proxy: Proxy, after: int) -> None:
    store = store_on(f"redis://127.0.0.1:{proxy.port}")
    ref = store.put(ID, make(4 * MB))
    proxy.down, proxy.cuts = after, 1
    assert_same(store.get(ref), make(4 * MB))
    assert proxy.cuts == 0


def test_after_two_cuts_the_server_counts_as_gone(
    store_on: StoreOn, proxy: Proxy, configured: redis.Redis
) -> None:
    """Nothing can be read of it, and what was written expires."""
    proxy.up, proxy.cuts = 2 * MB, 2
    store = store_on(f"redis://127.0.0.1:{proxy.port}")
    with pytest.raises(BrokerUnavailable):
        store.put(ID, make(4 * MB))
    names: Any = blob_keys(configured)
    assert names
    assert all(0 < configured.ttl(name) <= 64 for name in names)
    ref = store.put(ID, make(4 * MB))
    proxy.down, proxy.cuts = 2 * MB, 2
    with pytest.raises(BrokerUnavailable):
        store.get(ref)
    assert_same(store.get(ref), make(4 * MB))


def test_connections_that_the_server_closed_meanwhile_do_not_matter(
    redis_store: RedisStore, configured: redis.Redis
) -> None:
    ref = redis_store.put(ID, make())
    configured.client_kill_filter(_type="normal", skipme=True)
    assert_same(redis_store.get(ref), make())


def test_connections_are_used_again(store_on: StoreOn, proxy: Proxy) -> None:
    store = store_on(f"redis://127.0.0.1:{proxy.port}")
    for seed in range(5):
        ref = store.put(ID, make(2 * MB, seed))
        assert_same(store.get(ref), make(2 * MB, seed))
    with pytest.raises(BlobNotFound):
        store.get(ref.model_copy(update={"id": "other"}))
    assert_same(store.get(ref), make(2 * MB, 4))
    assert proxy.accepted == 1


def test_what_is_no_redis_is_named(store_on: StoreOn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            peer.recv(1000)
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            peer.close()

        threading.Thread(target=answer, daemon=True).start()
        store = store_on(f"redis://127.0.0.1:{listener.getsockname()[1]}", socket_connect_timeout=5)
        with pytest.raises(BrokerUnavailable):
            store.put(ID, make())


# -- ways to the server ----------------------------------------------------------------------------


def test_over_tls(store_on: StoreOn, broker: Valkey, tmp_path: Path) -> None:
    pem = tmp_path / "server.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", pem, "-out",
         tmp_path / "cert.pem"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    pem.write_text(pem.read_text() + (tmp_path / "cert.pem").read_text())
    proxy = Proxy(broker.port, pem)
    url = f"rediss://127.0.0.1:{proxy.port}"
    store = store_on(url, ssl_ca_certs=str(tmp_path / "cert.pem"))
    ref = store.put(ID, make(3 * MB))
    assert_same(store.get(ref), make(3 * MB))
    with pytest.raises(BrokerUnavailable, match="certificate"):
        store_on(url).get(ref)  # a certificate of nobody that is trusted
    proxy.close()


def test_user_password_and_database(
    store_on: StoreOn, broker: Valkey, configured: redis.Redis
) -> None:
    configured.acl_setuser(
        "blobs", enabled=True, passwords=["+secret"], keys=["*"], categories=["+@all"]
    )
    configured.acl_setuser("weak", enabled=True, nopass=True, keys=["none"], categories=["+@all"])
    store = store_on(f"redis://blobs:secret@127.0.0.1:{broker.port}/3")
    ref = store.put(ID, make(2 * MB))
    assert configured.keys() == []
    assert_same(store.get(ref), make(2 * MB))
    with pytest.raises(BrokerUnavailable):
        store_on(f"redis://blobs:wrong@127.0.0.1:{broker.port}/3").get(ref)
    with pytest.raises(BlobError, match=ID):
        store_on(f"redis://weak@127.0.0.1:{broker.port}/3").get(ref)
    with pytest.raises(BlobError, match=ID):
        store_on(f"redis://weak@127.0.0.1:{broker.port}/3").put(ID, make(2 * MB))
    configured.acl_deluser("blobs", "weak")


def _family(store: RedisStore) -> str:
    return store._wires.use(lambda wire: wire._socket.family.name)


def test_a_server_on_this_machine_is_reached_by_its_unix_socket(
    store_on: StoreOn, tmp_path: Path
) -> None:
    path = tmp_path / "valkey.sock"
    server = Valkey(tmp_path, "--unixsocket", str(path))
    server.start()
    store = store_on(server.url)
    ref = store.put(ID, make(3 * MB))
    assert _family(store) == "AF_UNIX"
    assert_same(store.get(ref), make(3 * MB))
    # Restarted without: the network again.
    server.stop()
    server.options = ()
    server.start()
    assert_same(store.get(ref), make(3 * MB))
    assert _family(store) == "AF_INET"
    server.stop()


def test_the_unix_socket_of_another_server_is_not_taken(store_on: StoreOn, tmp_path: Path) -> None:
    """A forwarded port: the path that the server names is another server's on this machine."""
    path = tmp_path / "valkey.sock"
    far = Valkey(tmp_path, "--unixsocket", str(path))
    far.start()
    path.unlink()
    (tmp_path / "near").mkdir()
    near = Valkey(tmp_path / "near", "--unixsocket", str(path))
    near.start()
    store = store_on(far.url)
    store.put(ID, make())
    assert _family(store) == "AF_INET"
    assert redis.Redis(port=near.port).keys() == []
    far.stop()
    near.stop()


def test_a_forked_process_makes_connections_of_its_own(configured: redis.Redis) -> None:
    wires = Wires(configured)
    ours = wires.use(lambda wire: wire)
    wires._pid -= 1  # as after a fork
    theirs = wires.use(lambda wire: wire)
    assert theirs is not ours
    assert ours.ask(b"PING") == b"PONG"
    wires.close()


# -- many at once ----------------------------------------------------------------------------------


def test_readers_never_see_a_mixture(broker: Valkey, store_on: StoreOn) -> None:
    """While a blob is replaced again and again, readers get one or the other, or nothing."""
    both = [make(300_000, seed) for seed in (0, 1)]
    small = store_on(broker.url)
    small._chunk_bytes = 50_000
    ref = small.put(ID, both[0]).model_copy(update={"checksum": None})
    done = threading.Event()

    def write() -> None:
        for number in range(150):
            small.put(ID, both[number % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        try:
            got = small.get(ref)["x"]
        except BlobNotFound:
            continue
        matches = [n for n, tensors in enumerate(both) if torch.equal(got, tensors["x"])]
        assert matches
        seen.update(matches)
    writer.join()
    assert seen == {0, 1}


PLAYER = """
import sys
sys.path.insert(0, sys.argv[1])
from blob_tools import assert_same, make
from omniq.blobs import BlobRef, RedisStore
me, store = int(sys.argv[2]), RedisStore.from_settings()
sizes = [1, 1000, 70_000, 1 << 20, 9 << 20]
for number, size in enumerate(sizes):
    ref = store.put(f"job.s{me}.1.x{number}", make(size, seed=me * 100 + number))
    print(ref.model_dump_json(), flush=True)
for line in sys.stdin:
    ref = BlobRef.model_validate_json(line)
    writer, number = int(ref.id[5]), int(ref.id[-1])
    assert_same(store.get(ref), make(sizes[number], seed=writer * 100 + number))
print("read", flush=True)
"""


def test_several_processes_write_and_read_at_once(
    redis_store: RedisStore, configured: redis.Redis
) -> None:
    argv = [sys.executable, "-c", PLAYER, str(Path(__file__).parent)]
    players = [
        subprocess.Popen([*argv, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    lines = [player.stdout.readline() for _ in range(5) for player in players if player.stdout]
    everything = "".join(lines) * 2
    outputs: list[str] = []
    threads = [
        threading.Thread(target=lambda p=p: outputs.append(p.communicate(everything)[0]))
        for p in players
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == ["read\n"] * 2
    for line in lines:
        assert redis_store.delete(BlobRef.model_validate_json(line))
    assert configured.keys() == []


def test_threads_share_one_store(redis_store: RedisStore) -> None:
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for seed in range(10):
                blob_id = f"job.a.1.t{number}"
                ref = redis_store.put(blob_id, make(200_000, seed))
                assert_same(redis_store.get(ref), make(200_000, seed))
        except BaseException as exc:
            faults.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults

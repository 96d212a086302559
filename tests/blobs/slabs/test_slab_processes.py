"""The slab store between processes: reuse under readers, and deaths at any point."""

from __future__ import annotations

import random
import select
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import slab_players as players
from slab_players import SHM, SlabStore, filled, make_store, number_in
from support import wait_until

from omniq.blobs.base import BlobRef
from omniq.blobs.slabs import layout, locks
from omniq.errors import BlobNotFound

SIZES = [8, 4000, 70_000, 1 << 20]
#: Blobs that must be read for the hammer to say something, in so many rounds at most.
ENOUGH, ROUNDS = 50, 10


@pytest.mark.parametrize("keep", [0, 2, 64], ids=["freed at once", "freed soon", "freed later"])
def test_views_never_change_while_slots_are_reused(
    namespace: str, keep: int, thorough: bool
) -> None:
    """Freed at once: most references lead nowhere, and what was pinned in time must hold."""
    hammer(namespace, keep, seconds=60.0 if thorough else 4.0)


def hammer(namespace: str, keep: int, seconds: float) -> None:
    """In rounds: how many blobs are read before they are freed is the scheduler's choice."""
    seen = sent = 0
    for _ in range(ROUNDS):
        found, offered = hammered(namespace, keep, seconds)
        seen, sent = seen + found, sent + offered
        if seen > ENOUGH:
            return
    raise AssertionError(f"only {seen} of {sent} blobs were read")


def hammered(namespace: str, keep: int, seconds: float) -> tuple[int, int]:
    """How many blobs were read, and how many sent."""
    producers = [players.start(players.produce, namespace, f"p{n}", SIZES, keep) for n in range(2)]
    readers = [players.start(players.read, namespace, 5, n) for n in range(3)]
    try:
        assert [c.recv() for _, c in producers] == ["up", "up"]
        sent = relay(
            [c for _, c in producers], [c for _, c in readers], until=time.monotonic() + seconds
        )
        results = []
        for _, connection in readers:
            connection.send(None)
            results.append(connection.recv())
        assert all(isinstance(r, tuple) for r in results), results
        seen = sum(r[0] for r in results)
    finally:
        end([p for p, _ in producers + readers])
    make_store(namespace).sweep(lambda _: False)
    assert not list(SHM.glob(f"{namespace}.*"))
    return seen, sent


def relay(sources: list[Connection], sinks: list[Connection], until: float) -> int:
    """Send each reference on to one or two readers until the time; returns how many there were."""
    open_sources, count = set(sources), 0
    told = False
    while open_sources:
        if not told and time.monotonic() > until:
            for source in sources:
                source.send("end")
            told = True
        for source in list(open_sources):
            if not source.poll(0.001):
                continue
            message = source.recv()
            if message is None:
                open_sources.discard(source)
                continue
            count += 1
            for sink in random.sample(sinks, random.choice([1, 2])):
                sink.send(message)
    return count


def end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def test_a_killed_reader_unpins(namespace: str) -> None:
    """The kernel drops a dead reader's pins: its slot is reused without any sweep."""
    store = make_store(namespace)
    process, connection = players.start(players.read, namespace, 10, 0)
    ref = store.put("j.1", filled(1, 4096))
    connection.send(ref.model_dump_json())
    wait_until(lambda: pinned(store, ref), what="the reader has the blob")
    store.delete(ref)
    assert store.stats()["own"]["freed_but_read"] == 1
    process.kill()
    process.join()
    store.sweep(lambda _: True)
    assert store.stats()["own"]["freed_but_read"] == 0
    store.close()


def pinned(store: SlabStore, ref: BlobRef) -> bool:
    """Whether any other reader has the blob pinned."""
    extent, slot, _ = layout.parse_place(ref.place)
    fd = store._allocator._extents[extent].fd
    if free := locks.take(fd, locks.EXCLUSIVE, slot):
        locks.drop(fd, slot)
    return not free


def test_blobs_of_a_killed_producer_last_until_their_job_ends(namespace: str) -> None:
    process, connection = players.start(players.produce, namespace, "p", [4000], 8)
    assert connection.recv() == "up"
    refs = [BlobRef.model_validate_json(connection.recv()) for _ in range(50)]
    process.kill()
    process.join()
    while True:  # what it sent before it died
        try:
            refs.append(BlobRef.model_validate_json(connection.recv()))
        except EOFError:
            break
    store = make_store(namespace)
    newest = refs[-1]
    assert store.sweep(lambda blob_id: blob_id == newest.id) == 0
    tensor = store.get(newest)["x"]
    assert number_in(tensor) == int(newest.id.split(".")[1])
    assert store.sweep(lambda _: False) >= 1
    assert not list(SHM.glob(f"{namespace}.*"))
    assert number_in(tensor) == int(newest.id.split(".")[1]), "who has it mapped keeps it"
    del tensor
    store.close()


@pytest.mark.timeout(3600)
def test_kills_at_random_points_leak_nothing(namespace: str, thorough: bool) -> None:
    massacre(namespace, deaths=1000 if thorough else 150)


def massacre(namespace: str, deaths: int) -> None:
    """Processes that put, read, free and sweep at random are killed one by one and replaced."""
    survivor = make_store(namespace)
    rng = random.Random(0)
    crowd: list[tuple[BaseProcess, Connection]] = []

    def recruit(number: int) -> None:
        process, connection = players.start(players.churn, namespace, f"c{number}", number)
        crowd.append((process, connection))

    try:
        for number in range(4):
            recruit(number)
        for number in range(4, 4 + deaths):
            process, connection = crowd.pop(rng.randrange(len(crowd)))
            crowd.append((process, connection))
            wait_until(connection.poll, 60, "the next to die is at it")
            pause = time.monotonic() + rng.uniform(0.0, 0.1)
            while time.monotonic() < pause:
                exchange(crowd, rng)
            crowd.pop()
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL, "it ended before it was killed"
            recruit(number)
            survivor.sweep(lambda blob_id: rng.random() < 0.5)
    finally:
        for process, _ in crowd:
            process.kill()
            process.join()
    survivor.sweep(lambda _: False)
    survivor.close()
    assert not list(SHM.glob(f"{namespace}.*"))


def exchange(crowd: list[tuple[BaseProcess, Connection]], rng: random.Random) -> None:
    for _, connection in crowd:
        for _ in range(20):
            if not connection.poll():
                break
            message = connection.recv()
            if message != "up":
                offer(rng.choice(crowd)[1], message)


def offer(connection: Connection, message: str) -> None:
    """Send unless the receiver is behind: it might itself wait to send to us."""
    if select.select([], [connection], [], 0)[1]:
        connection.send(message)


def test_two_sweepers_at_a_time_are_fine(namespace: str) -> None:
    dead = make_store(namespace)
    dead.put("j.1", filled(1, 100))
    dead.close()
    one, two = make_store(namespace), make_store(namespace)

    def sweep_inside(blob_id: str) -> bool:
        assert two.sweep(lambda _: pytest.fail("another sweeps this one")) == 0
        return False

    assert one.sweep(sweep_inside) == 1
    assert two.sweep(lambda _: True) == 0


def test_deleting_from_many_processes_frees_everything(namespace: str) -> None:
    """Owners reuse what others freed: a long stream fits in few slots."""
    owner, other = make_store(namespace), make_store(namespace)
    for number in range(2000):
        ref = owner.put(f"j.{number}", filled(number, 60_000))
        assert number_in(other.get(ref)["x"]) == number
        assert other.delete(ref)
        with pytest.raises(BlobNotFound):
            other.get(ref)
    assert owner.stats()["own"]["bytes"] <= 2 << 20
    owner.close()

"""Shared memory between real processes: reading, dying, sweeping, running full."""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from blob_tools import WAIT, Tensors, Writer, assert_same, make, small_tmpfs

from omniq.blobs import BlobRef, ShmStore, host_identity
from omniq.errors import BlobCorrupt, BlobNotFound, BlobTooLarge, StoreFull

SHM = Path("/dev/shm")

Stores = Callable[..., ShmStore]


def files(namespace: str) -> list[str]:
    return sorted(p.name for p in SHM.glob(f"{namespace}.*"))


def nothing_wanted(_: str) -> bool:
    return False


@pytest.fixture
def writers(namespace: str) -> Iterator[Callable[..., Writer]]:
    """Starts writers in the test's namespace; killed at the end, and their blobs swept."""
    made: list[Writer] = []

    def start(*blob_ids: str, then: str = WAIT) -> Writer:
        made.append(Writer(namespace, *blob_ids, then=then))
        return made[-1]

    yield start
    for writer in made:
        writer.kill()
    ShmStore(SHM, namespace, "", 1).sweep(nothing_wanted)


def read_elsewhere(namespace: str, ref: BlobRef, then: str = "") -> subprocess.Popen[str]:
    """A process that reads a blob, prints its sum, and does ``then``."""
    code = (
        "import sys; from pathlib import Path; from omniq.blobs import BlobRef, ShmStore;"
        "ref = BlobRef.model_validate_json(sys.argv[2]);"
        "store = ShmStore(Path('/dev/shm'), sys.argv[1], ref.host, 1);"
        "x = store.get(ref)['x'];"
        "print(int(x.sum()), flush=True)\n" + then
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, namespace, ref.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# -- one blob --------------------------------------------------------------------------------------


def test_a_blob_is_read_back(shm: ShmStore, namespace: str) -> None:
    tensors = {
        "a": torch.randn(3, 5).T,
        "b": torch.tensor(7, dtype=torch.bfloat16),
        "c": torch.empty(0, 4, dtype=torch.bool),
    }
    ref = shm.put("job.a.1.out", tensors)
    assert (ref.id, ref.store, ref.host) == ("job.a.1.out", "shm", host_identity(SHM))
    assert ref.tensors == {"a": "float32[5,3]", "b": "bfloat16[]", "c": "bool[0,4]"}
    assert_same(shm.get(ref), tensors)
    assert [n.split(".")[1] for n in files(namespace)] == ["blob", "owner"]
    for name in files(namespace):
        assert stat.S_IMODE((SHM / name).stat().st_mode) == 0o600


def test_nothing_is_copied_when_reading(shm: ShmStore) -> None:
    ref = shm.put("job.a.1.out", make(1 << 20))
    view = shm.get(ref)["x"]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        if start <= view.data_ptr() < end:
            assert line.endswith(ref.id)
            assert line.split()[1] == "r--s"
            return
    pytest.fail("the view lies nowhere")


def test_views_stay_when_the_blob_is_deleted(shm: ShmStore) -> None:
    ref = shm.put("job.a.1.out", make())
    view = shm.get(ref)
    assert shm.delete(ref)
    assert not shm.delete(ref)
    with pytest.raises(BlobNotFound):
        shm.get(ref)
    assert_same(view, make())


def test_a_second_blob_of_one_id_leaves_views_of_the_first_alone(shm: ShmStore) -> None:
    old = shm.get(shm.put("job.a.1.out", make(seed=1)))
    ref = shm.put("job.a.1.out", make(seed=2))
    assert_same(old, make(seed=1))
    assert_same(shm.get(ref), make(seed=2))


def test_readers_see_whole_blobs_only(shm: ShmStore) -> None:
    """A reader that knows the reference beforehand polls until the blob is there."""
    first = shm.put("job.a.0.out", make(16 << 20))
    found: list[Tensors] = []

    def poll(ref: BlobRef) -> None:
        while not found:
            try:
                found.append(shm.get(ref))
            except BlobNotFound:
                continue

    for number in range(1, 6):
        found.clear()
        reader = threading.Thread(
            target=poll, args=(first.model_copy(update={"id": f"job.a.{number}.out"}),)
        )
        reader.start()
        shm.put(f"job.a.{number}.out", make(16 << 20))
        reader.join()
        assert_same(found[0], make(16 << 20))


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_file_of_another_length_is_corrupt(shm: ShmStore, namespace: str, size: int) -> None:
    ref = shm.put("job.a.1.out", make())
    path = next(SHM.glob(f"{namespace}.blob.*"))
    os.truncate(path, size)
    with pytest.raises(BlobCorrupt):
        shm.get(ref)
    path.unlink()  # own() does not list an empty one


def test_a_file_without_a_blob_is_corrupt(shm: ShmStore, namespace: str) -> None:
    ref = shm.put("job.a.1.out", make())
    next(SHM.glob(f"{namespace}.blob.*")).write_bytes(b"\xff" * ref.nbytes)
    with pytest.raises(BlobCorrupt):
        shm.get(ref)


@pytest.mark.parametrize(
    "place", [None, "", "../../etc", "1-abc", "1-0123456g", "1-01234567/../x", "1-01234567\n"]
)
def test_a_reference_never_leads_out_of_the_store(shm: ShmStore, place: str | None) -> None:
    ref = BlobRef(id="passwd", store="shm", host="h", nbytes=1, place=place)
    assert not shm.delete(ref)
    with pytest.raises(BlobNotFound):
        shm.get(ref)


@pytest.mark.parametrize("blob_id", ["", "../x", "a/b", "a b", "x" * 201])
def test_an_impossible_id_is_refused(shm: ShmStore, namespace: str, blob_id: str) -> None:
    with pytest.raises(ValueError, match="validation error"):
        shm.put(blob_id, make())
    assert not [n for n in files(namespace) if ".owner." not in n]


def test_the_longest_names_fit() -> None:
    namespace = "n" * 32
    store = ShmStore(SHM, namespace, "h", 1 << 20)
    ref = store.put("i" * 200, make())
    assert_same(store.get(ref), make())
    assert store.delete(ref)
    store.close()
    assert not files(namespace)


# -- several processes -----------------------------------------------------------------------------


def test_another_process_reads_and_leaves_the_blob_alone(shm: ShmStore, namespace: str) -> None:
    """No resource tracker of a reader that ends deletes what others still read."""
    ref = shm.put("job.a.1.out", make())
    for _ in range(2):
        out, _ = read_elsewhere(namespace, ref).communicate()
        assert int(out) == int(make()["x"].sum())
    assert_same(shm.get(ref), make())


def test_another_processes_view_survives_deletion(shm: ShmStore, namespace: str) -> None:
    ref = shm.put("job.a.1.out", make(1 << 20))
    reader = read_elsewhere(namespace, ref, "sys.stdin.read(); print(int(x.sum()))")
    assert reader.stdout is not None
    first = reader.stdout.readline()
    shm.delete(ref)
    again, _ = reader.communicate()
    assert int(first) == int(again) == int(make(1 << 20)["x"].sum())


def test_a_reader_cannot_change_a_blob(shm: ShmStore, namespace: str) -> None:
    ref = shm.put("job.a.1.out", make())
    reader = read_elsewhere(namespace, ref, "x.add_(1)")
    reader.communicate()
    assert reader.returncode == -signal.SIGSEGV
    assert_same(shm.get(ref), make())


def test_a_blob_can_be_deleted_by_another_process(
    shm: ShmStore, writers: Callable[..., Writer]
) -> None:
    writer = writers("job.a.1.x", then="sys.stdin.readline(); print(store.own(), flush=True);")
    (ref,) = writer.refs
    assert_same(shm.get(ref), make())
    assert shm.delete(ref)
    out, _ = writer.process.communicate("\n")
    assert out == "[]\n"


# -- sweeping --------------------------------------------------------------------------------------


def test_a_killed_owners_blobs_are_swept_unless_wanted(
    shm: ShmStore, namespace: str, writers: Callable[..., Writer]
) -> None:
    """Its own lock tells that it is dead; nothing is taken from it while it lives."""
    writer = writers("ended.a.1.x", "running.a.1.x")
    asked: list[str] = []
    assert shm.sweep(lambda blob_id: bool(asked.append(blob_id))) == 0
    assert not asked
    writer.kill()

    assert shm.sweep(lambda blob_id: blob_id.startswith("running.")) == 1
    ended, running = writer.refs
    with pytest.raises(BlobNotFound):
        shm.get(ended)
    assert_same(shm.get(running), make(seed=1))

    assert shm.sweep(nothing_wanted) == 1
    assert files(namespace) == []


def test_a_live_owners_blobs_are_never_swept(
    shm_stores: Stores, writers: Callable[..., Writer]
) -> None:
    """Neither another process's nor another store's of this process nor the sweeper's own."""
    mine, other = shm_stores(), shm_stores()
    refs = [mine.put("a.s.1.x", make()), other.put("b.s.1.x", make()), *writers("c.s.1.x").refs]
    assert mine.sweep(nothing_wanted) == 0
    for ref in refs:
        assert_same(mine.get(ref), make())


def test_what_a_killed_owner_was_writing_is_swept(
    shm: ShmStore, namespace: str, writers: Callable[..., Writer]
) -> None:
    hang = (
        "Path.rename = lambda *_: (print('written', flush=True), sys.stdin.read());"
        "store.put('job.a.1.y', make())"
    )
    writer = writers("job.a.1.x", then=hang)
    assert writer.line() == "written\n"
    assert [n.split(".")[1] for n in files(namespace)] == ["blob", "owner", "temp"]
    assert shm.sweep(nothing_wanted) == 0
    writer.kill()
    assert shm.sweep(lambda _: True) == 0
    assert [n.split(".")[1] for n in files(namespace)] == ["blob", "owner"]


def test_a_forked_child_neither_keeps_its_parent_alive_nor_writes_in_its_name(
    shm: ShmStore, namespace: str, writers: Callable[..., Writer]
) -> None:
    fork = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    assert store.own() == []\n"
        "    print(store.put('child.a.1.x', make(seed=9)).model_dump_json(), flush=True)\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "os.wait()\n"
    )
    writer = writers("parent.a.1.x", then=fork)
    child_ref = BlobRef.model_validate_json(writer.line())
    child = int(writer.line())
    os.kill(writer.process.pid, signal.SIGKILL)
    writer.process.wait()
    try:
        assert shm.sweep(nothing_wanted) == 1
        assert_same(shm.get(child_ref), make(seed=9))
        with pytest.raises(BlobNotFound):
            shm.get(writer.refs[0])
    finally:
        os.kill(child, signal.SIGKILL)


def test_closing_leaves_blobs_to_readers_and_to_the_sweep(
    shm: ShmStore, shm_stores: Stores, namespace: str
) -> None:
    store = shm_stores()
    ref = store.put("job.a.1.out", make())
    store.close()
    assert shm.sweep(lambda _: True) == 0
    assert_same(shm.get(ref), make())
    assert shm.sweep(nothing_wanted) == 1
    assert files(namespace) == []


def test_closing_leaves_nothing_when_there_is_no_blob(shm: ShmStore, namespace: str) -> None:
    shm.delete(shm.put("job.a.1.out", make()))
    shm.close()
    assert files(namespace) == []


def test_reading_makes_no_owner(shm: ShmStore, shm_stores: Stores, namespace: str) -> None:
    reader = shm_stores()
    reader.get(shm.put("job.a.1.out", make()))
    assert reader.own() == []
    assert len([n for n in files(namespace) if ".owner." in n]) == 1


def test_sweeping_keeps_to_its_namespace(shm_stores: Stores, namespace: str) -> None:
    longer = ShmStore(SHM, f"{namespace}-b", "h", 1 << 20)
    ref = longer.put("job.a.1.out", make())
    longer.close()
    assert shm_stores().sweep(nothing_wanted) == 0
    assert_same(longer.get(ref), make())
    assert longer.sweep(nothing_wanted) == 1


def test_many_sweeps_and_new_owners_at_once_do_not_disturb_each_other(
    shm_stores: Stores, namespace: str
) -> None:
    """Owners appear all the time while others sweep: no blob of a live owner is ever lost."""
    stop = threading.Event()

    def sweep_on(store: ShmStore) -> None:
        while not stop.is_set():
            store.sweep(nothing_wanted)

    def come_and_go(number: int) -> None:
        for turn in range(30):
            store = ShmStore(SHM, namespace, "h", 1 << 30)
            ref = store.put(f"job{number}.a.{turn}.x", make())
            assert_same(store.get(ref), make())
            assert store.delete(ref)
            store.close()

    with ThreadPoolExecutor(6) as pool:
        sweeps = [pool.submit(sweep_on, shm_stores()) for _ in range(2)]
        try:
            list(pool.map(come_and_go, range(4)))
        finally:
            stop.set()
        for sweep in sweeps:
            sweep.result()
    assert files(namespace) == []


# -- running full ----------------------------------------------------------------------------------


def test_the_cap_holds_for_all_owners_together(shm_stores: Stores, namespace: str) -> None:
    a, b = shm_stores(max_bytes=3 << 20), shm_stores(max_bytes=3 << 20)
    ref = a.put("job.a.1.x", make(2 << 20))
    with pytest.raises(StoreFull, match="shared memory is full"):
        b.put("job.b.1.x", make(2 << 20))
    assert not [n for n in files(namespace) if ".temp." in n]
    a.delete(ref)
    assert_same(b.get(b.put("job.b.1.x", make(2 << 20))), make(2 << 20))


def test_a_blob_larger_than_the_cap_is_too_large(shm_stores: Stores) -> None:
    with pytest.raises(BlobTooLarge):
        shm_stores(max_bytes=1 << 20).put("job.a.1.x", make(2 << 20))


def test_writers_at_the_same_time_do_not_exceed_the_cap(shm_stores: Stores, namespace: str) -> None:
    stores = [shm_stores(max_bytes=4 << 20) for _ in range(6)]

    def put(number: int) -> bool:
        try:
            stores[number % 6].put(f"job.a.{number}.x", make(1 << 20))
        except StoreFull:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        written = sum(pool.map(put, range(24)))
    assert 1 <= written <= 3
    assert sum((SHM / n).stat().st_size for n in files(namespace)) <= 4 << 20


def test_a_full_tmpfs_is_an_error_and_no_crash(shm_stores: Stores, tmp_path: Path) -> None:
    """A write beyond it through a mapping would be a SIGBUS; and what fits still fits."""
    with small_tmpfs(tmp_path / "shm") as folder:
        store = shm_stores(folder)
        with pytest.raises(StoreFull, match=os.strerror(errno.ENOSPC)):
            store.put("job.a.1.x", make(64 << 20))
        assert [p.name.split(".")[1] for p in folder.iterdir()] == ["owner"]
        ref = store.put("job.a.1.y", make(6 << 20))
        with pytest.raises(StoreFull):
            store.put("job.a.1.z", make(6 << 20))
        assert_same(store.get(ref), make(6 << 20))
        assert store.delete(ref)
        store.close()


def test_a_folder_that_is_gone_is_a_full_store(shm_stores: Stores, tmp_path: Path) -> None:
    (folder := tmp_path / "shm").mkdir()
    store = shm_stores(folder)
    folder.rmdir()
    with pytest.raises(StoreFull, match=re.escape(str(folder))):
        store.put("job.a.1.x", make())
    folder.mkdir()


def test_stats_count_all_owners_blobs(shm_stores: Stores) -> None:
    a, b = shm_stores(), shm_stores()
    refs = [a.put("job.a.1.x", make()), b.put("job.b.1.x", make())]
    assert a.stats() == {
        "blobs": 2,
        "bytes": sum(r.nbytes for r in refs),
        "max_bytes": 1 << 30,
    }
    assert [r.id for r in a.own()] == ["job.a.1.x"]

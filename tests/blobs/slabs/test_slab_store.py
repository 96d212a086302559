"""The slab store in one process: round trips, what views may do, caps, forks, upkeep."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from slab_players import SHM, filled, make_store, number_in

from omniq.blobs import codec
from omniq.blobs.base import BlobRef
from omniq.blobs.slabs import layout
from omniq.blobs.slabs.store import SlabStore
from omniq.blobs.slabs.sweep import blob_ids
from omniq.errors import BlobCorrupt, BlobError, BlobNotFound, BlobTooLarge, StoreFull

Make = Callable[..., SlabStore]


@pytest.fixture
def stores(namespace: str) -> Iterator[Make]:
    """Makes stores of one namespace; freed and closed at the end."""
    made: list[SlabStore] = []

    def make(*args: object, **kwargs: object) -> SlabStore:
        made.append(make_store(namespace, *args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for store in made:
        for ref in store.own():
            store.delete(ref)
        store.close()


@pytest.mark.parametrize("dtype", codec.dtypes().values(), ids=str)
def test_every_dtype_comes_back_bit_for_bit(stores: Make, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 64), dtype=torch.uint8)
    tensor = raw.view(dtype)
    writer, reader = stores(), stores()
    got = reader.get(writer.put("j.1", {"a": tensor, "b": tensor[:, ::2], "none": tensor[:0]}))
    assert got["a"].dtype is dtype
    for name, expected in (("a", tensor), ("b", tensor[:, ::2].contiguous()), ("none", tensor[:0])):
        assert got[name].shape == expected.shape
        assert torch.equal(got[name].view(torch.uint8), expected.view(torch.uint8))


def test_a_blob_without_tensors_is_a_blob(stores: Make) -> None:
    store = stores()
    assert store.get(store.put("j.1", {})) == {}


def test_a_reference_travels_as_json(stores: Make) -> None:
    ref = stores().put("j.1", filled(7, 4096))
    again = BlobRef.model_validate_json(ref.model_dump_json())
    assert again == ref
    assert stores().get(again)["x"].unique().tolist() == [7]


def test_tensors_lie_in_shared_memory(stores: Make, namespace: str) -> None:
    """Nothing is copied: the view's address is in a mapping of the extent."""
    tensor = stores().get(stores().put("j.1", filled(7, 1 << 20)))["x"]
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    [name] = [
        m[-1] for m in maps
        if int(m[0].split("-")[0], 16) <= tensor.data_ptr() < int(m[0].split("-")[1], 16)
    ]  # fmt: skip
    assert name.startswith(f"/dev/shm/{namespace}.slab.")


def test_writing_to_a_view_reaches_nobody(stores: Make) -> None:
    """Neither other readers nor the same process's next blob in that slot."""
    writer, careless, other = stores(), stores(), stores()
    ref = writer.put("j.1", filled(7, 1 << 20))
    mine, theirs = careless.get(ref)["x"], other.get(ref)["x"]
    mine.fill_(-1)
    assert theirs.unique().tolist() == [7]
    assert writer.get(ref)["x"].unique().tolist() == [7]
    del mine, theirs
    writer.delete(ref)
    again = writer.put("j.2", filled(8, 1 << 20))
    assert again.place.split(".")[:3] == ref.place.split(".")[:3], "the same slot"
    assert careless.get(again)["x"].unique().tolist() == [8]


def test_an_early_write_is_undone_when_a_later_view_dies(stores: Make) -> None:
    writer, reader = stores(), stores()
    ref = writer.put("j.1", filled(7, 1 << 20))
    first = reader.get(ref)["x"]
    first.fill_(-1)
    second = reader.get(ref)["x"]
    del first
    del second
    writer.delete(ref)
    assert reader.get(writer.put("j.2", filled(8, 1 << 20)))["x"].unique().tolist() == [8]


def test_the_buffer_is_read_only(stores: Make) -> None:
    store = stores()
    buffer = store.buffer(store.put("j.1", filled(7, 4096)))
    with pytest.raises(TypeError):
        buffer[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        np.frombuffer(buffer, np.uint8)[:] = 1


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t[5:6],
        lambda t: t.numpy()[3:],
        lambda t: t.view(torch.float64)[::7],
        lambda t: memoryview(t.numpy()),
        lambda t: torch.from_numpy(np.asarray(t.numpy())[1:]).view(-1),
    ],
    ids=["slice", "numpy", "other dtype", "memoryview", "there and back"],
)
def test_any_view_keeps_the_slot(stores: Make, keep: Callable[[torch.Tensor], object]) -> None:
    writer, reader = stores(), stores()
    ref = writer.put("j.1", filled(7, 1 << 16))
    view = keep(reader.get(ref)["x"])
    gc.collect()
    writer.delete(ref)
    other = writer.put("j.2", filled(8, 1 << 16))
    assert other.place.split(".")[2] != ref.place.split(".")[2]
    writer.delete(other)
    del view
    gc.collect()
    writer.sweep(lambda _: True)
    assert writer.stats()["own"]["freed_but_read"] == 0


def test_a_freed_blob_is_gone_for_new_readers_and_stays_for_old(stores: Make) -> None:
    writer, reader, third = stores(), stores(), stores()
    ref = writer.put("j.1", filled(7, 4096))
    tensor = reader.get(ref)["x"]
    assert third.delete(ref)
    assert not third.delete(ref)
    assert not writer.delete(ref)
    for store in (writer, reader, third):
        with pytest.raises(BlobNotFound):
            store.get(ref)
    assert writer.own() == []
    for number in range(8, 20):
        writer.delete(writer.put(f"j.{number}", filled(number, 4096)))
    assert tensor.unique().tolist() == [7]


@pytest.mark.parametrize(
    "place", [None, "", "nonsense", "../../x.0.0.1", "00ff.0.0.1", "00ff.-1.0.1"]
)
def test_a_reference_to_nowhere_is_not_found(stores: Make, place: str | None) -> None:
    ref = BlobRef(id="j.1", store="shm", nbytes=10, place=place)
    with pytest.raises(BlobNotFound):
        stores().get(ref)
    assert not stores().delete(ref)


@pytest.mark.parametrize("slot", [-1, 10**9])
def test_a_slot_outside_the_extent_is_not_found(stores: Make, slot: int) -> None:
    store = stores()
    ref = store.put("j.1", filled(7, 100))
    token, extent, _, generation = ref.place.split(".")
    wrong = ref.model_copy(update={"place": f"{token}.{extent}.{slot}.{generation}"})
    with pytest.raises(BlobNotFound):
        store.get(wrong)
    assert not stores().delete(wrong)


def test_a_wrong_length_is_corrupt(stores: Make) -> None:
    store = stores()
    ref = store.put("j.1", filled(7, 100))
    with pytest.raises(BlobCorrupt):
        store.get(ref.model_copy(update={"nbytes": ref.nbytes - 1}))
    assert store.stats()["reading"]["pinned"] == 0


def test_a_file_of_another_kind_is_corrupt(stores: Make, namespace: str) -> None:
    path = SHM / f"{namespace}.slab.00ff.0"
    path.write_bytes(b"\1" * 8192)
    try:
        with pytest.raises(BlobCorrupt):
            stores().get(BlobRef(id="j.1", store="shm", nbytes=10, place="00ff.0.0.1"))
    finally:
        path.unlink()


def test_a_tensor_that_cannot_be_stored_leaves_nothing(stores: Make) -> None:
    store = stores()
    with pytest.raises(BlobError):
        store.put("j.1", {"x": torch.zeros(3).to_sparse()})
    with pytest.raises(ValueError):
        store.put("not an id!", filled(1, 100))
    assert store.own() == []
    assert store.stats()["own"]["live"] == 0


@pytest.mark.parametrize("blob_id", ["", "../x", "a/b", "a b", "x" * 201])
def test_an_impossible_id_is_refused(stores: Make, blob_id: str) -> None:
    store = stores()
    with pytest.raises(ValueError, match="validation error"):
        store.put(blob_id, filled(1, 64))
    assert store.stats()["own"]["live"] == 0


def test_the_longest_names_fit() -> None:
    namespace = "n" * 32
    store = make_store(namespace)
    for nbytes in (8, layout.PAGE - 8, layout.PAGE, 1 << 20):
        ref = store.put("i" * 200, filled(7, nbytes))
        assert number_in(store.get(ref)["x"]) == 7
        assert [r.id for r in store.own()] == ["i" * 200]
        extents = [p for p in SHM.glob(f"{namespace}.*") if p.suffix != ".lock"]
        assert [blob for path in extents for blob in blob_ids(path)] == ["i" * 200]
        store.delete(ref)
    store.close()
    assert not list(SHM.glob(f"{namespace}.*"))


def test_sweeping_keeps_to_its_namespace(stores: Make, namespace: str) -> None:
    longer = make_store(f"{namespace}-b")
    ref = longer.put("j.1", filled(7, 64))
    longer.close()
    assert stores().sweep(lambda _: False) == 0
    assert number_in(longer.get(ref)["x"]) == 7
    assert longer.sweep(lambda _: False) == 1
    longer.close()


def test_upkeep_leaves_no_file_open(stores: Make, namespace: str) -> None:
    """Neither of live owners, nor of dead ones whose blobs are wanted, nor of what is deleted."""
    alive, dead, other = stores(), make_store(namespace), stores()
    refs = [store.put("j.1", filled(1, 4096)) for store in (alive, dead)]
    dead.close()

    def look_and_sweep(wanted: bool) -> int:
        for ref in refs:
            with contextlib.suppress(BlobNotFound):
                other.get(ref)
        other.sweep(lambda _: wanted)
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    opened = look_and_sweep(wanted=True)
    for _ in range(10):
        assert look_and_sweep(wanted=True) == opened
    look_and_sweep(wanted=False)
    assert look_and_sweep(wanted=False) == opened - 2, "the dead owner's extent is unmapped"


def test_many_sweeps_and_new_owners_at_once_do_not_disturb_each_other(
    stores: Make, namespace: str
) -> None:
    """Owners come and go while others sweep: no blob of a live owner is ever lost."""
    stop = threading.Event()

    def sweep_on(store: SlabStore) -> None:
        while not stop.is_set():
            store.sweep(lambda _: False)

    def come_and_go(number: int) -> None:
        for turn in range(30):
            store = make_store(namespace)
            ref = store.put(f"j{number}.{turn}", filled(turn, 4096))
            assert number_in(store.get(ref)["x"]) == turn
            assert store.delete(ref)
            store.close()

    with ThreadPoolExecutor(6) as pool:
        sweeps = [pool.submit(sweep_on, stores()) for _ in range(2)]
        try:
            list(pool.map(come_and_go, range(4)))
        finally:
            stop.set()
        for sweep in sweeps:
            sweep.result()
    assert not list(SHM.glob(f"{namespace}.*"))


def test_writers_at_the_same_time_do_not_exceed_the_cap(stores: Make, namespace: str) -> None:
    made = [stores(4 << 20) for _ in range(6)]

    def put(number: int) -> bool:
        try:
            made[number % 6].put(f"j.{number}", filled(number, 1 << 20))
        except StoreFull:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        written = sum(pool.map(put, range(24)))
    assert 1 <= written <= 3
    held = sum(p.stat().st_blocks * 512 for p in SHM.glob(f"{namespace}.*"))
    assert held <= (4 << 20) + 6 * layout.PAGE, "and the lock files"


def test_what_no_empty_store_could_take_is_too_large(stores: Make) -> None:
    with pytest.raises(BlobTooLarge):
        stores(1 << 20).put("j.1", filled(1, 2 << 20))


def test_a_small_tmpfs_gives_store_full_and_no_sigbus(namespace: str, tmp_path: Path) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", str(tmp_path)], capture_output=True,
        check=False,
    ).returncode:  # fmt: skip
        pytest.skip("needs the right to mount")
    try:
        store = make_store(namespace, folder=tmp_path)
        refs = []
        with pytest.raises(StoreFull, match="no room") as caught:
            for number in range(100):
                refs.append(store.put(f"j.{number}", filled(number, 1 << 20)))
        assert caught.value.hint
        del caught  # its traceback keeps what it names
        assert len(refs) >= 5
        for number, ref in enumerate(refs):
            assert store.get(ref)["x"].unique().tolist() == [number]
        store.delete(refs[0])
        refs[0] = store.put("j.0", filled(0, 1 << 20))
        for ref in refs:
            store.delete(ref)
        store.close()
        assert list(tmp_path.iterdir()) == []
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_an_unusable_folder_gives_store_full(namespace: str, tmp_path: Path) -> None:
    with pytest.raises(StoreFull):
        make_store(namespace, folder=tmp_path / "missing").put("j.1", filled(1, 10))


def test_idle_memory_goes_back(stores: Make, namespace: str) -> None:
    store = stores(idle=0.0)
    refs = [store.put(f"j.{n}", filled(n, size)) for n, size in enumerate([10, 1 << 16, 1 << 22])]
    for ref in refs:
        store.delete(ref)
    store.sweep(lambda _: True)
    assert [p.name.rpartition(".")[2] for p in SHM.glob(f"{namespace}.*")] == ["lock"]


def test_closing_leaves_live_blobs_for_readers_and_the_sweep(stores: Make, namespace: str) -> None:
    writer, reader = stores(), stores()
    kept = writer.put("j.1", filled(7, 4096))
    freed = writer.put("j.2", filled(8, 1 << 20))
    writer.delete(freed)
    writer.close()
    assert reader.get(kept)["x"].unique().tolist() == [7]
    asked: list[str] = []
    assert reader.sweep(lambda blob_id: asked.append(blob_id) or True) == 0
    assert asked == ["j.1"]
    tensor = reader.get(kept)["x"]
    assert reader.sweep(lambda blob_id: False) == 1
    assert not list(SHM.glob(f"{namespace}.*"))
    assert tensor.unique().tolist() == [7]


def test_a_store_works_on_after_close(stores: Make) -> None:
    store = stores()
    store.put("j.1", filled(7, 100))
    store.close()
    assert store.own() == []
    assert store.get(store.put("j.2", filled(8, 100)))["x"].unique().tolist() == [8]
    store.sweep(lambda _: False)


def test_a_freed_blob_of_a_dead_owner_is_swept_even_if_wanted(stores: Make) -> None:
    writer, other = stores(), stores()
    ref = writer.put("j.1", filled(7, 100))
    writer.close()
    assert other.delete(ref)
    asked: list[str] = []
    other.sweep(lambda blob_id: asked.append(blob_id) or True)
    assert asked == []


def test_a_living_owner_is_not_swept(stores: Make) -> None:
    writer, other = stores(), stores()
    ref = writer.put("j.1", filled(7, 100))
    assert other.sweep(lambda _: False) == 0
    assert writer.sweep(lambda _: False) == 0
    assert other.get(ref)["x"].unique().tolist() == [7]


def test_a_forked_child_neither_drops_pins_nor_owns(stores: Make, namespace: str) -> None:
    """The child of a fork starts anew; what it does with inherited views unpins nothing."""
    writer, reader = stores(), stores()
    ref = writer.put("j.1", filled(7, 4096))
    tensor = reader.get(ref)["x"]
    pid = os.fork()
    if pid == 0:  # a failure here must not run the rest of the tests a second time
        code = 1
        try:
            del tensor
            gc.collect()
            mine = writer.put("j.9", filled(9, 4096))
            assert mine.place.split(".")[0] != ref.place.split(".")[0]
            assert [r.id for r in writer.own()] == ["j.9"]
            reader.get(ref)["x"].fill_(5)  # a private copy, which goes with its only view
            gc.collect()
            assert reader.get(ref)["x"].unique().tolist() == [7]
            writer.delete(mine)
            writer.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    writer.delete(ref)
    other = writer.put("j.2", filled(8, 4096))
    assert tensor.unique().tolist() == [7]
    assert other.place.split(".")[2] != ref.place.split(".")[2]


def test_views_may_die_in_the_middle_of_anything(stores: Make) -> None:
    """A garbage collection can run at any allocation, also while the store's lock is held."""
    writer, reader = stores(), stores()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(200):
            ref = writer.put(f"j.{number}", filled(number, 1000))
            ring: list[object] = [reader.get(ref)]
            ring.append(ring)  # only the collector can free it
            del ring
            reader.get(ref)
            writer.delete(ref)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert reader.stats()["reading"]["pinned"] == 0
    assert writer.stats()["own"]["free"] > 0

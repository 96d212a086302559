"""The allocator and the readers against a model: any order of operations, real files."""

from __future__ import annotations

import gc
import secrets
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from omniq.blobs.slabs import layout
from omniq.blobs.slabs.allocator import Allocator
from omniq.blobs.slabs.layout import Names
from omniq.blobs.slabs.readers import Readers
from omniq.blobs.slabs.sweep import sweep
from omniq.errors import BlobNotFound, BlobTooLarge, StoreFull

SHM = Path("/dev/shm")
CAP = 4 << 20
PAGE = layout.PAGE


@pytest.fixture
def names(namespace: str) -> Names:
    return Names(SHM, namespace)


def put(allocator: Allocator, need: int, fill: int) -> str:
    slot = allocator.claim(layout.slot_bytes(need + layout.MAX_ID_BYTES))
    slot.view[:need] = bytes([fill]) * need
    place = slot.place
    allocator.publish(slot, need - 1, 0, id_of(place))
    return place


def id_of(place: str) -> str:
    """The blob's id in these tests, which the sweep sees."""
    return f"at.{place}"


def read(readers: Readers, place: str, length: int) -> memoryview:
    return memoryview(readers.open(place, length)[0]).cast("B")[:length]


def slot_of(place: str) -> str:
    return place.rpartition(".")[0]


def extent_of(place: str) -> str:
    return layout.parse_place(place)[0]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@given(st.integers(1, 1 << 40))
def test_slots_fit_in_whole_pages_and_waste_little(need: int) -> None:
    size = layout.slot_bytes(need)
    assert size >= need
    assert size % PAGE == 0
    assert size <= max(2 * PAGE, need * 1.25 + 2 * PAGE)


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_slot_sizes_grow_with_the_need(a: int, b: int) -> None:
    assert (layout.slot_bytes(a) <= layout.slot_bytes(b)) or a > b


@given(st.integers(0, 40))
def test_a_power_of_two_and_its_header_fit_the_same_slot(power: int) -> None:
    assert layout.slot_bytes((1 << power) + 300) <= (1 << power) + 2 * PAGE


def test_places_survive_text() -> None:
    assert layout.parse_place(layout.place_of("00ff.3", 7, 2**63)) == ("00ff.3", 7, 2**63)


@pytest.mark.parametrize("text", ["", "a.b.c", "t.1.x.1", "t.1.1.", "1"])
def test_nonsense_is_no_place(text: str) -> None:
    with pytest.raises(ValueError):
        layout.parse_place(text)


@pytest.mark.parametrize("name", ["", "a", "../x.1", "a/b.1", "a.lock", "a.1/../b", "a.1\n", "A.1"])
def test_no_extent_name_leads_out_of_the_folder(names: Names, name: str) -> None:
    with pytest.raises(ValueError):
        names.extent(name)


#: Mostly of two sizes, so that slots are reused, which is where things can go wrong.
NEEDS = st.one_of(
    st.sampled_from([100, 100, 3 * PAGE]), st.integers(2, 9 * PAGE), st.integers(2, CAP)
)


@dataclass
class Blob:
    """What the model knows of one blob. ``owner`` says which owner's, dead ones included."""

    place: str
    need: int
    fill: int
    owner: int


class SlabMachine(RuleBasedStateMachine):
    """Two owners that crash and come again, two readers, a small cap; a sweep like the workers'.

    Readers and owners have locks of their own, as other processes have. A crash closes an owner's
    files, as the kernel does; what it was writing stays half written.
    """

    blobs: Bundle[Blob] = Bundle("blobs")
    views: Bundle[int] = Bundle("views")

    def __init__(self) -> None:
        super().__init__()
        self.names = Names(SHM, f"test{secrets.token_hex(6)}")
        self.owners = {n: Allocator(self.names, CAP) for n in range(2)}
        self.next_owner = 2
        self.readers = [Readers(self.names, max_mapped=2), Readers(self.names)]
        #: Blobs that nobody freed, by place.
        self.live: dict[str, Blob] = {}
        self.held: dict[int, tuple[memoryview, Blob]] = {}
        self.next_view = 0

    def owner(self, number: int) -> int:
        return sorted(self.owners)[number]

    @rule(
        target=blobs,
        need=NEEDS,
        fill=st.integers(0, 255),
        by=st.integers(0, 1),
    )
    def put(self, need: int, fill: int, by: int) -> Blob:
        number = self.owner(by)
        try:
            place = put(self.owners[number], need, fill)
        except StoreFull:
            return Blob("none.0.0.1", need, fill, number)
        except BlobTooLarge:
            assert layout.slot_bytes(need + layout.MAX_ID_BYTES) + PAGE > CAP
            return Blob("none.0.0.1", need, fill, number)
        taken = {slot_of(p) for p in [*self.live, *(b.place for _, b in self.held.values())]}
        assert slot_of(place) not in taken
        self.live[place] = blob = Blob(place, need, fill, number)
        return blob

    @rule(need=st.integers(1, 5 * PAGE), by=st.integers(0, 1), then=st.sampled_from(["", "crash"]))
    def fail_to_write(self, need: int, by: int, then: str) -> None:
        number = self.owner(by)
        try:
            slot = self.owners[number].claim(layout.slot_bytes(need))
        except StoreFull:
            return
        slot.view[:need] = b"\xee" * need
        if then:
            del slot
            self.crash(by)
        else:
            self.owners[number].abandon(slot)

    @rule(by=st.integers(0, 1))
    def crash(self, by: int) -> None:
        number = self.owner(by)
        self.owners.pop(number).forget()  # closes its files, frees nothing
        self.owners[self.next_owner] = Allocator(self.names, CAP)
        self.next_owner += 1

    @rule(data=st.data())
    def sweep(self, data: st.DataObject) -> None:
        """Jobs of some blobs have ended; whatever dead owners keep for those alone goes."""
        dead = [b for b in self.live.values() if b.owner not in self.owners]
        extents = {extent_of(b.place) for b in dead}
        ended = {e for e in sorted(extents) if data.draw(st.booleans(), label=e)}
        asked: list[str] = []

        def wanted(blob_id: str) -> bool:
            asked.append(blob_id)
            return blob_id not in gone

        going = [b for b in dead if extent_of(b.place) in ended]
        gone = {id_of(b.place) for b in going}
        assert sweep(self.names, wanted) == len(going)
        assert set(asked) <= {id_of(b.place) for b in dead}, "asks for unfreed ones of the dead"
        for blob in going:
            del self.live[blob.place]
        left = {f"{token}.{part}" for token, parts in self.names.scan().items() for part in parts}
        assert not ended & left

    @rule(blob=blobs, by=st.integers(0, 2))
    def free(self, blob: Blob, by: int) -> None:
        """By a reader, or by its owner if that lives."""
        if by == 2 and blob.owner in self.owners:
            freed = self.owners[blob.owner].free(blob.place)
        else:
            freed = self.readers[by % 2].free(blob.place)
        known = self.live.pop(blob.place, None) is not None
        # What was swept may still lie in an extent that this reader has mapped.
        assert freed or not known
        assert not freed or known or blob.owner not in self.owners

    @rule(target=views, blob=blobs, by=st.integers(0, 1))
    def read_and_free(self, blob: Blob, by: int) -> int:
        """The life of most blobs: freed while the view is still used."""
        view = self.read(blob, by)
        if blob.place in self.live:
            self.free(blob, by)
        return view

    @rule(target=views, blob=blobs, by=st.integers(0, 1))
    def read(self, blob: Blob, by: int) -> int:
        self.next_view += 1
        if blob.place in self.live:
            self.held[self.next_view] = read(self.readers[by], blob.place, blob.need - 1), blob
        elif blob.owner in self.owners:
            with pytest.raises(BlobNotFound):
                self.readers[by].open(blob.place, blob.need - 1)
        return self.next_view

    @rule(view=consumes(views))
    def drop(self, view: int) -> None:
        self.held.pop(view, None)

    @rule(view=consumes(views))
    def scribble_and_drop(self, view: int) -> None:
        """A reader that writes into its view changes nobody's blob and no later one."""
        buffer, blob = self.held.pop(view, (memoryview(b""), None))
        if blob is None or any(b.place == blob.place for _, b in self.held.values()):
            return  # views of one blob in one process are one memory
        buffer[:] = bytes([blob.fill ^ 0xFF]) * len(buffer)

    @rule(idle=st.sampled_from([0.0, 1e9]))
    def tidy(self, idle: float) -> None:
        for allocator in self.owners.values():
            allocator.tidy(idle)
        for readers in self.readers:
            readers.tidy()

    @invariant()
    def views_do_not_change(self) -> None:
        for view, blob in self.held.values():
            assert view == bytes([blob.fill]) * len(view)

    @invariant()
    def live_blobs_are_whole(self) -> None:
        for place, blob in self.live.items():
            got = read(self.readers[0], place, blob.need - 1)
            assert got == bytes([blob.fill]) * (blob.need - 1)

    @invariant()
    def the_cap_holds(self) -> None:
        locks = sum("lock" in parts for parts in self.names.scan().values())
        assert self.names.bytes_held() <= CAP + locks * PAGE

    @invariant()
    def books_balance(self) -> None:
        for number, allocator in self.owners.items():
            stats = allocator.stats()
            slots = sum(len(e.slots) for e in allocator._extents.values())
            assert stats["live"] + stats["free"] + stats["freed_but_read"] == slots
            assert sum(e.busy for e in allocator._extents.values()) == slots - stats["free"]
            own = [b for b in self.live.values() if b.owner == number]
            assert len(allocator.live()) == len(own)

    def teardown(self) -> None:
        try:
            self.held.clear()
            for place in self.live:
                assert self.readers[1].free(place)
            for allocator in self.owners.values():
                allocator.tidy(0.0)
                assert allocator.stats()["bytes"] == 0, "all is freed and unread, and given back"
                allocator.close()
            assert sweep(self.names, lambda _: pytest.fail("all is freed")) == 0
            assert [r.stats()["pinned"] for r in self.readers] == [0, 0]
            for readers in self.readers:
                readers.close()
            assert self.names.scan() == {}
        finally:
            for path in SHM.glob(f"{self.names.namespace}.*"):
                path.unlink()


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_slot_reused_first_is_the_one_freed_last(names: Names) -> None:
    allocator = Allocator(names, CAP)
    places = [put(allocator, 1000, i) for i in range(4)]
    for place in (places[0], places[2], places[1]):
        allocator.free(place)
    again = [put(allocator, 1000, 9) for _ in range(3)]
    assert again == [f"{slot_of(places[i])}.2" for i in (1, 2, 0)]
    for place in (*again, places[3]):
        allocator.free(place)
    allocator.close()


def test_a_freed_slot_waits_for_its_readers(names: Names) -> None:
    allocator, readers = Allocator(names, CAP), Readers(names)
    place = put(allocator, CAP // 2, 7)
    view = read(readers, place, CAP // 2 - 1)
    assert allocator.free(place)
    with pytest.raises(StoreFull):
        put(allocator, CAP // 2, 8)
    assert view[:10] == b"\x07" * 10
    del view
    again = f"{slot_of(place)}.2"
    assert put(allocator, CAP // 2, 8) == again
    allocator.free(again)
    allocator.close()


def test_an_old_reference_frees_nothing_new(names: Names) -> None:
    allocator, readers = Allocator(names, CAP), Readers(names)
    old = put(allocator, 100, 1)
    assert readers.free(old)
    new = put(allocator, 100, 2)
    assert new == f"{slot_of(old)}.2"
    assert not readers.free(old)
    assert not allocator.free(old)
    with pytest.raises(BlobNotFound):
        readers.open(old, 99)
    assert read(readers, new, 99) == b"\x02" * 99
    allocator.free(new)
    allocator.close()


def test_deleted_extents_leave_the_reader_too(names: Names) -> None:
    """An unlinked file keeps its memory as long as anybody maps it."""
    allocator, readers = Allocator(names, CAP), Readers(names)
    place = put(allocator, 1 << 20, 1)
    view = read(readers, place, (1 << 20) - 1)
    allocator.free(place)
    allocator.close()
    gc.collect()
    fds = open_files()
    readers.tidy()
    assert view[:4] == b"\x01" * 4, "a view outlives its file"
    del view
    gc.collect()
    assert readers.stats() == {"mapped": 0, "mapped_bytes": 0, "pinned": 0}
    assert open_files() == fds - 2
    maps = Path("/proc/self/maps").read_text()
    assert names.namespace not in maps


def test_two_owners_share_the_cap(names: Names) -> None:
    one, two = Allocator(names, CAP), Allocator(names, CAP)
    place = put(one, CAP // 2, 1)
    with pytest.raises(StoreFull):
        put(two, CAP // 2, 2)
    one.free(place)
    with pytest.raises(StoreFull):
        put(two, CAP // 2, 2)
    one.tidy(0.0)
    two.free(put(two, CAP // 2, 2))
    one.close()
    two.close()


def test_memory_of_an_unused_size_serves_another(names: Names) -> None:
    allocator = Allocator(names, CAP)
    for need in (PAGE, 40 * PAGE, 300 * PAGE, CAP * 3 // 4, 2 * PAGE):
        allocator.free(put(allocator, need, 1))
    allocator.close()


def test_what_can_never_fit_is_refused_as_too_large(names: Names) -> None:
    allocator = Allocator(names, CAP)
    with pytest.raises(BlobTooLarge):
        allocator.claim(layout.slot_bytes(CAP + 1))
    allocator.close()

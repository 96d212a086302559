"""The reader's side: mapped extents, pins on slots, views that unpin when the last of them dies.

A *pin* is a shared lock on the byte of the extent whose number is the slot's
(:mod:`omniq.blobs.slabs.locks`). With the lock held the reader looks whether the slot still has
the generation that the reference names; from then on the owner leaves the slot alone. Every view
(torch, numpy, memoryview) keeps its *holder* alive, the ctypes array over the slot that
:meth:`Readers.open` made for one caller; when a holder dies, its pin goes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from omniq.blobs.slabs import layout, locks, memory
from omniq.blobs.slabs.layout import Names
from omniq.errors import BlobCorrupt, BlobError, BlobNotFound

#: The array over a slot that every view of its blob keeps alive.
Holder: TypeAlias = "ctypes.Array[ctypes.c_char]"

#: Mapped extents that are kept for the next blob; each costs up to three file descriptors.
MAX_MAPPED = 128


@dataclass(slots=True)
class _Mapped:
    """One extent in this process."""

    name: str
    fd: int
    map: mmap.mmap
    words: memoryview
    address: int
    data_start: int
    slot_bytes: int
    slots: int
    holder_type: type[Holder]
    #: Slot -> [pins, page faults of this process before the first of them]. Locks of one
    #: description do not count how often they were taken, so this does.
    pins: dict[int, list[int]] = field(default_factory=dict)
    #: Whether its pages were faulted in.
    populated: bool = False
    #: No longer kept for other blobs; its descriptors are closed with the last pin.
    retired: bool = False
    #: Of its owner's doorbell, from the first blob on that is freed here.
    bell_fd: int = -1

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.fd)
        if self.bell_fd >= 0:
            os.close(self.bell_fd)


#: What a dying holder leaves.
_Pin = tuple[_Mapped, int]


class Readers:
    """Reads and frees slots of any owner on this host; safe to use from any thread."""

    def __init__(self, names: Names, max_mapped: int = MAX_MAPPED) -> None:
        self._names, self._max_mapped = names, max_mapped
        self._lock = threading.Lock()
        self._mapped: OrderedDict[str, _Mapped] = OrderedDict()
        #: Page faults when a pin was last dropped: not more than when the next one is taken.
        self._faults = memory.page_faults()
        self._holders: dict[int, tuple[weakref.ref[Any], _Pin]] = {}  # by id of the weakref
        self._dropped: deque[_Pin] = deque()
        # Made once: a bound method made anew for every holder costs more than the call.
        self._on_death = self._holder_died

    # -- reading -----------------------------------------------------------------------------

    def open(self, place: str, length: int) -> tuple[Holder, int]:
        """Pin a blob; return its holder, and how many of the blob's first bytes are its header.

        The holder is an array over the slot, whose first ``length`` bytes are the blob. Whoever
        writes to it writes to private copies of its pages, which vanish with the last view.

        Raises:
            BlobNotFound: the blob is not (or no longer) there.
            BlobCorrupt: it has another length.
        """
        try:
            with self._lock:
                pin = mapped, slot = self._pin(place)
        finally:
            if self._dropped:
                self._drain()
        try:
            line = (1 + slot) * layout.WORDS_PER_LINE
            if mapped.words[line + layout.LENGTH] != length:
                raise BlobCorrupt(f"the blob at {place} has not the {length} bytes it should have")
            if not mapped.populated:  # whoever only frees need not wait for that
                memory.populate(mapped.map, memory.MADV_POPULATE_READ)
                mapped.populated = True
            start = mapped.data_start + slot * mapped.slot_bytes
            holder = mapped.holder_type.from_buffer(mapped.map, start)
            ref = weakref.ref(holder, self._on_death)
            self._holders[id(ref)] = ref, pin
        except BaseException:
            self._let_go(pin)
            raise
        return holder, mapped.words[line + layout.HEADER_LENGTH]

    def free(self, place: str) -> bool:
        """Mark another owner's blob as freed; False if it is not (any longer) there."""
        try:
            with self._lock:
                mapped, slot = self._pin(place)
                # The pin keeps the owner from going on to a later generation meanwhile, whose
                # FREED this write could otherwise undo.
                line = layout.line(slot)
                _store(mapped.fd, line + layout.FREED, mapped.words[line + layout.LIVE])
                self._unpin(mapped, slot, viewed=False)
                _store(mapped.fd, layout.WORD_BELL, _chime())
                self._ring(mapped)
        except BlobNotFound:
            return False
        finally:
            if self._dropped:
                self._drain()
        return True

    def _ring(self, mapped: _Mapped) -> None:
        if mapped.bell_fd < 0:
            lock = self._names.lock(mapped.name.partition(".")[0])
            try:
                mapped.bell_fd = os.open(lock, os.O_WRONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # the owner left; the sweep looks at FREED
                return
        _store(mapped.bell_fd, 0, _chime())

    # -- pins --------------------------------------------------------------------------------

    def _pin(self, place: str) -> _Pin:
        try:
            name, slot, generation = layout.parse_place(place)
        except ValueError:
            raise _not_found(place) from None
        mapped = self._mapped.get(name) or self._map(name)
        if not 0 <= slot < mapped.slots:
            raise _not_found(place)
        pins = mapped.pins.get(slot)
        if pins is not None:
            pins[0] += 1
        # The owner excludes readers only for the moment in which it takes a freed blob out.
        elif locks.take(mapped.fd, locks.SHARED, slot):
            mapped.pins[slot] = [1, self._faults]
        else:
            raise _not_found(place)
        line = (1 + slot) * layout.WORDS_PER_LINE
        words = mapped.words
        if words[line + layout.LIVE] != generation or words[line + layout.FREED] == generation:
            self._unpin(mapped, slot, viewed=False)
            raise _not_found(place)
        self._mapped.move_to_end(name)
        return mapped, slot

    def _unpin(self, mapped: _Mapped, slot: int, *, viewed: bool = True) -> None:
        pins = mapped.pins[slot]
        pins[0] -= 1
        if pins[0]:
            return
        del mapped.pins[slot]
        if viewed:
            # Each private copy was a page fault. A process that computes has others, one that only
            # copies to a device has none.
            self._faults = memory.page_faults()
            if self._faults != pins[1]:
                start = mapped.data_start + slot * mapped.slot_bytes
                try:
                    memory.drop_private_copies(mapped.map, mapped.address, start, mapped.slot_bytes)
                except OSError:  # such as memory that mlockall() holds: this mapping is spoilt
                    self._retire(mapped)
        locks.drop(mapped.fd, slot)
        if mapped.retired and not mapped.pins:
            mapped.close()

    def _holder_died(self, ref: weakref.ref[Any]) -> None:
        self._let_go(self._holders.pop(id(ref))[1])

    def _let_go(self, pin: _Pin) -> None:
        """Unpin, now or when whoever holds the lock lets it go.

        A garbage collection can run this in a thread that holds the lock, so it must not wait.
        """
        self._dropped.append(pin)
        self._drain()

    def _drain(self) -> None:
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                while self._dropped:
                    self._unpin(*self._dropped.popleft())
            finally:
                self._lock.release()

    # -- mapped extents ----------------------------------------------------------------------

    def _map(self, name: str) -> _Mapped:
        try:
            fd = os.open(self._names.extent(name), os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, ValueError):
            raise _not_found(name) from None
        except PermissionError as exc:
            raise BlobError(
                f"shared memory {name} belongs to another user: {exc}",
                hint="run all workers of one host as one user, or set OMNIQ_BLOB_STORE=redis",
            ) from exc
        try:
            size = os.fstat(fd).st_size
            flags = mmap.MAP_PRIVATE | memory.MAP_NORESERVE
            mapping = mmap.mmap(fd, size, flags=flags)
            words = memoryview(mapping).cast("Q")
            slot_bytes, slots = words[layout.WORD_SLOT_BYTES], words[layout.WORD_SLOTS]
            data_start = layout.header_bytes(slots)
            if (words[layout.WORD_MAGIC], data_start + slots * slot_bytes) != (layout.MAGIC, size):
                raise BlobCorrupt(f"{name} is not an extent of this version")
        except BaseException:
            os.close(fd)
            raise
        mapped = self._mapped[name] = _Mapped(
            name=name,
            fd=fd,
            map=mapping,
            words=words,
            address=memory.address(mapping),
            data_start=data_start,
            slot_bytes=slot_bytes,
            slots=slots,
            holder_type=ctypes.c_char * slot_bytes,
        )
        self._forget_oldest()
        return mapped

    def _retire(self, mapped: _Mapped) -> None:
        """Keep an extent no longer than its views need it."""
        if not mapped.retired:
            mapped.retired = True
            del self._mapped[mapped.name]

    def _unmap(self, mapped: _Mapped) -> None:
        if not mapped.pins:
            mapped.close()
        self._retire(mapped)

    def _forget_oldest(self) -> None:
        excess = len(self._mapped) - self._max_mapped
        for mapped in list(self._mapped.values())[: max(0, excess)]:
            self._unmap(mapped)

    def tidy(self) -> None:
        """Unmap extents that their owner deleted: their memory is free once no view is left."""
        with self._lock:
            for mapped in list(self._mapped.values()):
                if not os.fstat(mapped.fd).st_nlink:
                    self._unmap(mapped)
        self._drain()

    def stats(self) -> dict[str, Any]:
        """Mapped extents and their bytes, and pinned slots."""
        with self._lock:
            return {
                "mapped": len(self._mapped),
                "mapped_bytes": sum(len(m.map) for m in self._mapped.values()),
                "pinned": sum(len(m.pins) for m in self._mapped.values()),
            }

    def close(self) -> None:
        """Unmap what no view of this process needs; the rest goes with its views."""
        with self._lock:
            for mapped in list(self._mapped.values()):
                self._unmap(mapped)
        self._drain()

    def forget(self) -> None:
        """For a forked child, and for the end: let go of all pins without dropping them.

        Views that a child inherited stay as safe as the parent's own, no longer: the parent
        unpins when its views die.
        """
        self._lock = threading.Lock()  # another thread may have held it when the process forked
        self._dropped.clear()
        self._holders.clear()
        for mapped in self._mapped.values():
            mapped.close()
        self._mapped.clear()


def _store(fd: int, word: int, value: int) -> None:
    os.pwrite(fd, value.to_bytes(8, sys.byteorder), word * 8)


def _chime() -> int:
    """What a bell has not said before: of two who ring in the same nanosecond both have freed what
    they ring for already, so hearing one of them is enough.
    """
    return time.monotonic_ns()


def _not_found(place: str) -> BlobNotFound:
    return BlobNotFound(f"no blob at {place} in shared memory (any more)")

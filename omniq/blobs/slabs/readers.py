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
import secrets
import sys
import threading
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from omniq.blobs.slabs import layout, locks, memory
from omniq.blobs.slabs.layout import Names, Place
from omniq.errors import BlobCorrupt, BlobError, BlobNotFound

#: Mapped extents that are kept for the next blob; each costs two file descriptors.
MAX_MAPPED = 128


@dataclass(slots=True)
class _Mapped:
    """One extent in this process."""

    key: tuple[str, int]
    fd: int
    map: mmap.mmap
    words: memoryview
    address: int
    data_start: int
    slot_bytes: int
    slots: int
    holder_type: type[ctypes.Array[ctypes.c_char]]
    #: Slot -> [pins, page faults of this process before the first of them]. Locks of one
    #: description do not count how often they were taken, so this does.
    pins: dict[int, list[int]] = field(default_factory=dict)
    #: No longer kept for other blobs; its descriptor is closed with the last pin.
    retired: bool = False


#: What a dying holder leaves.
_Pin = tuple[_Mapped, int]


class Readers:
    """Reads and frees slots of any owner on this host; safe to use from any thread."""

    def __init__(self, names: Names, max_mapped: int = MAX_MAPPED) -> None:
        self._names, self._max_mapped = names, max_mapped
        self._lock = threading.Lock()
        self._mapped: OrderedDict[tuple[str, int], _Mapped] = OrderedDict()
        self._holders: dict[int, tuple[weakref.ref[Any], _Pin]] = {}  # by id of the weakref
        self._dropped: deque[_Pin] = deque()
        # Made once: a bound method made anew for every holder costs more than the call.
        self._on_death = self._holder_died

    # -- reading -----------------------------------------------------------------------------

    def open(self, place: Place, length: int) -> ctypes.Array[ctypes.c_char]:
        """Pin a blob and return its holder, an array over the slot: the first ``length`` bytes
        are the blob's.

        Whoever writes to it writes to private copies of its pages, which vanish with the holder.

        Raises:
            BlobNotFound: the blob is not (or no longer) there.
            BlobCorrupt: it has another length.
        """
        try:
            with self._lock:
                mapped = self._pin(place)
        finally:
            if self._dropped:
                self._drain()
        pin = (mapped, place.slot)
        try:
            if mapped.words[layout.line(place.slot) + layout.LENGTH] != length:
                raise BlobCorrupt(f"the blob at {place} has not the {length} bytes it should have")
            start = mapped.data_start + place.slot * mapped.slot_bytes
            holder = mapped.holder_type.from_buffer(mapped.map, start)
            ref = weakref.ref(holder, self._on_death)
            self._holders[id(ref)] = ref, pin
        except BaseException:
            self._let_go(pin)
            raise
        return holder

    def free(self, place: Place) -> bool:
        """Mark another owner's blob as freed; False if it is not (any longer) there."""
        try:
            with self._lock:
                mapped = self._pin(place)
                # The pin keeps the owner from going on to a later generation meanwhile, whose
                # FREED this write could otherwise undo.
                word = layout.line(place.slot) + layout.FREED
                _store(mapped.fd, word, place.generation)
                self._unpin(mapped, place.slot)
                _store(mapped.fd, layout.WORD_BELL, secrets.randbits(64))
        except BlobNotFound:
            return False
        finally:
            if self._dropped:
                self._drain()
        self._ring(place.token)
        return True

    def _ring(self, token: str) -> None:
        try:
            fd = os.open(self._names.lock(token), os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # the owner left; the sweep looks at FREED
            return
        try:
            _store(fd, 0, secrets.randbits(64))
        finally:
            os.close(fd)

    # -- pins --------------------------------------------------------------------------------

    def _pin(self, place: Place) -> _Mapped:
        mapped = self._find(place)
        pins = mapped.pins.get(place.slot)
        if pins is not None:
            pins[0] += 1
        # The owner excludes readers only for the moment in which it takes a freed blob out.
        elif locks.try_share(mapped.fd, place.slot):
            mapped.pins[place.slot] = [1, memory.page_faults()]
        else:
            raise _not_found(place)
        line = layout.line(place.slot)
        live, freed = mapped.words[line + layout.LIVE], mapped.words[line + layout.FREED]
        if live != place.generation or freed == place.generation:
            self._unpin(mapped, place.slot)
            raise _not_found(place)
        return mapped

    def _unpin(self, mapped: _Mapped, slot: int) -> None:
        pins = mapped.pins[slot]
        pins[0] -= 1
        if pins[0]:
            return
        del mapped.pins[slot]
        try:
            if memory.page_faults() != pins[1]:  # each private copy is one; often there is none
                start = mapped.data_start + slot * mapped.slot_bytes
                memory.drop_private_copies(mapped.map, mapped.address, start, mapped.slot_bytes)
        except OSError:  # such as memory that mlockall() holds: this mapping shows no other blob
            self._retire(mapped)
        locks.unlock(mapped.fd, slot)
        if mapped.retired and not mapped.pins:
            os.close(mapped.fd)

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

    def _find(self, place: Place) -> _Mapped:
        key = place.token, place.extent
        mapped = self._mapped.get(key)
        if mapped is None:
            mapped = self._mapped[key] = self._map(place)
            self._forget_oldest()
        else:
            self._mapped.move_to_end(key)
        if not 0 <= place.slot < mapped.slots:
            raise _not_found(place)
        return mapped

    def _map(self, place: Place) -> _Mapped:
        try:
            fd = os.open(self._names.extent(place.token, place.extent), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _not_found(place) from None
        except PermissionError as exc:
            raise BlobError(
                f"the blob at {place} belongs to another user: {exc}",
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
                raise BlobCorrupt(f"{place.token}.{place.extent} is not an extent of this version")
            memory.populate(mapping, memory.MADV_POPULATE_READ)
        except BaseException:
            os.close(fd)
            raise
        return _Mapped(
            key=(place.token, place.extent),
            fd=fd,
            map=mapping,
            words=words,
            address=memory.address(mapping),
            data_start=data_start,
            slot_bytes=slot_bytes,
            slots=slots,
            holder_type=ctypes.c_char * slot_bytes,
        )

    def _retire(self, mapped: _Mapped) -> None:
        """Keep an extent no longer than its views need it."""
        if not mapped.retired:
            mapped.retired = True
            del self._mapped[mapped.key]

    def _unmap(self, mapped: _Mapped) -> None:
        if not mapped.pins:
            os.close(mapped.fd)
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
        """For a forked child: let go of the parent's pins without dropping them.

        Views that the child inherited stay as safe as the parent's own, no longer: the parent
        unpins when its views die.
        """
        self._lock = threading.Lock()  # another thread may have held it when the process forked
        self._dropped.clear()
        self._holders.clear()
        for mapped in self._mapped.values():
            os.close(mapped.fd)
        self._mapped.clear()


def _store(fd: int, word: int, value: int) -> None:
    os.pwrite(fd, value.to_bytes(8, sys.byteorder), word * 8)


def _not_found(place: Place) -> BlobNotFound:
    return BlobNotFound(f"no blob at {place} in shared memory (any more)")

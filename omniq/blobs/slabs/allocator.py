"""Who has which slot: free lists by size, growth within the cap, recycling, shrinking.

A slot goes free -> claimed (being written) -> live -> freed -> free again. *Freed* slots that a
reader still has pinned wait; the owner asks for them again when it needs one of their size and at
every :meth:`Allocator.tidy`. Free lists are last-in-first-out: the slot reused first is the one
whose pages are still in the caches.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from omniq.blobs.slabs import layout
from omniq.blobs.slabs.layout import Names
from omniq.blobs.slabs.owner import Extent, OwnerLock, Slot
from omniq.errors import BlobTooLarge, StoreFull

#: So many live slots are looked at one by one, more of them by numpy.
_FEW = 32
#: A free slot up to so many times the fitting size is used before a blob is refused for the cap.
_BORROW_UP_TO = 4


class Allocator:
    """One owner's slots; safe to use from any thread.

    Args:
        names: where the files lie.
        max_bytes: what all owners of the namespace together may hold, in bytes.
        held: says what they hold now.
    """

    def __init__(self, names: Names, max_bytes: int, held: Callable[[], int] | None = None) -> None:
        self._names, self._max_bytes = names, max_bytes
        self._held = held or names.bytes_held
        self._lock = threading.Lock()
        self._owner: OwnerLock | None = None
        #: Its first word changes whenever another process has freed something of this owner's.
        self._bell: Sequence[int] = (0,)
        self._bell_heard = 0
        self._next_number = 0
        self._extents: dict[str, Extent] = {}
        self._free: defaultdict[int, list[Slot]] = defaultdict(list)
        self._waiting: defaultdict[int, list[Slot]] = defaultdict(list)
        self._live: dict[str, Slot] = {}  # by place

    # -- the life of a slot ------------------------------------------------------------------

    def claim(self, size: int) -> Slot:
        """A slot for the caller to write, and to publish or abandon.

        Args:
            size: its bytes, as :func:`layout.slot_bytes` says; it may get a larger one.

        Raises:
            BlobTooLarge: no empty store could take it.
            StoreFull: no room now.
        """
        with self._lock:
            if self._bell[0] != self._bell_heard:
                self._collect()
            free = self._free[size]
            slot = free.pop() if free else self._find(size)
            slot.extent.busy += 1
            return slot

    def publish(self, slot: Slot, length: int, header_length: int, blob_id: str) -> None:
        """Make a written slot readable; :mod:`omniq.blobs.slabs.layout` explains the lengths."""
        slot.publish(length, header_length, blob_id)
        self._live[slot.place] = slot  # in one step: needs no lock if all iterate over copies

    def abandon(self, slot: Slot) -> None:
        """Give back a claimed slot that was not published."""
        with self._lock:
            self._to_free(slot)

    def free(self, place: str) -> bool:
        """Free an own blob; False if there is none (any longer)."""
        with self._lock:
            slot = self._live.get(place)
            if slot is None or slot.freed:
                return False
            slot.free()
            self._retire(slot)
            return True

    def _retire(self, slot: Slot) -> None:
        """Move a live, freed slot on."""
        del self._live[slot.place]
        if slot.retire():
            self._to_free(slot)
        else:
            self._waiting[slot.extent.slot_bytes].append(slot)

    def _to_free(self, slot: Slot) -> None:
        slot.renew()
        slot.extent.busy -= 1
        slot.extent.used = time.monotonic()
        self._free[slot.extent.slot_bytes].append(slot)

    # -- finding room ------------------------------------------------------------------------

    def _collect(self) -> None:
        """Notice what other processes have freed."""
        self._bell_heard = self._bell[0]
        if len(self._live) <= _FEW:
            for slot in list(self._live.values()):
                if slot.freed:
                    self._retire(slot)
            return
        for extent in self._extents.values():
            if (rung := extent.bell()) != extent.bell_heard:
                extent.bell_heard = rung
                self._collect_from(extent)

    def _collect_from(self, extent: Extent) -> None:
        for index in extent.freed_slots():
            slot = self._live.get(extent.slots[index].place)
            if slot is not None:  # else it waits for its readers already
                self._retire(slot)

    def _recycle(self, size: int) -> None:
        """Move the waiting slots of a size that nobody has pinned any more to the free list."""
        waiting, self._waiting[size] = self._waiting[size], []
        for slot in waiting:
            if slot.retire():
                self._to_free(slot)
            else:
                self._waiting[size].append(slot)

    def _find(self, size: int) -> Slot:
        """A slot of ``size`` when none is on the free list: cheapest way first."""
        self._recycle(size)
        if self._free[size] or self._try_grow(size):
            return self._free[size].pop()
        for other in sorted(self._free):
            if self._free[other] and size < other <= _BORROW_UP_TO * size:
                return self._free[other].pop()
        for other in list(self._waiting):
            self._recycle(other)
        self._drop(lambda extent: True)
        self._grow(size, slots=1)
        return self._free[size].pop()

    def _try_grow(self, size: int) -> bool:
        """Add an extent for ``size``, as large as the class has become or as small as can be."""
        held = sum(e.size for e in self._extents.values() if e.slot_bytes == size)
        for slots in sorted({layout.slots_per_extent(size, held), 1}, reverse=True):
            try:
                self._grow(size, slots)
                return True
            except StoreFull:
                continue
        return False

    def _grow(self, size: int, slots: int) -> None:
        """Add an extent of so many slots.

        Raises:
            BlobTooLarge: the cap does not allow a slot of this size.
            StoreFull: the cap, or the system, has no room for it now.
        """
        if size + layout.header_bytes(1) > self._max_bytes:
            raise BlobTooLarge(
                f"a blob of this size takes {size} bytes of shared memory, "
                f"of which OMNIQ_SHM_MAX_BYTES allows {self._max_bytes}"
            )
        more = layout.header_bytes(slots) + slots * size
        try:
            self._check_cap(more)
            if self._owner is None:
                self._owner = OwnerLock(self._names)
                self._bell = self._owner.bell
            extent = Extent(self._names, self._owner.token, self._next_number, size, slots)
        except OSError as exc:  # such as too many open files, or a folder of another user
            raise StoreFull(
                f"no more shared memory in {self._names.folder}: {exc}",
                hint=f"check {self._names.folder}, or set OMNIQ_BLOB_STORE=redis",
            ) from exc
        finally:
            self._next_number += 1
        try:
            self._check_cap(0)  # another owner may have grown at the same time: then both step back
        except StoreFull:
            extent.remove()
            raise
        self._extents[extent.name] = extent
        self._free[size].extend(reversed(extent.slots))

    def _check_cap(self, more: int) -> None:
        held = self._held()
        if held + more > self._max_bytes:
            raise StoreFull(
                f"shared memory is full: {held} of {self._max_bytes} bytes are held",
                hint="raise OMNIQ_SHM_MAX_BYTES, or let fewer jobs run at a time",
            )

    def _drop(self, which: Callable[[Extent], bool]) -> int:
        """Delete extents that are wholly free and that ``which`` agrees to; returns their bytes."""
        gone = {n: e for n, e in self._extents.items() if not e.busy and which(e)}
        for size in {e.slot_bytes for e in gone.values()}:
            self._free[size] = [s for s in self._free[size] if s.extent.name not in gone]
        for name, extent in gone.items():
            del self._extents[name]
            extent.remove()
        return sum(e.size for e in gone.values())

    # -- upkeep ------------------------------------------------------------------------------

    def tidy(self, idle: float) -> int:
        """Recycle all that can be, give extents unused for ``idle`` seconds back to the system.

        Returns:
            The bytes given back.
        """
        with self._lock:
            for extent in self._extents.values():
                self._collect_from(extent)
            for size in list(self._waiting):
                self._recycle(size)
            before = time.monotonic() - idle
            return self._drop(lambda extent: extent.used <= before)

    def live(self) -> list[tuple[str, str, int]]:
        """Id, place and length of each own blob that nobody freed."""
        with self._lock:
            slots = [s for s in list(self._live.values()) if not s.freed]
            return [(s.blob_id, s.place, s.length) for s in slots]

    def stats(self) -> dict[str, Any]:
        """Extents, their bytes and those of slots that are not free, and slots by state."""
        with self._lock:
            return {
                "extents": len(self._extents),
                "bytes": sum(e.size for e in self._extents.values()),
                "used_bytes": sum(e.busy * e.slot_bytes for e in self._extents.values()),
                "live": len(self._live),
                "freed_but_read": sum(map(len, self._waiting.values())),
                "free": sum(map(len, self._free.values())),
            }

    def close(self) -> None:
        """Leave: delete what holds no live blob; the rest stays for readers and for the sweep."""
        self.tidy(idle=0.0)
        with self._lock:
            if self._owner is None:
                return
            needed = {slot.extent.name for slot in list(self._live.values())}
            for name, extent in self._extents.items():
                if name in needed:
                    extent.close()
                else:
                    extent.remove()
            if needed:
                self._owner.forget()
            else:
                self._owner.remove()
            self._reset()

    def forget(self) -> None:
        """For a forked child: let go of what is the parent's, without touching it."""
        self._lock = threading.Lock()  # another thread may have held it when the process forked
        for extent in self._extents.values():
            extent.forget()
        if self._owner is not None:
            self._owner.forget()
        self._reset()

    def _reset(self) -> None:
        self._owner, self._bell, self._bell_heard, self._next_number = None, (0,), 0, 0
        self._extents.clear()
        self._free.clear()
        self._waiting.clear()
        self._live.clear()

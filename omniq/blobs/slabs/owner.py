"""The owner's side of shared memory: its lock file and its extents."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from omniq.blobs.slabs import layout, locks, memory
from omniq.blobs.slabs.layout import Names
from omniq.errors import StoreFull


class OwnerLock:
    """The file whose lock says that this owner lives, and whose first word is its doorbell."""

    def __init__(self, names: Names) -> None:
        while True:
            self.token = layout.new_token()
            self.path = names.lock(self.token)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # A sweep may take the file for a dead owner's before it is locked: then start over.
                if locks.try_flock(self._fd) and os.fstat(self._fd).st_nlink:
                    memory.reserve(self._fd, layout.PAGE)
                    self._map = mmap.mmap(self._fd, layout.PAGE)
                    self.bell = memoryview(self._map).cast("Q")
                    return
            except StoreFull:
                self.remove()
                raise
            os.close(self._fd)

    def forget(self) -> None:
        """Close the file, which unlocks it unless a parent or child process holds it too."""
        os.close(self._fd)

    def remove(self) -> None:
        """Delete the file and close it; for an owner that leaves nothing."""
        Path(self.path).unlink(missing_ok=True)
        self.forget()


class Slot:
    """One slot as its owner knows it; made once and reused."""

    __slots__ = ("_line", "address", "blob_id", "extent", "generation", "index", "place", "view")

    def __init__(self, extent: Extent, index: int) -> None:
        self.extent, self.index = extent, index
        self._line = layout.line(index)
        start = extent.data_start + index * extent.slot_bytes
        self.view = extent.buffer[start : start + extent.slot_bytes]
        self.address = extent.address + start
        self.generation = 0
        self.blob_id = ""
        self.renew()

    def renew(self) -> None:
        """Get ready for the next blob, which lies at a place of its own."""
        self.generation += 1
        self.place = layout.place_of(self.extent.name, self.index, self.generation)

    def publish(self, length: int, header_length: int, blob_id: str) -> None:
        """Make the blob that was written to ``view`` readable."""
        name = blob_id.encode("ascii")
        self.view[length : length + len(name)] = name
        words, line = self.extent.words, self._line
        words[line + layout.LENGTH] = length
        words[line + layout.HEADER_LENGTH] = header_length
        words[line + layout.ID_LENGTH] = len(name)
        words[line + layout.LIVE] = self.generation
        self.blob_id = blob_id

    @property
    def length(self) -> int:
        """Bytes of the slot's present blob."""
        return self.extent.words[self._line + layout.LENGTH]

    @property
    def freed(self) -> bool:
        """Whether anybody freed the slot's present blob."""
        return self.extent.words[self._line + layout.FREED] == self.generation

    def free(self) -> None:
        """Let no new reader in."""
        self.extent.words[self._line + layout.FREED] = self.generation

    def retire(self) -> bool:
        """Take the freed blob out for good; False while a reader has it pinned.

        The lock excludes a reader that pinned the slot and has not yet looked at ``LIVE``; one
        that comes later finds no blob.
        """
        fd = self.extent.fd
        if not locks.take(fd, locks.EXCLUSIVE, self.index):
            return False
        self.extent.words[self._line + layout.LIVE] = 0
        locks.drop(fd, self.index)
        self.blob_id = ""
        return True


class Extent:
    """A file of equal slots, reserved and faulted in when it is made.

    ``busy`` counts slots that are not on a free list; ``used`` is when one last came back to it.

    Raises:
        StoreFull: tmpfs has no room.
    """

    def __init__(self, names: Names, token: str, number: int, slot_bytes: int, slots: int) -> None:
        import numpy as np  # noqa: PLC0415 - to import the package needs none

        self.name, self.slot_bytes = f"{token}.{number}", slot_bytes
        self.path = names.extent(self.name)
        self.data_start = layout.header_bytes(slots)
        self.size = self.data_start + slots * slot_bytes
        self.slots: list[Slot] = []
        #: Ends what :mod:`omniq.blobs.slabs.device` did to the memory; None if it did nothing.
        self.unregister: Callable[[], object] | None = None
        self.busy, self.used, self.bell_heard = 0, time.monotonic(), 0
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            memory.reserve(self.fd, self.size)
            self.map = mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED)
            memory.populate(self.map, memory.MADV_POPULATE_WRITE)
        except BaseException:
            self.remove()
            raise
        self.address = memory.address(self.map)
        self.buffer = memoryview(self.map)
        self.words = self.buffer.cast("Q")
        self._lines = np.frombuffer(self.map, np.uint64, (1 + slots) * layout.WORDS_PER_LINE)
        self._lines = self._lines.reshape(1 + slots, layout.WORDS_PER_LINE)[1:]
        self.words[layout.WORD_SLOT_BYTES] = slot_bytes
        self.words[layout.WORD_SLOTS] = slots
        self.words[layout.WORD_MAGIC] = layout.MAGIC
        self.slots.extend(Slot(self, index) for index in range(slots))

    def bell(self) -> int:
        """Changes whenever another process has freed a slot of this extent."""
        return self.words[layout.WORD_BELL]

    def freed_slots(self) -> list[int]:
        """Indices of the slots whose blob was freed and not yet taken out."""
        live, freed = self._lines[:, layout.LIVE], self._lines[:, layout.FREED]
        found: list[int] = ((live == freed) & (live != 0)).nonzero()[0].tolist()
        return found

    def close(self) -> None:
        """Let go of the extent; its file stays."""
        if self.unregister is not None:
            self.unregister()
        self.forget()

    def forget(self) -> None:
        """Close the file and let go of the slots: the memory map goes with its last view."""
        os.close(self.fd)
        self.slots.clear()  # slot -> extent -> slot would keep the map until a garbage collection

    def remove(self) -> None:
        """Delete the file and close it; its memory is free once nobody maps it."""
        Path(self.path).unlink(missing_ok=True)
        self.close()

"""The shared-memory blob store: one copy in, none out, into memory that is reused and warm."""

from __future__ import annotations

import atexit
import fcntl
import os
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniq.blobs.base import BlobRef, BlobStore
from omniq.blobs.slabs.allocator import Allocator
from omniq.blobs.slabs.layout import Names
from omniq.blobs.slabs.readers import Readers
from omniq.blobs.slabs.sweep import sweep

if TYPE_CHECKING:
    import torch

    from omniq.blobs.slabs.forms import Forms, Views

#: Extents unused for so many seconds go back to the system.
IDLE_SECONDS = 30.0


class SlabStore(BlobStore):
    """Blobs in the shared memory of this host, written by one process and mapped by the others.

    Tensors that :meth:`get` returns lie in shared memory and keep their slot from being reused
    while any view of them lives. Writing to them changes private copies of the pages written to,
    never the blob.

    Args:
        folder: a tmpfs, such as ``/dev/shm``.
        namespace: whose blobs these are.
        host: identity of this machine and its ``folder``, noted in references.
        max_bytes: most bytes all processes of the namespace may hold on this host.
        idle_seconds: unused memory goes back to the system after so long.
    """

    name = "shm"

    def __init__(
        self,
        folder: Path,
        namespace: str,
        host: str,
        max_bytes: int,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._names, self._host, self._idle = Names(folder, namespace), host, idle_seconds
        self._max_bytes = max_bytes
        self._allocator = Allocator(self._names, max_bytes)
        self._readers = Readers(self._names)
        _stores.add(self)

    def put(self, blob_id: str, tensors: Mapping[str, torch.Tensor]) -> BlobRef:
        """Write once; tensors on a device are copied straight into shared memory.

        Raises:
            BlobTooLarge: larger than all shared memory that the namespace may hold.
            StoreFull: no room now.
        """
        form = self._forms.of(tensors)
        slot = self._allocator.claim(form.slot_bytes)
        try:
            form.write(tensors, slot)
            ref = BlobRef.from_fields(
                {
                    "id": blob_id,
                    "store": "shm",
                    "host": self._host,
                    "nbytes": form.nbytes,
                    "place": slot.place,
                    "tensors": form.described,
                }
            )
        except BaseException:
            self._allocator.abandon(slot)
            raise
        self._allocator.publish(slot, form.nbytes, form.header_bytes, blob_id)
        return ref

    def get(self, ref: BlobRef) -> dict[str, torch.Tensor]:
        """Map a blob; see the class for what its tensors are.

        Raises:
            BlobNotFound: freed, or its owner died and its job ended.
            BlobCorrupt: length or header do not fit.
        """
        holder, header_bytes = self._readers.open(ref.place or "", ref.nbytes)
        return self._views.tensors(holder, header_bytes, ref.nbytes)

    def buffer(self, ref: BlobRef) -> memoryview:
        """The bytes of a blob where they lie, read-only; they stay while the view lives.

        Raises:
            BlobNotFound, BlobCorrupt: as :meth:`get`.
        """
        holder, _ = self._readers.open(ref.place or "", ref.nbytes)
        return memoryview(holder).cast("B")[: ref.nbytes].toreadonly()

    @cached_property
    def _forms(self) -> Forms:
        from omniq.blobs.slabs.forms import Forms  # noqa: PLC0415 - imports torch

        return Forms()

    @cached_property
    def _views(self) -> Views:
        from omniq.blobs.slabs.forms import Views  # noqa: PLC0415 - imports torch

        return Views()

    def delete(self, ref: BlobRef) -> bool:
        """Free a blob of any process; its slot is reused once nobody reads it."""
        return self.free(ref.place or "")

    def free(self, place: str) -> bool:
        """As :meth:`delete`, of the blob at ``place``."""
        return self._allocator.free(place) or self._readers.free(place)

    def own(self) -> list[BlobRef]:
        """References to the blobs that this process wrote and nobody freed."""
        return [
            BlobRef(id=blob_id, store=self.name, host=self._host, nbytes=nbytes, place=place)
            for blob_id, place, nbytes in self._allocator.live()
        ]

    def sweep(self, wanted: Callable[[str], bool]) -> int:
        """Upkeep, for a timer: recycle, give idle memory back, delete what dead processes left.

        Args:
            wanted: says of a blob id whether an unfinished job may still read the blob.

        Returns:
            How many blobs of dead processes were deleted.
        """
        self._allocator.tidy(self._idle)
        self._readers.tidy()
        return sweep(self._names, wanted)

    def close(self) -> None:
        """Let go of memory that holds no blob; blobs stay until they are freed and swept."""
        self._allocator.close()
        self._readers.close()

    def stats(self) -> dict[str, Any]:
        """Own blobs, the bytes and cap of the namespace on this host, own slots, what is mapped."""
        own = self._allocator.stats()
        return {
            "blobs": own["live"],
            "bytes": self._names.bytes_held(),
            "max_bytes": self._max_bytes,
            "own": own,
            "reading": self._readers.stats(),
        }

    def _forget(self) -> None:
        self._allocator.forget()
        self._readers.forget()


def available(folder: Path) -> bool:
    """Whether a store can work in ``folder`` on this system."""
    system = hasattr(os, "posix_fallocate") and hasattr(fcntl, "F_OFD_SETLK")
    return system and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


_stores: weakref.WeakSet[SlabStore] = weakref.WeakSet()


def _in_forked_child() -> None:
    """Have a forked child start with nothing: locks and pins are its parent's."""
    for store in list(_stores):
        store._forget()


def _at_exit() -> None:
    """Have views that die after this, with the modules around them, do nothing."""
    for store in list(_stores):
        store._readers.forget()


os.register_at_fork(after_in_child=_in_forked_child)
atexit.register(_at_exit)

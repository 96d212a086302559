"""Shared memory that is written once, mapped without copying, and reused while it is warm.

Which process may touch what, and why nothing here needs an atomic read-modify-write:

- A *slot* belongs to the process that made its extent (the *owner*). Only the owner gives it a new
  blob; each blob in it has a *generation*, which references carry.
- A reader *pins* a slot by a shared lock on one byte of the file (an open file description lock),
  and then looks whether the slot still holds the generation it was told. The owner takes a blob out
  under the exclusive lock of that byte, so it can never do so between a reader's pin and its look.
  Counters in shared memory would need atomic instructions, which Python does not have, and would
  stay wrong when a reader is killed; the kernel's locks need none and end with their holder.
  Pinning and unpinning are two system calls, 1.3 µs together. Such a lock is held or not held by
  a process, so each process counts its own views.
- Anybody may *free* a blob: it writes the blob's generation into the slot's FREED word, which never
  goes back for that generation, and rings the owner's doorbell. Then no new reader gets in, and the
  owner reuses the slot once it is not pinned. The writer holds a pin meanwhile, so it cannot hit a
  later generation.
- An owner is alive while its lock file is locked. What a dead owner left is deleted by
  :mod:`omniq.blobs.slabs.sweep` once no unfinished job wants it; readers keep what they mapped.

Memory is reserved by ``posix_fallocate`` before it is touched, so a full tmpfs is an error and not
a SIGBUS.
"""

from __future__ import annotations

from omniq.blobs.slabs.store import SlabStore, available

__all__ = ["SlabStore", "available"]

"""Deleting what dead owners left: crashed ones, and ones that closed while blobs were in use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from omniq.blobs.slabs import layout, locks
from omniq.blobs.slabs.layout import Names


def sweep(names: Names, wanted: Callable[[str], bool]) -> int:
    """Delete the extents of dead owners in which no blob is wanted.

    ``wanted`` is asked with a blob id. Freed blobs are not asked for. Who still has a deleted
    extent mapped keeps it. Several sweeps at a time do not disturb each other.

    Returns:
        How many blobs were deleted that nobody had freed.
    """
    return sum(_sweep_owner(names, token, parts, wanted) for token, parts in names.scan().items())


def _sweep_owner(names: Names, token: str, parts: list[str], wanted: Callable[[str], bool]) -> int:
    """Delete what an owner left if it is dead; how many blobs nobody had freed."""
    lock = Path(names.lock(token))
    try:
        # By name, not by whether the scan saw it: owners make it first and delete it last.
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # somebody removed it by hand
        return _sweep_extents(names, token, parts, wanted)[0]
    except PermissionError:
        return 0  # another user's, and theirs to sweep
    try:
        if not locks.try_flock(fd):
            return 0  # alive, or swept by another
        deleted, kept = _sweep_extents(names, token, parts, wanted)
        if not kept:
            # An extent made after the scan, just before its owner died, is found without its lock
            # by the next sweep.
            lock.unlink(missing_ok=True)
        return deleted
    finally:
        os.close(fd)


def _sweep_extents(
    names: Names, token: str, parts: list[str], wanted: Callable[[str], bool]
) -> tuple[int, bool]:
    """Delete a dead owner's extents in which no blob is wanted; blobs deleted, and any kept."""
    deleted, kept = 0, False
    for part in parts:
        if part == "lock":
            continue
        path = Path(names.extent(f"{token}.{part}"))
        blobs = blob_ids(path)
        if any(wanted(blob_id) for blob_id in blobs):
            kept = True
        else:
            path.unlink(missing_ok=True)
            deleted += len(blobs)
    return deleted, kept


def blob_ids(path: Path) -> list[str]:
    """Ids of the blobs in an extent that nobody freed."""
    import numpy as np  # noqa: PLC0415 - to import the package needs none

    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return []
    with file:
        fd = file.fileno()
        first = np.frombuffer(_read(fd, layout.LINE, 0), np.uint64)
        if len(first) < layout.WORDS_PER_LINE or first[layout.WORD_MAGIC] != layout.MAGIC:
            return []  # its owner died making it
        slot_bytes, slots = int(first[layout.WORD_SLOT_BYTES]), int(first[layout.WORD_SLOTS])
        raw = _read(fd, slots * layout.LINE, layout.LINE)
        lines = np.frombuffer(raw, np.uint64).reshape(slots, layout.WORDS_PER_LINE)
        live = lines[:, layout.LIVE]
        found = []
        for slot in np.flatnonzero((live != 0) & (live != lines[:, layout.FREED])).tolist():
            start = layout.header_bytes(slots) + slot * slot_bytes + int(lines[slot, layout.LENGTH])
            size = int(lines[slot, layout.ID_LENGTH])
            found.append(_read(fd, size, start).decode("ascii"))
        return found


def _read(fd: int, size: int, offset: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data

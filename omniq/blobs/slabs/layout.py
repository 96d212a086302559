"""How slabs lie in shared memory: file names, slot sizes, header words, the place in a reference.

Every producing process (*owner*) has one lock file and any number of *extents*, all in the folder
of the shared-memory store::

    <namespace>.slab.<token>.lock     flocked by the owner for life; word 0 is its doorbell
    <namespace>.slab.<token>.<n>      extent: header, then equal page-aligned slots

An extent begins with 64 bytes of its own and one 64-byte line (its own cache line) per slot. All
numbers are native 8-byte words at 8-byte addresses, read and written whole through a mapped
``memoryview``: one load or store each.
"""

from __future__ import annotations

import mmap
import re
import secrets
from pathlib import Path

PAGE = mmap.PAGESIZE
LINE = 64
WORDS_PER_LINE = LINE // 8

#: Changes with every change of this layout, so that versions of omniq do not misread each other.
MAGIC = int.from_bytes(b"omniqsl1", "little")

# Words of an extent's first line. The doorbell is rung (set to a new random number) by a process
# that frees another owner's slot, after the slot's FREED word; the lock file's doorbell after that.
WORD_MAGIC, WORD_SLOT_BYTES, WORD_SLOTS, WORD_BELL = range(4)

# Words of a slot's line.
#: Generation of the blob that lies in the slot complete; 0 while none does. Written by the owner,
#: never while a reader holds the slot's pin.
LIVE = 0
#: Newest generation that somebody freed. The blob is readable while ``FREED != LIVE``. Others than
#: the owner write it only under a pin, so it can neither miss its generation nor hit a later one.
FREED = 1
#: Bytes of the blob, which starts at the slot's first byte.
LENGTH = 2
#: Bytes of the blob's id (ASCII), which follows the blob; it tells the sweep whose blob it is.
ID_LENGTH = 3
#: How many of the blob's first bytes say how its tensors lie in the rest.
HEADER_LENGTH = 4

#: Room for the blob's id that every slot has; the id is not longer (:class:`BlobRef`).
MAX_ID_BYTES = 200

_EXTENT_NAME = re.compile(r"[0-9a-z]+\.[0-9]+")
_LARGEST_POWER_SLOT = 4 * PAGE
_STEPS = 4
_EXTENT_MIN = 1 << 20
_EXTENT_MAX = 64 << 20


def place_of(extent: str, slot: int, generation: int) -> str:
    """Where one blob lies, for ``BlobRef.place``; ``extent`` is ``<token>.<n>``."""
    return f"{extent}.{slot}.{generation}"


def parse_place(text: str) -> tuple[str, int, int]:
    """Extent, slot and generation; whether there is such an extent is another question.

    Raises:
        ValueError: not a place.
    """
    extent, slot, generation = text.rsplit(".", 2)
    return extent, int(slot), int(generation)


class Names:
    """File names of one namespace in one folder."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self.folder, self.namespace = folder, namespace
        # Namespaces hold no dot, so that no namespace's files can look like another's.
        self._prefix = f"{folder}/{namespace}.slab."
        self._file = re.compile(rf"{re.escape(namespace)}\.slab\.([0-9a-z]+)\.(lock|\d+)")

    def lock(self, token: str) -> str:
        """Path of an owner's lock file."""
        return f"{self._prefix}{token}.lock"

    def extent(self, name: str) -> str:
        """Path of the extent of that name (``<token>.<n>``).

        Raises:
            ValueError: no extent can have that name; it may come out of a message.
        """
        if not _EXTENT_NAME.fullmatch(name):
            raise ValueError(f"not an extent: {name!r}")
        return self._prefix + name

    def scan(self) -> dict[str, list[str]]:
        """What is there: by owner token the last parts of its names (``lock``, ``0``, ``1``)."""
        found: dict[str, list[str]] = {}
        for entry in self.folder.iterdir():
            if match := self._file.fullmatch(entry.name):
                found.setdefault(match[1], []).append(match[2])
        return found

    def bytes_held(self) -> int:
        """Bytes of memory that all owners' files hold now."""
        total = 0
        for token, parts in self.scan().items():
            for part in parts:
                try:
                    total += Path(f"{self._prefix}{token}.{part}").stat().st_blocks * 512
                except FileNotFoundError:  # freed since it was listed
                    continue
        return total


def new_token() -> str:
    """A name for an owner that no other process on any host has had."""
    return secrets.token_hex(8)


def slot_bytes(need: int) -> int:
    """Size of the smallest slot that takes ``need`` bytes: whole pages, at most 25 % too much.

    Four steps between powers of two, each plus one page: tensors like to be a power of two bytes,
    and their header and id must not push them into the next class.
    """
    if need <= PAGE:
        return PAGE
    body = need - PAGE
    power = max(PAGE, 1 << (body - 1).bit_length())
    if power <= _LARGEST_POWER_SLOT:
        return power + PAGE
    step = power // (2 * _STEPS)
    return -(-body // step) * step + PAGE


def slots_per_extent(slot: int, held: int) -> int:
    """How many slots the next extent of a class should have that holds ``held`` bytes already.

    Extents double with the class, so that few files carry much data and a rarely used class costs
    little.
    """
    return max(1, min(max(held, _EXTENT_MIN), _EXTENT_MAX) // slot)


def header_bytes(slots: int) -> int:
    """Bytes before the first slot of an extent."""
    return -(-(1 + slots) * LINE // PAGE) * PAGE


def line(slot: int) -> int:
    """Index of the first word of a slot's line."""
    return (1 + slot) * WORDS_PER_LINE

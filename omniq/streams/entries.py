"""What lies in a chunk stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from omniq.blobs.base import BlobRef


class Kind(StrEnum):
    """Kinds of entries."""

    CHUNK = "chunk"
    LAST = "last"
    """A chunk after which only a mark follows."""
    END = "end"
    ERROR = "error"
    """The writing run has ended without success; ``value`` is the error."""


#: Kinds that carry something to consume.
CHUNKS = frozenset({Kind.CHUNK, Kind.LAST})


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry: chunk number ``sequence`` (from 0) of the run with that ``fence``, or a mark.

    ``value`` is small JSON; ``blob`` refers to tensors.
    """

    fence: int
    sequence: int
    kind: Kind
    value: Any = None
    blob: BlobRef | None = None

    @property
    def closes(self) -> bool:
        """Whether no chunk follows."""
        return self.kind is not Kind.CHUNK


def dump(value: Any) -> bytes:
    """JSON as entries, events and scripts hold it."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


def before(fence: int, sequence: int) -> str:
    """The largest stream id below that of (fence, sequence): reading goes on behind it."""
    return f"{fence}-{sequence - 1}" if sequence else f"{fence - 1}-{2**64 - 1}"


def parse(entry_id: bytes, row: list[bytes]) -> Entry:
    """An entry as Redis answers it: id, then names and values in turn."""
    fence, _, sequence = entry_id.decode().partition("-")
    fields: Mapping[bytes, bytes] = dict(zip(row[::2], row[1::2], strict=True))
    blob = fields[b"blob"]
    return Entry(
        int(fence),
        int(sequence),
        Kind(fields[b"kind"].decode()),
        orjson.loads(fields[b"value"]),
        BlobRef.model_validate_json(blob) if blob else None,
    )

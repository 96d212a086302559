"""How a blob lies in Redis: as strings of limited length, each of which says what it is.

::

    32 bytes  magic, number of the chunk, most bytes in a chunk, bytes of the blob, token of the put
    data      so many of the blob's bytes; all chunks but the last hold the same number
    8 bytes   xxh3-64 of the blob's bytes from its start to the end of this chunk

The checksum runs on from chunk to chunk, so that both sides compute it while the bytes pass, once.
The token tells the chunks of two puts under one id apart. Integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from omniq.errors import BlobCorrupt

#: Bytes of a blob in one chunk. Lua knows it too (``omniq/jobs/lua/_common.lua``): the number of
#: chunks to free follows from the bytes of a blob.
CHUNK_BYTES = 4 << 20
MAGIC = b"omqb"
TOKEN_BYTES = 8
TRAILER_BYTES = 8
_HEADER = struct.Struct("<4sIQQ8s")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class Plan:
    """How a blob is cut.

    Attributes:
        nbytes: bytes of the blob.
        chunk_bytes: of them in one chunk, at most.
        token: of the put that wrote it, TOKEN_BYTES random bytes.
    """

    nbytes: int
    chunk_bytes: int
    token: bytes

    @property
    def chunks(self) -> int:
        """How many chunks, one at least."""
        return count_chunks(self.nbytes, self.chunk_bytes)

    def span(self, number: int) -> tuple[int, int]:
        """First byte of a chunk in the blob, and one past its last."""
        start = number * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.nbytes)

    def frame_bytes(self, number: int) -> int:
        """Bytes of a chunk with its header and trailer."""
        start, end = self.span(number)
        return HEADER_BYTES + end - start + TRAILER_BYTES

    def header(self, number: int) -> bytes:
        """The first HEADER_BYTES bytes of a chunk."""
        return _HEADER.pack(MAGIC, number, self.chunk_bytes, self.nbytes, self.token)


def count_chunks(nbytes: int, chunk_bytes: int) -> int:
    """How many chunks a blob has, one at least."""
    return max(1, -(-nbytes // chunk_bytes))


def read_header(header: bytes, number: int, nbytes: int) -> Plan:
    """What chunk ``number`` says about a blob of ``nbytes`` bytes.

    Raises:
        BlobCorrupt: it is another chunk, of a blob of another size, or no chunk at all.
    """
    magic, said_number, chunk_bytes, said_nbytes, token = _HEADER.unpack(header)
    if magic != MAGIC:
        raise BlobCorrupt("does not say what it is")
    if said_number != number:
        raise BlobCorrupt(f"has chunk {said_number} in place of chunk {number}")
    if said_nbytes != nbytes:
        raise BlobCorrupt(f"has {said_nbytes} bytes, and {nbytes} are referred to")
    if not chunk_bytes:
        raise BlobCorrupt("says that its chunks hold nothing")
    return Plan(nbytes, chunk_bytes, token)


def cut(buffers: Iterable[memoryview], plan: Plan) -> Iterator[list[memoryview]]:
    """The parts of ``buffers`` that make up each chunk; nothing is copied."""
    parts: list[memoryview] = []
    room = plan.chunk_bytes
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            part = buffer[start : start + room]
            start += len(part)
            room -= len(part)
            parts.append(part)
            if not room:
                yield parts
                parts, room = [], plan.chunk_bytes
    if parts or not plan.nbytes:
        yield parts

"""Many strings as one, as the job scripts publish them (``framed`` in ``lua/_common.lua``)."""

from __future__ import annotations

import orjson


def unframed(data: bytes) -> list[bytes]:
    """The strings that were put together."""
    head, _, body = data.partition(b"\n")
    found, at = [], 0
    for length in orjson.loads(head):
        found.append(body[at : at + length])
        at += length
    return found

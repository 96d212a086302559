"""Many strings as one, as the job scripts publish them (``framed`` in ``lua/_common.lua``)."""

from __future__ import annotations

from itertools import accumulate

import orjson


def unframed(data: bytes) -> list[bytes]:
    """The strings that were put together."""
    head, _, body = data.partition(b"\n")
    lengths = orjson.loads(head)
    return [
        body[end - length : end] for length, end in zip(lengths, accumulate(lengths), strict=True)
    ]

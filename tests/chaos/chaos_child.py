"""The engine process of the stage `change`, as vLLM's EngineCore is one: the model lives here, and
requests and answers cross a pipe. Ends with its parent.

A frame is the request's number, the length of what follows (both 64 bit, little-endian), and bytes.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from typing import BinaryIO

from omniq.runtime.parent import die_with_parent

HEADER = struct.Struct("<qq")
FLIP = bytes(byte ^ 0x5A for byte in range(256))
#: Instead of a request's bytes: the process is to die.
DIE = b"die"


def changed(data: bytes) -> bytes:
    """Reversed, turned by seven places, and every byte with some bits flipped."""
    data = data[::-1]
    return (data[-7:] + data[:-7]).translate(FLIP)


def read(pipe: BinaryIO) -> tuple[int, bytes] | None:
    """The next frame; None at the end."""
    head = pipe.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    number, length = HEADER.unpack(head)
    data = pipe.read(length)
    return (number, data) if len(data) == length else None


def write(pipe: BinaryIO, number: int, data: bytes) -> None:
    """One frame."""
    pipe.write(HEADER.pack(number, len(data)))
    pipe.write(data)
    pipe.flush()


def main() -> None:
    """Serve until the parent closes the pipe or ends."""
    die_with_parent(signal.SIGKILL, parent=int(sys.argv[1]))
    while (frame := read(sys.stdin.buffer)) is not None:
        number, data = frame
        if data == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        write(sys.stdout.buffer, number, changed(data))


if __name__ == "__main__":
    main()

"""Byte-range locks of open file descriptions: how a reader pins a slot.

The kernel drops such a lock with the last descriptor of the description it was taken on, so a
reader that dies, however it dies, unpins. Unlike classic POSIX locks they belong to the open
description and not to the process: two readers of one process, or an owner that reads its own
blobs, exclude each other as two processes do, and closing another descriptor of the same file
drops nothing. (Linux, ``fcntl(2)``, "Open file description locks".)
"""

from __future__ import annotations

import fcntl
import os
import struct

SHARED, EXCLUSIVE = fcntl.F_RDLCK, fcntl.F_WRLCK

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: l_type, l_whence, l_start, l_len, l_pid = 0


def take(fd: int, kind: int, byte: int) -> bool:
    """Take or change this description's lock on one byte; ``kind`` is SHARED or EXCLUSIVE.

    False while another description holds one that does not go with it.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN, EACCES: the two ways to say "held"
        return False
    return True


def drop(fd: int, byte: int) -> None:
    """Drop this description's lock on one byte."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def try_flock(fd: int) -> bool:
    """Take the exclusive lock of a whole file for the life of the descriptor."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""Mapped shared memory: reserving it, faulting it in ahead of use, dropping private copies.

Page faults, not copying, are what makes fresh shared memory slow (about five times here), hence
everything is faulted in once and then reused.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import sys

from omniq.blobs.slabs.layout import PAGE
from omniq.errors import StoreFull

# Linux's numbers, which `mmap` does not name before Python 3.13.
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
MAP_NORESERVE = 0x4000

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
_CHUNK = 16 << 20

# An entry of /proc/<pid>/pagemap has 8 bytes, of which the highest tells what a page is
# (Documentation/admin-guide/mm/pagemap.rst).
_ENTRY, _HIGHEST = 8, 7 if sys.byteorder == "little" else 0
_HAS_PAGE = 3 << 6  # present, swapped
_OF_FILE = 1 << 5
#: Values of that byte of a page that is not there, or the file's.
_NO_COPY = bytes(byte for byte in range(256) if not byte & _HAS_PAGE or byte & _OF_FILE)


def reserve(fd: int, size: int) -> None:
    """Give a file ``size`` bytes of memory of its own.

    A write to a page that tmpfs cannot provide is a SIGBUS; after this there is none.

    Raises:
        StoreFull: there is not so much.
    """
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as exc:
        if exc.errno not in _NO_ROOM:
            raise
        raise StoreFull(
            f"no room for {size} bytes of shared memory: {exc.strerror}",
            hint="enlarge /dev/shm (docker: --shm-size) or lower OMNIQ_SHM_MAX_BYTES",
        ) from exc


def populate(mapping: mmap.mmap, advice: int) -> None:
    """Fault the whole mapping in (``MADV_POPULATE_*``); kernels before 5.14 do it at first use."""
    for start in range(0, len(mapping), _CHUNK):  # one call holds the GIL
        try:
            mapping.madvise(advice, start, min(_CHUNK, len(mapping) - start))
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            return


def address(mapping: mmap.mmap) -> int:
    """Virtual address of a writable mapping."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def page_faults() -> int:
    """Page faults of this process so far; each private copy of a page was one of them."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def drop_private_copies(mapping: mmap.mmap, base: int, start: int, size: int) -> bool:
    """Make a part of a private file mapping show the file again; False if it did already.

    Consumers map extents privately, so that a write through a view costs the writer a copy of the
    page and reaches nobody else. But such a copy would hide the slot's next blob from this process;
    so it has to go when the last view of the slot does.

    ``base`` is the mapping's address; ``start`` and ``size`` are whole pages.
    """
    if not _has_private_copies(base + start, size):
        return False
    mapping.madvise(mmap.MADV_DONTNEED, start, size)
    return True


def _has_private_copies(start: int, size: int) -> bool:
    if _pagemap is None:  # some sandboxes have none; to drop all pages is then right, if slower
        return True
    pages = os.pread(_pagemap, size // PAGE * _ENTRY, start // PAGE * _ENTRY)
    return bool(pages[_HIGHEST::_ENTRY].translate(None, _NO_COPY))


def _open_pagemap() -> int | None:
    try:
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _in_forked_child() -> None:
    """What the parent opened tells of the parent's memory."""
    global _pagemap  # noqa: PLW0603 - of the process
    if _pagemap is not None:
        os.close(_pagemap)
    _pagemap = _open_pagemap()


_pagemap = _open_pagemap()
os.register_at_fork(after_in_child=_in_forked_child)

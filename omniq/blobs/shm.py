"""The shared-memory blob store: one file per blob in a tmpfs, mapped by whoever reads it.

::

    <namespace>.owner.<owner>          flocked by the writing process for life
    <namespace>.blob.<owner>.<id>      one complete blob
    <namespace>.temp.<owner>.<n>       a blob being written

``multiprocessing.shared_memory`` is avoided: before Python 3.13 its resource tracker deletes a
segment when any process that opened it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from omniq.blobs import codec
from omniq.blobs.base import BlobRef, BlobStore
from omniq.errors import BlobCorrupt, BlobError, BlobNotFound, BlobTooLarge, StoreFull

if TYPE_CHECKING:
    import torch

_OWNER = r"\d+-[0-9a-f]{8}"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class _File(NamedTuple):
    """One file of a namespace. ``rest`` is the blob id of a blob, empty for an owner."""

    path: Path
    kind: str
    owner: str
    rest: str


class ShmStore(BlobStore):
    """Blobs in the shared memory of this host.

    Tensors that :meth:`get` returns are mapped read-only: writing to them ends the process with
    SIGSEGV. A second :meth:`put` under one id replaces the first in one step.

    Args:
        folder: a tmpfs, such as ``/dev/shm``.
        namespace: whose blobs these are (holds no dot).
        host: identity of this machine and its ``folder``, noted in references.
        max_bytes: most bytes that all processes of the namespace may hold on this host.
    """

    name = "shm"

    def __init__(self, folder: Path, namespace: str, host: str, max_bytes: int) -> None:
        self._folder, self._namespace = folder, namespace
        self._host, self._max_bytes = host, max_bytes
        self._pattern = re.compile(
            rf"{re.escape(namespace)}\.(owner|blob|temp)\.({_OWNER})(?:\.(.+))?"
        )
        self._lock = threading.Lock()
        self._owner: _Owner | None = None
        self._numbers = itertools.count()
        _stores.add(self)

    # -- one blob ----------------------------------------------------------------------------

    def put(self, blob_id: str, tensors: Mapping[str, torch.Tensor]) -> BlobRef:
        """Write a blob; readers see it only when it is complete.

        Raises:
            BlobTooLarge: larger than all the namespace may hold.
            StoreFull: no room now, or the folder cannot be written to.
        """
        layout = codec.plan(tensors)
        if layout.nbytes > self._max_bytes:
            raise BlobTooLarge(
                f"a blob of {layout.nbytes} bytes; "
                f"OMNIQ_SHM_MAX_BYTES allows {self._max_bytes} in all"
            )
        try:
            owner = self._own()
            ref = BlobRef(
                id=blob_id,
                store=self.name,
                host=self._host,
                nbytes=layout.nbytes,
                place=owner.name,
                tensors=layout.described,
            )
            temp = self._path("temp", owner.name, str(next(self._numbers)))
            try:
                self._write(temp, layout)
                with self._counting():
                    temp.rename(self._path("blob", owner.name, blob_id))
            except BaseException:
                temp.unlink(missing_ok=True)
                raise
        except OSError as exc:
            full = exc.errno in _NO_ROOM
            raise StoreFull(
                f"shared memory takes no blob of {layout.nbytes} bytes: {exc}",
                hint="enlarge it (docker: --shm-size) or lower OMNIQ_SHM_MAX_BYTES"
                if full
                else f"check {self._folder}, or set OMNIQ_BLOB_STORE=redis",
            ) from exc
        return ref

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Keep the folder's listing still: one that meets a renaming may miss the file."""
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)  # and with it the lock goes

    def _write(self, path: Path, layout: codec.Layout) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # The size counts for every process from here on: of two that would together exceed the
            # cap, at least one sees it.
            with self._counting():
                os.ftruncate(fd, layout.nbytes)
                held = self._bytes_held()
            if held > self._max_bytes:
                raise StoreFull(
                    f"shared memory is full: {layout.nbytes} bytes more than the "
                    f"{held - layout.nbytes} of {self._max_bytes} that are held",
                    hint="raise OMNIQ_SHM_MAX_BYTES, or let fewer jobs run at a time",
                )
            # Without this a full tmpfs would be a SIGBUS at the first write to a missing page.
            os.posix_fallocate(fd, 0, layout.nbytes)
            # Unmapped when the last reference to it goes, as torch has no way to let go earlier.
            layout.write_into(memoryview(mmap.mmap(fd, layout.nbytes)))
        finally:
            os.close(fd)

    def get(self, ref: BlobRef) -> dict[str, torch.Tensor]:
        """Map a blob; nothing is copied.

        Raises:
            BlobNotFound: deleted, or never on this host.
            BlobCorrupt: length or header do not fit.
        """
        return codec.parse(self.buffer(ref))

    def buffer(self, ref: BlobRef) -> memoryview:
        """The bytes of a blob where they lie, read-only; they stay while the view lives.

        Raises:
            BlobNotFound, BlobCorrupt: as :meth:`get`.
        """
        path = self._place(ref)
        if path is None:
            raise _not_found(ref)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _not_found(ref) from None
        except PermissionError as exc:
            raise BlobError(
                f"blob {ref.id} belongs to another user: {exc}",
                hint="run all workers of one host as one user, or set OMNIQ_BLOB_STORE=redis",
            ) from exc
        try:
            size = os.fstat(fd).st_size
            if size != ref.nbytes:
                raise BlobCorrupt(f"blob {ref.id} has {size} bytes instead of {ref.nbytes}")
            return memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ))
        finally:
            os.close(fd)

    def delete(self, ref: BlobRef) -> bool:
        """Free a blob, whoever wrote it; who has it mapped keeps it."""
        path = self._place(ref)
        return path is not None and _unlink(path)

    def _place(self, ref: BlobRef) -> Path | None:
        # The place comes out of a message and becomes part of a path.
        if ref.place is None or not re.fullmatch(_OWNER, ref.place):
            return None
        return self._path("blob", ref.place, ref.id)

    # -- all blobs ---------------------------------------------------------------------------

    def own(self) -> list[BlobRef]:
        """References to the blobs that this store wrote and nobody deleted."""
        owner = self._owner
        if owner is None:
            return []
        found = []
        for file in self._scan():
            if file.kind == "blob" and file.owner == owner.name and (size := _size(file.path)):
                found.append(
                    BlobRef(
                        id=file.rest,
                        store=self.name,
                        host=self._host,
                        nbytes=size,
                        place=owner.name,
                    )
                )
        return found

    def sweep(self, wanted: Callable[[str], bool]) -> int:
        """Delete what dead owners left; nothing of a live one is touched.

        Args:
            wanted: says of a blob id whether an unfinished job may still read the blob.

        Returns:
            How many blobs were deleted.
        """
        left: dict[str, list[_File]] = {}
        for file in self._scan():
            left.setdefault(file.owner, []).append(file)
        return sum(self._sweep_owner(owner, files, wanted) for owner, files in left.items())

    def _sweep_owner(self, owner: str, files: list[_File], wanted: Callable[[str], bool]) -> int:
        path = self._path("owner", owner)
        try:
            # By name, not by whether the scan saw it: it is made first and deleted last.
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return _sweep_files(files, wanted)[0]
        except PermissionError:
            return 0  # another user's, and theirs to sweep
        try:
            if not _try_flock(fd):
                return 0  # alive, or swept by another
            deleted, kept = _sweep_files(files, wanted)
            if not kept:
                # A blob written after the scan, just before its owner died, is found without its
                # owner's file by the next sweep.
                _unlink(path)
            return deleted
        finally:
            os.close(fd)

    def close(self) -> None:
        """Stop being an owner. Blobs stay for their readers, and for the sweep."""
        with self._lock:
            if self._owner is not None:
                self._owner.close(keep=bool(self.own()))
                self._owner = None

    def stats(self) -> dict[str, Any]:
        """Number and bytes of the namespace's blobs on this host, and the cap."""
        sizes = [_size(file.path) for file in self._scan() if file.kind == "blob"]
        return {"blobs": len(sizes), "bytes": sum(sizes), "max_bytes": self._max_bytes}

    # -- files -------------------------------------------------------------------------------

    def _own(self) -> _Owner:
        with self._lock:
            if self._owner is None:
                self._owner = _Owner(lambda name: self._path("owner", name))
            return self._owner

    def _path(self, kind: str, *rest: str) -> Path:
        return self._folder / ".".join((self._namespace, kind, *rest))

    def _scan(self) -> Iterator[_File]:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if match := self._pattern.fullmatch(entry.name):
                    yield _File(Path(entry.path), match[1], match[2], match[3] or "")

    def _bytes_held(self) -> int:
        return sum(_size(file.path) for file in self._scan())

    def _forget(self) -> None:
        """For a forked child: its blobs are its own, and its parent's lock is not."""
        self._lock = threading.Lock()  # another thread may have held it when the process forked
        if self._owner is not None:
            self._owner.forget()
            self._owner = None


class _Owner:
    """A file whose lock says that this writer lives: unlike a pid it cannot come to life again."""

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        while True:
            self.name = f"{os.getpid()}-{secrets.token_hex(4)}"
            self._path = path_of(self.name)
            try:
                self._fd = os.open(
                    self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
                )
            except FileExistsError:
                continue
            # A sweep may take the file for a dead owner's before it is locked: then start over.
            if _try_flock(self._fd) and os.fstat(self._fd).st_nlink:
                return
            os.close(self._fd)

    def close(self, *, keep: bool) -> None:
        """Unlock; the file goes unless there are blobs to which it belongs."""
        if not keep:
            _unlink(self._path)
        self.forget()

    def forget(self) -> None:
        """Close the file, which unlocks it unless a parent or child process has it open too."""
        os.close(self._fd)


def available(folder: Path) -> bool:
    """Whether a store can work in ``folder``."""
    return (
        hasattr(os, "posix_fallocate") and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    )


def _sweep_files(files: list[_File], wanted: Callable[[str], bool]) -> tuple[int, int]:
    """Delete a dead owner's files; how many blobs were deleted, and how many are wanted."""
    deleted = kept = 0
    for file in files:
        if file.kind == "temp":
            _unlink(file.path)
        elif file.kind == "blob":
            if wanted(file.rest):
                kept += 1
            else:
                deleted += _unlink(file.path)
    return deleted, kept


def _try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except PermissionError as exc:
        raise BlobError(f"shared memory of another user cannot be freed: {exc}") from exc
    return True


def _size(path: Path) -> int:
    """Bytes of a file; 0 once it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _not_found(ref: BlobRef) -> BlobNotFound:
    return BlobNotFound(f"blob {ref.id} is not in this host's shared memory (any more)")


_stores: weakref.WeakSet[ShmStore] = weakref.WeakSet()


def _in_forked_child() -> None:
    for store in list(_stores):
        store._forget()


os.register_at_fork(after_in_child=_in_forked_child)

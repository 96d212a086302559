"""Which machine this is, as far as shared memory goes."""

from __future__ import annotations

import hashlib
import socket
import uuid
from pathlib import Path

from omniq.settings import get_settings

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity(folder: Path | None = None) -> str:
    """16 hex digits, equal for two processes exactly if they see the same shared-memory folder.

    Made of the kernel's boot id and of device and inode of ``folder`` (by default
    ``settings.shm_dir``). Host names lie both ways: containers of one machine have different names
    and may share /dev/shm, or have one name and a /dev/shm each.
    """
    folder = get_settings().shm_dir if folder is None else folder
    try:
        found = folder.stat()
        place = f"{found.st_dev}.{found.st_ino}"
    except OSError:  # no shared memory: such processes share nothing, whatever this says
        place = "none"
    return hashlib.sha256(f"{_boot()}/{place}".encode()).hexdigest()[:16]


def _boot() -> str:
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # not Linux; if two machines look different, tensors only travel slower
        return f"{uuid.getnode():x}.{socket.gethostname()}"

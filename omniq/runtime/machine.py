"""What this machine has: CPUs, memory left, shared memory left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from omniq.settings import get_settings

MEMINFO = Path("/proc/meminfo")


def cpu_count() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_line() -> str:
    """For people: available and total memory."""
    if not MEMINFO.exists():
        return "memory: unknown on this platform"
    kib = {
        line.split(":")[0]: int(line.split()[1])
        for line in MEMINFO.read_text().splitlines()
        if line.endswith(" kB")
    }
    total, available = kib["MemTotal"], kib.get("MemAvailable", kib["MemFree"])
    return f"memory: {available / 2**20:.1f} GiB available of {total / 2**20:.1f} GiB"


def shm_line() -> str:
    """For people: free and total shared memory."""
    folder = get_settings().shm_dir
    if not folder.is_dir():
        return f"shared memory: {folder} does not exist"
    usage = shutil.disk_usage(folder)
    return (
        f"shared memory: {usage.free / 2**30:.2f} GiB free of {usage.total / 2**30:.2f} GiB "
        f"in {folder}"
    )

"""Ending with the parent process, so that a killed supervisor leaves nothing running."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(signum: int = signal.SIGTERM, *, parent: int | None = None) -> None:
    """Have the kernel send ``signum`` to this process when its parent dies (Linux; else nothing).

    The kernel means the parent's *thread* that forked this process: start such children from a
    thread that lives long enough (:mod:`omniq.runtime.spawn`). The setting survives ``exec``.

    Args:
        parent: pid the parent is expected to have. If it has died already, before this call, the
            signal could never come, so it is raised at once.
    """
    if not sys.platform.startswith("linux"):
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signum)) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signum)

"""vLLM's engine process ends with the worker that started it, however that worker ends.

vLLM watches its engine from the front end, and its model workers watch the engine; the engine
itself would go on for ever, with the accelerator's memory, after a ``kill -9`` of its front end.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading

#: Environment variable: process id of the worker; the engine process inherits it.
PARENT = "_OMNIQ_VLLM_PARENT"
THREAD = "omniq-parent"


def claim() -> None:
    """Say that engine processes started from now on are this process's."""
    os.environ[PARENT] = str(os.getpid())


def end_with_parent() -> None:
    """In a process that :func:`claim` was meant for: be killed when its parent ends.

    The multiprocessing resource tracker, which both share, then unlinks their shared memory.
    """
    parent = multiprocessing.parent_process()
    if parent is None or os.environ.get(PARENT) != str(parent.pid):
        return
    if any(thread.name == THREAD for thread in threading.enumerate()):
        return
    assert parent.pid is not None, "a process that has started"
    threading.Thread(target=_watch, args=(parent.pid,), name=THREAD, daemon=True).start()


def _watch(pid: int) -> None:
    # By what the kernel knows of it: multiprocessing's pipe may be open in another child, too.
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        process = None
    if process is not None and os.getppid() == pid:
        select.select([process], [], [])
    os.kill(os.getpid(), signal.SIGKILL)

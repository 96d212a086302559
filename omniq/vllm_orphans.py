"""vLLM's engine process ends with the worker that started it, however that worker ends.

vLLM watches its engine from the front end, and its model workers watch the engine; the engine
itself would go on for ever, with the accelerator's memory, after a ``kill -9`` of its front end.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
import select
import shutil
import signal
import tempfile
import threading
from pathlib import Path

#: Environment variable: process id of the worker; the engine process inherits it.
PARENT = "_OMNIQ_VLLM_PARENT"
THREAD = "omniq-parent"
#: Environment variable of vLLM: folder of the sockets between its processes.
SOCKETS = "VLLM_RPC_BASE_PATH"
#: Of this process's own such folders; and of one that nobody holds locked yet.
FOLDER, UNLOCKED = "omniq-vllm-", ".omniq-vllm-"
_held: dict[int, tuple[Path, int]] = {}


def claim() -> None:
    """Say that engine processes started from now on are this process's, and have their sockets in
    a folder of its own: those of killed processes, which nobody else would unlink, are removed with
    their folders by the next claim.
    """
    os.environ[PARENT] = str(os.getpid())
    mine = _held.get(os.getpid())
    if mine is None and Path(os.environ.get(SOCKETS, FOLDER)).name.startswith(FOLDER):
        sweep()
        mine = _held[os.getpid()] = _new_folder()
        os.environ[SOCKETS] = str(mine[0])
        atexit.register(_remove, os.getpid(), mine[0])


def sweep() -> None:
    """Remove the folders of processes that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:  # another's, or gone
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _new_folder() -> tuple[Path, int]:
    """A folder, and the lock on it that lasts as long as this process and those it forks."""
    made = Path(tempfile.mkdtemp(prefix=UNLOCKED))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(made.with_name(made.name.removeprefix("."))), lock


def _remove(pid: int, folder: Path) -> None:
    if os.getpid() == pid:  # not a forked one's end
        shutil.rmtree(folder, ignore_errors=True)


def end_with_parent() -> None:
    """In a process that :func:`claim` was meant for: be killed when its parent ends.

    The multiprocessing resource tracker, which both share, then unlinks their shared memory.

    Until then only the parent ends it: a signal to the parent's whole group (Ctrl-C, honcho) would
    reach it a moment before vLLM's own, the second of which kills it while it waits for its model
    workers. They would go on for seconds, and be killed with the tracker by whoever sent the first.
    """
    parent = multiprocessing.parent_process()
    if parent is None or os.environ.get(PARENT) != str(parent.pid):
        return
    if any(thread.name == THREAD for thread in threading.enumerate()):
        return
    assert parent.pid is not None, "a process that has started"
    os.setpgid(0, 0)
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

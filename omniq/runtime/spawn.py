"""Child processes that never outlive this one, with their last output kept in memory."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache

MAX_LOG_BYTES = 8 << 20


class Child:
    """One running child.

    Its output goes to an unnamed temporary file: unlike a pipe it needs no reader, never blocks or
    breaks the child, and it vanishes with the last process that has it open.
    """

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as this object
        self.process = spawner().run(
            lambda: subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                # A terminal's Ctrl-C must not reach it: its owner stops it, in order.
                start_new_session=True,
            )
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self.process.poll()

    def describe_exit(self) -> str:
        """For people: how it ended."""
        code = self.exit_code
        if code is None:
            return "runs"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (out of memory?)"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def last_lines(self, count: int = 20) -> list[str]:
        """The end of its output."""
        size = os.fstat(self._log.fileno()).st_size
        # pread: the file offset is shared with the child and says where it writes next.
        data = os.pread(self._log.fileno(), 64 << 10, max(0, size - (64 << 10)))
        return data.decode(errors="replace").splitlines()[-count:]

    def trim_log(self) -> None:
        """Empty an output file that has grown large; the child goes on writing at its start."""
        if os.fstat(self._log.fileno()).st_size > MAX_LOG_BYTES:
            os.ftruncate(self._log.fileno(), 0)
            os.lseek(self._log.fileno(), 0, os.SEEK_SET)

    def terminate(self) -> None:
        """Ask it to end."""
        if self.process.poll() is None:
            self.process.terminate()

    def wait(self, timeout: float) -> bool:
        """Wait for the end; after ``timeout`` seconds kill its whole session. True: it ended."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        return True

    def kill(self) -> None:
        """Kill it and what it started (they share its session's process group)."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        """Let go of the output file."""
        self._log.close()


class Spawner:
    """A thread that starts processes for all others.

    The kernel's parent-death signal follows the *thread* that forked, so children started from a
    short-lived thread (an executor's, say) would be ended with it. This thread lives as long as the
    process.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[
            tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]
        ] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="omniq-spawner", daemon=True).start()

    def run(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Call ``start`` on the spawner's thread and return its result."""
        future: Future[subprocess.Popen[bytes]] = Future()
        self._calls.put((start, future))
        return future.result()

    def _loop(self) -> None:
        while True:
            start, future = self._calls.get()
            try:
                future.set_result(start())
            except OSError as exc:
                future.set_exception(exc)


def spawner() -> Spawner:
    """The spawner of this process; a forked process gets its own (threads survive no fork)."""
    return _spawner_of(os.getpid())


@lru_cache(maxsize=2)
def _spawner_of(_pid: int) -> Spawner:
    return Spawner()

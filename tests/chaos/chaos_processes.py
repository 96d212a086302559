"""The processes of a system, started again whenever they end, and what they hold."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from clock_step import ClockStep
from support import Valkey, free_port

STAGES = ("make", "change", "sum")
#: Seconds of a lease; a stopped process stays so for longer than that.
LEASE, STOPPED = 2.0, 3.5
#: Bytes of the file system for shared memory, where a small one can be mounted.
SHM_BYTES = 6 << 20
#: Open files that a process may have more than when it was idle at first: pools of connections.
FILES_SLACK = 16
#: Bytes of memory that a process may have more, likewise.
MEMORY_SLACK = 256 << 20


class SmallMount:
    """A tmpfs of a few megabytes on ``folder``, seen only by those who are started within.

    Where this user may not mount one, ``mounted`` is false and ``why_not`` says what was answered.
    """

    def __init__(self, folder: Path) -> None:
        script = 'mount -t tmpfs -o size="$1" tmpfs "$2" && echo mounted && exec sleep 86400'
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, "sh", str(SHM_BYTES), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pid = self._holder.pid
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline().strip()
        self.mounted = said == "mounted"
        self.why_not = "" if self.mounted else said or "unshare says nothing"
        #: The folder as everybody can reach it.
        self.folder = folder
        self.within: tuple[str, ...] = ()
        if self.mounted:
            proc = f"/proc/{self._holder.pid}"
            self.folder = Path(f"{proc}/root{folder}")
            self.within = ("nsenter", f"--mount={proc}/ns/mnt", f"--wd={Path.cwd()}")

    def fill(self) -> Path:
        """Leave no byte free; to be undone by unlinking what is returned."""
        ballast = self.folder / ".ballast"  # hidden: nobody's extent
        fd = os.open(ballast, os.O_RDWR | os.O_CREAT, 0o600)
        size = 0
        with contextlib.suppress(OSError):  # ENOSPC: it is full
            while True:
                os.posix_fallocate(fd, size, os.sysconf("SC_PAGESIZE"))
                size += os.sysconf("SC_PAGESIZE")
        os.close(fd)
        return ballast

    def close(self) -> None:
        """Unmount it."""
        self._holder.kill()
        self._holder.wait()


@dataclass(frozen=True)
class Held:
    """What a process has: open files, and bytes of memory."""

    files: int
    memory: int


class Processes:
    """API and workers, and how to get at each kind of process.

    Args:
        each: workers of each stage.
    """

    def __init__(self, folder: Path, valkey: Valkey, *, each: int) -> None:
        self.folder, self.valkey = folder, valkey
        shm = folder / "shm"
        shm.mkdir()
        self.mount = SmallMount(shm)
        self.shm = self.mount.folder
        self.api_port = free_port()
        worker = ("worker", "--pipeline", "chaos", "--devices", "cpu", "--stage")
        self._commands = {
            f"{stage}-{n}": (*worker, stage) for stage in STAGES for n in range(each)
        } | {"api": ("api", "--port", str(self.api_port))}
        self.clocks = {name: ClockStep(folder, name) for name in self._commands}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: dict[int, float] = {}
        self._idle: dict[str, Held] = {}

    # -- life ----------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*self.mount.within, sys.executable, "-m", "omniq", *self._commands[name]],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.clocks[name].environment},
            )

    def start_all(self) -> None:
        for name in self._commands:
            self.start(name)

    def tend(self) -> None:
        """Start what has ended, and let what was stopped go on."""
        now = time.monotonic()
        for pid in [p for p, until in self._stopped.items() if now > until]:
            self._go_on(pid)
        for name, process in list(self._running.items()):
            if process.poll() is not None:
                self.start(name)

    def stop_all(self) -> list[str]:
        """End all; returns who did not end well, and whom they left."""
        for pid in list(self._stopped):
            self._go_on(pid)
        for process in self._running.values():
            process.terminate()
        faults = []
        for name, process in self._running.items():
            try:
                code: object = process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = "a kill: it did not stop"
            if code != 0:
                faults.append(f"{name} ended with {code}")
        return faults + [f"process left: {p}" for p in self._ours()]

    def _ours(self) -> list[str]:
        """Processes that were started by the system, which has ended."""
        broker = self.valkey.process
        others = {os.getpid(), self.mount.pid, broker.pid if broker is not None else 0}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("OMNIQ_BROKER_URL") == self.valkey.url
                if ours and process.pid not in others:
                    found.append(" ".join(process.cmdline()))
        return found

    # -- whom a fault may meet -----------------------------------------------------------------

    def workers(self) -> dict[str, int]:
        """Pids of workers by name, of those that are not stopped if there are any."""
        found = {n: p.pid for n, p in self._running.items() if n != "api"}
        return {n: p for n, p in found.items() if p not in self._stopped} or found

    @property
    def api(self) -> int:
        return self._running["api"].pid

    def engines(self) -> list[int]:
        """Pids of the engine processes."""
        found = []
        for name, pid in self.workers().items():
            if name.startswith("change"):
                with contextlib.suppress(psutil.Error):
                    found += [c.pid for c in psutil.Process(pid).children()]
        return found

    def stop(self, pid: int, seconds: float = STOPPED) -> None:
        """SIGSTOP for so long."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._stopped[pid] = time.monotonic() + seconds

    def _go_on(self, pid: int) -> None:
        del self._stopped[pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    # -- what they hold ------------------------------------------------------------------------

    def look_at_idle(self) -> None:
        """Note what each kind of process holds while nothing goes on."""
        self._idle = self._held()

    def _held(self) -> dict[str, Held]:
        pids = {name: p.pid for name, p in self._running.items()}
        for pid in self.engines():
            pids["engine process"] = pid
        if self.valkey.process is not None:
            pids["broker"] = self.valkey.process.pid
        found = {}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                found[name] = Held(process.num_fds(), process.memory_info().rss)
        return found

    def more_than_idle(self) -> tuple[dict[str, int], dict[str, int]]:
        """Open files, and bytes of memory, that each process has more than it had then."""
        now = {n: h for n, h in self._held().items() if n in self._idle}
        files = {n: h.files - self._idle[n].files for n, h in now.items()}
        return files, {n: h.memory - self._idle[n].memory for n, h in now.items()}

    def oldest(self) -> float:
        """Seconds that the oldest process but the broker has lived."""
        began = []
        for process in self._running.values():
            with contextlib.suppress(psutil.Error):
                began.append(psutil.Process(process.pid).create_time())
        return time.time() - min(began, default=time.time())

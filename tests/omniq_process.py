"""Starting `omniq ...` commands as real processes, and seeing what they leave behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil


class OmniqProcess:
    """One `omniq ...` process with its output in a file."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "omniq", *args],
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text()


StartOmniq = Callable[..., OmniqProcess]


@contextlib.contextmanager
def omniq_processes(folder: Path) -> Iterator[StartOmniq]:
    """A function that starts commands; whatever is left of them is killed at the end."""
    started: list[OmniqProcess] = []

    def start(*args: str, **env: str) -> OmniqProcess:
        log = folder / f"omniq-{len(started)}.log"
        full = {**os.environ, "OMNIQ_DATA_DIR": str(folder), **env}
        started.append(OmniqProcess(args, full, log))
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            each.process.kill()
            each.process.wait()


def descendants(pid: int) -> list[psutil.Process]:
    """All processes below ``pid`` now. Look while it lives: orphans belong to nobody.

    (Neither command line nor environment tells them later: Celery and Valkey overwrite both.)
    """
    return psutil.Process(pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; psutil knows a process from a later one with the same pid."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

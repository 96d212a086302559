"""The wall clock of single processes, set ahead or back while they run."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path


class ClockStep:
    """A clock for the processes that are started with its :attr:`environment`.

    Their ``CLOCK_REALTIME`` differs from the machine's: ``time.time()``, ``datetime.now()`` and
    whatever else asks the C library. ``CLOCK_MONOTONIC`` is the machine's. Needs a C compiler.
    """

    def __init__(self, folder: Path, name: str = "clock") -> None:
        self._file = folder / f"{name}.step"
        self._file.write_bytes(bytes(8))
        library = folder / "clock_step.so"
        if not library.exists():
            source = Path(__file__).with_suffix(".c")
            command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
            subprocess.run(command, check=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_STEP": str(self._file)}
        self.ahead = 0

    def set(self, ahead: int) -> None:
        """Seconds that the processes' clock is ahead of the machine's from now on."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("<q", ahead))
        self.ahead = ahead

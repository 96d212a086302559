"""Short forms of the benchmarks that prove that nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(tmp_path: Path, script: str, *options: str) -> dict[str, Any]:
    """The results of a benchmark that found no fault."""
    out = tmp_path / "results.json"
    command = [sys.executable, str(BENCHMARKS / script), *options, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["faults"] == []
    return found


@pytest.mark.slow
def test_jobs_through_a_small_pool_leave_nothing(tmp_path: Path) -> None:
    """Real workers: ten times as much as the pool holds, none of it through Redis."""
    options = ("--jobs", "160", "--mb", "16", "--pool-mb", "256", "--in-flight", "4", "--idle", "0")
    found = run(tmp_path, "pool_memory.py", *options)
    assert found["puts"] == {"shm": 168, "redis": 0}
    assert found["peak_shm_bytes"] <= (256 << 20) + 8192
    assert found["moments"]["stopped"]["shm_files"] == 0


@pytest.mark.slow
def test_killed_producers_and_consumers_leave_nothing(tmp_path: Path) -> None:
    found = run(tmp_path, "kill_memory.py", "--kills", "20", "--each", "2")
    assert sum(n for what, n in found["killed"].items() if "killed" in what) == 20
    assert found["left_by_the_dead"]["files in /dev/shm"] > 0, "they left something to sweep"
    assert set(found["left_after_the_sweep"].values()) == {0}

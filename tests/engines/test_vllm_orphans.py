"""What is left of vLLM when the process that started it is killed: nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from support import wait_until

from omniq import vllm_orphans

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

TESTS = Path(__file__).parent.parent
#: Starts an engine, says so, and waits.
SCRIPT = """
import asyncio, sys
from pathlib import Path
from engine_helpers import loaded, stage

async def main():
    args = {"max_model_len": 64}
    engine = await loaded(stage(Path(sys.argv[1]), "ar", engine="vllm", engine_args=args))
    print("ready", flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["worker", "engine"])
def test_nothing_outlives_a_killed_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """No process, no shared memory, and no socket that the next one does not remove; whether the
    worker is killed, or its engine and then it.
    """
    script = tmp_path / "start.py"
    script.write_text(SCRIPT)
    # pytest's own folders have names too long for sockets in them.
    short = Path(tempfile.mkdtemp(prefix="o"))
    process = subprocess.Popen(
        [sys.executable, str(script), str(model)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "TMPDIR": str(short)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert any("ready" in line for line in process.stdout), "the engine has not started"
    family = psutil.Process(process.pid).children(recursive=True)
    segments = {path for p in family for path in _segments(p)}
    assert segments, "vLLM's processes share memory"
    if victim == "engine":
        for child in psutil.Process(process.pid).children():
            if _segments(child):
                child.kill()
        wait_until(lambda: not any(map(_segments, filter(_alive, family))), 20, "vLLM's end")
    process.kill()
    process.wait(10)
    wait_until(lambda: not any(map(_alive, family)), 20, f"the end of {family}")
    wait_until(lambda: not any(map(Path.exists, segments)), 5, f"{segments} are unlinked")
    (folder,) = short.glob(f"{vllm_orphans.FOLDER}*")
    assert any(file.is_socket() for file in folder.iterdir())
    assert not any(file.is_socket() for file in short.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    vllm_orphans.sweep()
    assert not folder.exists()
    shutil.rmtree(short)


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _segments(process: psutil.Process) -> set[Path]:
    """Shared memory of Python's that a process has mapped."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return set()
    paths = {line.split()[-1] for line in maps.splitlines() if "/dev/shm/psm_" in line}
    return {Path(path) for path in paths if path.startswith("/")}

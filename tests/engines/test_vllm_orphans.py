"""What is left of vLLM when the process that started it is killed or stopped: nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
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
#: Starts an engine, says so, waits, and unloads it on SIGTERM.
SCRIPT = """
import asyncio, signal, sys
from pathlib import Path
from engine_helpers import loaded, stage

async def main():
    args = {"max_model_len": 64}
    engine = await loaded(stage(Path(sys.argv[1]), "ar", engine="vllm", engine_args=args))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("ready", flush=True)
    await stop.wait()
    await engine.unload()

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
    # pytest's own folders have names too long for sockets in them.
    short = Path(tempfile.mkdtemp(prefix="o"))
    process, family, segments = _started(model, tmp_path, short)
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


def test_a_signal_to_the_whole_group_ends_vllm_before_the_worker(
    model: Path, tmp_path: Path
) -> None:
    """Such as honcho's SIGTERM, or Ctrl-C: a second one must not cut the engine's end short."""
    short = Path(tempfile.mkdtemp(prefix="o"))
    process, family, segments = _started(model, tmp_path, short)
    holders = [p for p in family if _segments(p)]
    assert process.pid not in {os.getpgid(p.pid) for p in holders}
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0
    assert not any(map(_alive, holders)), "vLLM's processes outlive the worker"
    wait_until(lambda: not any(map(Path.exists, segments)), 20, f"{segments} are unlinked")
    shutil.rmtree(short)


def _started(
    model: Path, folder: Path, sockets: Path
) -> tuple[subprocess.Popen[str], list[psutil.Process], set[Path]]:
    """A group of processes with an engine: its first one, the others, their shared memory."""
    script = folder / "start.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(model)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "TMPDIR": str(sockets)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert any("ready" in line for line in process.stdout), "the engine has not started"
    family = psutil.Process(process.pid).children(recursive=True)
    segments = {path for p in family for path in _segments(p)}
    assert segments, "vLLM's processes share memory"
    return process, family, segments


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

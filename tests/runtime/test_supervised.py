"""`honcho start` and `omniq up`: the whole system in one command, and nothing left after Ctrl-C."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from omniq_process import alive, descendants
from stand_in import stand_in
from support import free_port, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


class Supervised:
    """A supervisor in a process group of its own, as a terminal starts it."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.command, self.log = command, folder / "output.log"
        self.namespace = f"ns{free_port()}x{os.getpid()}"
        self.api, self.flower, self.broker = free_port(), free_port(), free_port()
        self.env = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "OMNIQ_NAMESPACE": self.namespace,
            "OMNIQ_DATA_DIR": str(folder / "data"),
            "OMNIQ_API_PORT": str(self.api),
            "OMNIQ_FLOWER_PORT": str(self.flower),
            "OMNIQ_BROKER_PORT": str(self.broker),
            "OMNIQ_FLOWER_AUTH": "me:secret",
        }
        self.processes: list[psutil.Process] = []
        self.start()

    def start(self) -> None:
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.env,
            )

    def output(self) -> str:
        return self.log.read_text()

    def wait_ready(self, timeout: float = 150) -> None:
        def done() -> bool:
            assert self.process.poll() is None, self.output()[-4000:]
            return "is ready." in self.output()

        wait_until(done, timeout, "the system is ready")
        self.processes = descendants(self.process.pid)
        assert len(self.processes) > 6

    def segments(self) -> list[str]:
        return [f.name for f in Path("/dev/shm").iterdir() if self.namespace in f.name]

    def ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def assert_nothing_left(self) -> None:
        wait_until(
            lambda: not alive(self.processes),
            12,
            f"no process left; output:\n{self.output()[-3000:]}",
        )
        assert not self.segments()
        assert "SIGKILL" not in self.output()

    def kill_all(self) -> None:
        if self.process.poll() is None:
            self.processes += descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        for process in alive(self.processes):
            process.kill()


@pytest.fixture
def stand_in_up(tmp_path: Path) -> Iterator[Supervised]:
    with stand_in(tmp_path, first={"slow": 3}):
        up = Supervised([sys.executable, "-m", "omniq", "up", "--pipeline", "stand-in"], tmp_path)
        yield up
        up.kill_all()


def post(up: Supervised, prompt: str) -> httpx.Response:
    body = {"pipeline": "stand-in", "input": {"prompt": prompt}}
    return httpx.post(f"http://127.0.0.1:{up.api}/v1/jobs", json=body, timeout=10)


def test_up_serves_and_ctrl_c_leaves_nothing(stand_in_up: Supervised) -> None:
    up = stand_in_up
    up.wait_ready()
    job = post(up, "hello").json()
    done = httpx.get(f"http://127.0.0.1:{up.api}/v1/jobs/{job['id']}?wait=20", timeout=30).json()
    assert done["values"]["text"] == "HELLO"
    flower = f"http://127.0.0.1:{up.flower}/api/workers"
    assert httpx.get(flower, timeout=10).status_code == 401
    assert httpx.get(flower, auth=("me", "secret"), timeout=10).status_code == 200
    up.ctrl_c()
    up.process.wait(15)
    up.assert_nothing_left()


def test_jobs_under_way_survive_ctrl_c(stand_in_up: Supervised) -> None:
    """Given back to the queue by the workers, kept by the broker, finished by the next start."""
    up = stand_in_up
    up.wait_ready()
    job = post(up, "a slow job").json()["id"]
    url = f"http://127.0.0.1:{up.api}/v1/jobs/{job}"
    wait_until(lambda: httpx.get(url).json()["state"] == "running", 10, "it runs")
    up.ctrl_c()
    up.process.wait(15)
    up.assert_nothing_left()
    up.start()
    up.wait_ready()
    done = httpx.get(f"{url}?wait=40", timeout=60).json()
    assert done["values"]["text"] == "A SLOW JOB"


def test_killed_supervisor_takes_everything_with_it(stand_in_up: Supervised) -> None:
    up = stand_in_up
    up.wait_ready()
    up.process.kill()
    up.process.wait()
    wait_until(lambda: not alive(up.processes), 20, "all processes end")
    assert not up.segments()


def test_worker_that_ends_stops_the_system(stand_in_up: Supervised) -> None:
    up = stand_in_up
    up.wait_ready()
    worker = next(p for p in up.processes if "stand-in.second" in " ".join(p.cmdline()))
    worker.terminate()
    up.process.wait(20)
    up.assert_nothing_left()


@pytest.mark.timeout(300)
def test_repository_procfile_serves_tiny_omni_by_the_printed_curl_line(tmp_path: Path) -> None:
    up = Supervised([str(BIN / "honcho"), "start", "--no-colour"], tmp_path)
    try:
        up.wait_ready(240)
        line = next(li for li in up.output().splitlines() if "curl " in li)
        command = shlex.split(line[line.index("curl ") :])
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
        up.ctrl_c()
        up.process.wait(15)
        up.assert_nothing_left()
    finally:
        up.kill_all()

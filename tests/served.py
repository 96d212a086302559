"""`omniq serve` of a tiny language model as a real system, for the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from omniq_process import alive, descendants
from support import free_port, wait_until
from tiny_models import make_language_model, make_tokenizer

from omniq.engines.registry import vllm_installed

BIN = Path(sys.executable).parent
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def make_model(folder: Path) -> Path:
    """A language model of 256 positions with a chat template; says different things."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_language_model(tokenizer).save_pretrained(folder)
    return folder


def serve_omni(folder: Path, *flags: str) -> list[str]:
    """vLLM's own command line, or where vLLM is not installed omniq's that does the same."""
    if vllm_installed():
        return [str(BIN / "vllm"), "serve", str(folder), "--omni", *flags]
    return [sys.executable, "-m", "omniq", "serve", str(folder), *flags]


def run_example(script: str, *args: str | Path) -> str:
    """What a script of examples/ prints; it must end well."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


class Served:
    """A running ``serve`` command."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.log, self.port = folder / "serve.log", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        settings = {
            "OMNIQ_NAMESPACE": f"serve{self.port}",
            "OMNIQ_DATA_DIR": str(folder / "data"),
            "OMNIQ_BROKER_PORT": str(broker := free_port()),
            "OMNIQ_HEARTBEAT": "0.3",
        }
        self.env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **settings}
        #: Settings of a Python client, or of a command, that is to use this system.
        self.client_settings = {
            **settings,
            "OMNIQ_BROKER_URL": f"redis://127.0.0.1:{broker}/0",
            "OMNIQ_PIPELINES": json.dumps([str(folder / "data" / "serve")]),
        }
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.env,
                cwd=folder,
            )

    def wait_ready(self, timeout: float) -> None:
        def done() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            return "is ready." in self.log.read_text()

        wait_until(done, timeout, "the model is served")

    def stop(self) -> list[psutil.Process]:
        """Ctrl-C; returns what has not ended with it."""
        children = descendants(self.process.pid)
        self.process.send_signal(signal.SIGINT)
        self.process.wait(20)
        wait_until(lambda: not alive(children), 12, "all processes end")
        return alive(children)

    def kill(self) -> None:
        """End what still runs, at once, and remove its shared memory."""
        if self.process.poll() is None:
            for process in [*descendants(self.process.pid), psutil.Process(self.process.pid)]:
                if not _unlinks(process):
                    process.kill()
        self.process.wait()
        for slab in Path("/dev/shm").glob(f"{self.env['OMNIQ_NAMESPACE']}.slab.*"):
            slab.unlink(missing_ok=True)


def _unlinks(process: psutil.Process) -> bool:
    """Whether it is Python's resource tracker: it unlinks vLLM's shared memory once all others of
    its group have ended, and then ends.
    """
    try:
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return True


@contextmanager
def served(folder: Path, *command: str, timeout: float = 120) -> Iterator[Served]:
    """The command as a running system, killed at the end."""
    running = Served(list(command), folder)
    try:
        running.wait_ready(timeout)
        yield running
    finally:
        running.kill()

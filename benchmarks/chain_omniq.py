"""omniq as ``chain.py`` drives it: real workers, late acks, durable status, leases, events."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import uvloop

FOLDER = Path(__file__).parent
STAGES = ("first", "middle", "last")


class Omniq:
    """Three stage workers and a client of the job store in this process, where the API has it."""

    name = "omniq"

    def __init__(self, socket: str, logs: Path) -> None:
        os.environ.update(
            OMNIQ_BROKER_URL=f"redis+socket://{socket}",
            OMNIQ_PIPELINES=json.dumps([str(FOLDER / "chain.yaml")]),
            PYTHONPATH=os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
        )
        self.workers = []
        for stage in STAGES:
            with (logs / f"omniq-{stage}.log").open("wb") as log:
                command = [sys.executable, "-m", "omniq", "worker", "--pipeline", "chain",
                           "--stage", stage, "--devices", "cpu"]  # fmt: skip
                self.workers.append(subprocess.Popen(command, stdout=log, stderr=log))
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.runner.run(self._connect(logs))

    @property
    def processes(self) -> list[int]:
        """Whose CPU time counts, beside this process and the server."""
        return [w.pid for w in self.workers]

    async def _connect(self, logs: Path) -> None:
        from omniq.jobs.store import JobStore

        self.store = JobStore.from_settings()
        deadline = time.monotonic() + 60
        for stage in STAGES:
            log = logs / f"omniq-{stage}.log"
            while "stage_ready" not in log.read_text():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"stage {stage} did not get ready:\n{log.read_text()}")
                await asyncio.sleep(0.05)

    async def _one(self, number: int) -> int:
        from omniq.submit import submit

        inputs = {"number": str(number)}
        record = await submit(self.store, pipeline="chain", inputs=inputs, awaited=True)
        record = await self.store.wait(record.id, 60)
        return int(record.values["number"])

    def drive(self, numbers: range, in_flight: int) -> list[float]:
        """Seconds of each request, so many at a time."""
        return self.runner.run(self._drive(numbers, in_flight))

    async def _drive(self, numbers: range, in_flight: int) -> list[float]:
        rest, seconds = iter(numbers), []

        async def client() -> None:
            for number in rest:
                began = time.perf_counter()
                assert await self._one(number) == number, "another request's answer"
                seconds.append(time.perf_counter() - began)

        await asyncio.gather(*(client() for _ in range(in_flight)))
        return seconds

    def close(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.wait(20)

"""A system under load, what is done to it, and whether anything was lost, doubled or left."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from chaos_checks import Checks, Tally
from chaos_faults import Faults
from chaos_load import Load
from chaos_processes import LEASE, STAGES, Processes
from support import Valkey

from omniq.config import available_pipelines
from omniq.jobs.workers import WorkerRegistry, WorkerState
from omniq.settings import get_settings

STAGE = (
    '{{stage_id: {name}, engine_type: AR, engine: "chaos_engines:Link", model: none, '
    "max_in_flight: 4, retry: {{max_retries: 50, backoff: 0.1, backoff_max: 1, "
    "max_deliveries: {most}}}}}"
)
YAML = """
name: chaos
inputs: {{prompt: {{type: text}}}}
stages:
{stages}
edges:
  - {{from: input.prompt, to: make.prompt}}
  - {{from: make.text, to: change.made}}
  - {{from: change.text, to: sum.changed}}
outputs: {{text: {{from: sum.text, type: text}}}}
"""
#: Faults between two lines that say how far a run is.
SAY = 20


class ChaosSystem:
    """Broker, API and workers; one :meth:`run` each.

    Args:
        each: workers of each stage.
        most_deliveries: of a stage's message, before its job fails.
        trouble, poison: see :class:`chaos_load.Load`.
    """

    def __init__(
        self,
        folder: Path,
        valkey: Valkey,
        seed: int,
        *,
        each: int = 1,
        most_deliveries: int = 6,
        trouble: int = 20,
        poison: int = 60,
    ) -> None:
        self.folder, self.valkey, self.seed = folder, valkey, seed
        self.most_deliveries, self.trouble, self.poison = most_deliveries, trouble, poison
        self.processes = Processes(folder, valkey, each=each)

    def environment(self) -> dict[str, str]:
        """Settings of all processes, this one included."""
        most = self.most_deliveries
        stages = "\n".join(f"  - {STAGE.format(name=s, most=most)}" for s in STAGES)
        (self.folder / "chaos.yaml").write_text(YAML.format(stages=stages))
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        return {
            "OMNIQ_BROKER_URL": self.valkey.url,
            "OMNIQ_PIPELINES": json.dumps([str(self.folder / "chaos.yaml")]),
            "OMNIQ_DEFAULT_PIPELINE": "chaos",
            "OMNIQ_VISIBILITY_TIMEOUT": str(LEASE),
            "OMNIQ_HEARTBEAT": "0.5",
            "OMNIQ_RECONCILE_INTERVAL": "2",
            "OMNIQ_RETENTION": "7200",
            "OMNIQ_SHM_DIR": str(self.folder / "shm"),
            # Full again and again: what does not fit has to take another way.
            "OMNIQ_SHM_MAX_BYTES": str(2 << 20),
            "CHAOS_FOLDER": str(self.folder),
            "PYTHONPATH": os.pathsep.join(paths),
        }

    async def run(self, *, jobs: int, faults: int, pause: float, say: bool = False) -> Tally:
        """Load the system and strike it so many times, ``pause`` seconds apart on average."""
        began, processes = time.monotonic(), self.processes
        rng = random.Random(self.seed)
        load = Load(processes, rng, trouble=self.trouble, poison=self.poison)
        struck = Faults(processes, load, rng)
        tally = Tally(self.seed, faults=struck.done)
        checks = Checks(tally, load, processes)
        tending = feeding = None
        try:
            processes.start_all()
            await self._idle(load)
            processes.look_at_idle()
            tending = asyncio.create_task(self._tend_on())
            feeding = asyncio.create_task(load.feed(jobs, faults * pause))
            for number in range(faults):
                await struck.strike()
                if say and number % SAY == 0:
                    print(f"{number} faults, {load.accepted} jobs accepted", flush=True)
                await asyncio.sleep(rng.uniform(0.5, 1.5) * pause)
            await struck.complete()
            await feeding
            await checks.settle()
            await load.close()
            await self._ready(load)
            await checks.let_go()
        finally:
            for task in (tending, feeding):
                if task is not None:
                    task.cancel()
            tally.left += processes.stop_all()
            await load.store.close()
        checks.leftovers()
        processes.mount.close()
        tally.accepted, tally.refused, tally.wrong = load.accepted, load.refused, [
            *tally.wrong, *load.wrong,
        ]  # fmt: skip
        tally.readers = (load.read_to_the_end, load.cut_off)
        if not processes.mount.mounted:
            tally.notes.append(f"no tmpfs could be mounted: {processes.mount.why_not}")
        tally.seconds = time.monotonic() - began
        return tally

    async def _tend_on(self) -> None:
        while True:
            self.processes.tend()
            await asyncio.sleep(0.1)

    async def _ready(self, load: Load) -> None:
        """Wait until the workers and the API are."""
        registry, url = (
            WorkerRegistry(load.store.redis),
            f"http://127.0.0.1:{self.processes.api_port}",
        )
        async with asyncio.timeout(60), httpx.AsyncClient() as http:
            while True:
                pids = set(self.processes.workers().values())
                ready = {w.pid for w in await registry.all() if w.state is WorkerState.READY}
                try:
                    answered = (await http.get(f"{url}/ready")).status_code == 200
                except httpx.HTTPError:
                    answered = False
                if answered and pids <= ready:
                    return
                await asyncio.sleep(0.1)

    async def _idle(self, load: Load) -> None:
        """Have a few jobs run, so that all is there that is made at first use, and end."""
        await self._ready(load)
        async with httpx.AsyncClient(timeout=5) as http:
            ids = [await load.add(http, -number) for number in range(1, 6)]
        await load.read_slowly(ids[0])
        for job_id in ids:
            assert (record := await load.store.wait(job_id, 30)) and record.state.final, job_id
        async with asyncio.timeout(30):
            while not load.read_to_the_end:  # as a slow reader does whom nobody cuts off
                await asyncio.sleep(0.1)


def use(environment: dict[str, str]) -> None:
    """Let this process have the settings, too."""
    os.environ.update(environment)
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()


def report(tally: Tally, log: Any = None) -> None:
    """Print a run's table."""
    print(tally.table(), file=log or sys.stdout, flush=True)

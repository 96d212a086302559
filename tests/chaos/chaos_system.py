"""A system under load, what is done to it, and whether anything was lost, doubled or left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import chaos_engines
import httpx
import redis
from support import Valkey, blobs_in, free_port

from omniq import keys
from omniq.celery import queue_keys
from omniq.config import available_pipelines
from omniq.errors import OmniqError
from omniq.jobs.model import JobRecord, JobState
from omniq.jobs.store import JobStore
from omniq.settings import get_settings
from omniq.submit import submit

STAGES = ("make", "change", "sum")
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
#: Seconds of a lease; a stopped process stays so for longer than that.
LEASE, STOPPED = 2.0, 3.5
#: So long a job may take once nothing is done to the system any more.
PATIENCE = 60.0
#: So long what killed workers have written to Redis may stay after that: some leases.
SWEPT = 5 * LEASE
#: Keys that have no time to live, because they describe the system and not its jobs.
LASTING = ("_kombu.", "omniq:jobs", "omniq:workers", "omniq:waiting:", "unacked_mutex")


@dataclass
class Tally:
    """What a run came to."""

    accepted: int = 0
    refused: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.lost or self.doubled or self.unequal or self.wrong or self.left)

    def table(self) -> str:
        """For people."""
        rows = [
            ("jobs accepted", self.accepted),
            ("submissions refused or unanswered", self.refused),
            *((f"fault: {name}", count) for name, count in sorted(self.faults.items())),
            ("faults", self.faults.total()),
            *((f"ended as {name}", count) for name, count in sorted(self.states.items())),
            ("runs of stages begun", self.attempts),
            ("lost", len(self.lost)),
            ("doubled", len(self.doubled)),
            ("byte-unequal", len(self.unequal)),
            ("wrong final state", len(self.wrong)),
            ("left behind", len(self.left)),
            ("seconds", round(self.seconds)),
        ]
        lines = [f"{name:<36}{value:>8}" for name, value in rows]
        for name in ("lost", "doubled", "unequal", "wrong", "left"):
            lines += [f"{name}: {item}" for item in getattr(self, name)[:10]]
        return "\n".join(lines)


class ChaosSystem:
    """Broker, API and workers as processes that are started again whenever they end.

    Args:
        each: workers of each stage.
    """

    def __init__(self, folder: Path, valkey: Valkey, seed: int, *, each: int = 1) -> None:
        self.folder, self.valkey, self.rng = folder, valkey, random.Random(seed)
        self.tally = Tally()
        self.shm = folder / "shm"
        self.shm.mkdir()
        self.api_port = free_port()
        worker = ("worker", "--pipeline", "chaos", "--devices", "cpu", "--stage")
        self.commands = {
            f"{stage}-{n}": (*worker, stage) for stage in STAGES for n in range(each)
        } | {"api": ("api", "--port", str(self.api_port))}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: dict[str, float] = {}
        self.client = redis.Redis(port=valkey.port)
        self.prompts: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self._cancelling: set[asyncio.Task[None]] = set()

    # -- settings ------------------------------------------------------------------------------

    def environment(self, most_deliveries: int = 30) -> dict[str, str]:
        """Settings of all processes, this one included."""
        stages = "\n".join(f"  - {STAGE.format(name=s, most=most_deliveries)}" for s in STAGES)
        (self.folder / "chaos.yaml").write_text(YAML.format(stages=stages))
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        return {
            "OMNIQ_BROKER_URL": self.valkey.url,
            "OMNIQ_PIPELINES": json.dumps([str(self.folder / "chaos.yaml")]),
            "OMNIQ_DEFAULT_PIPELINE": "chaos",
            "OMNIQ_VISIBILITY_TIMEOUT": str(LEASE),
            "OMNIQ_HEARTBEAT": "0.5",
            "OMNIQ_RECONCILE_INTERVAL": "2",
            "OMNIQ_RETENTION": "3600",
            "OMNIQ_SHM_DIR": str(self.shm),
            # Full again and again: what does not fit has to take another way.
            "OMNIQ_SHM_MAX_BYTES": str(2 << 20),
            "CHAOS_FOLDER": str(self.folder),
            "PYTHONPATH": os.pathsep.join(paths),
        }

    # -- processes -----------------------------------------------------------------------------

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "omniq", *self.commands[name]],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def start_all(self) -> None:
        for name in self.commands:
            self.start(name)

    def tend(self) -> None:
        """Start what has ended, and let what was stopped go on."""
        now = time.monotonic()
        for name in [n for n, until in self.stopped.items() if now > until]:
            del self.stopped[name]
            self.processes[name].send_signal(signal.SIGCONT)
        for name, process in list(self.processes.items()):
            if process.poll() is not None:
                self.stopped.pop(name, None)
                self.start(name)

    def stop_all(self) -> None:
        for name in self.stopped:
            self.processes[name].send_signal(signal.SIGCONT)
        self.stopped.clear()
        for process in self.processes.values():
            process.terminate()
        for name, process in self.processes.items():
            try:
                code = process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = "killed: it did not stop"
            if code != 0:
                self.tally.left.append(f"{name} ended with {code}")

    # -- faults --------------------------------------------------------------------------------

    @property
    def faults(self) -> dict[str, tuple[int, Callable[[], Awaitable[None]]]]:
        """By name: how often, relative to the others, and what is done."""
        return {
            "worker killed": (6, self.kill_worker),
            "worker stopped": (3, self.stop_worker),
            "API killed": (2, self.kill_api),
            "broker restarted": (1, self.restart_broker),
            "connections reset": (3, self.reset_connections),
            "message delivered twice": (4, self.deliver_twice),
            "queue purged": (2, self.purge),
            "broker's memory full": (2, self.fill_memory),
        }

    async def strike(self) -> None:
        """One fault: each kind once, in any order, then by chance."""
        names = list(self.faults)
        left = [n for n in names if not self.tally.faults[n]]
        weights = [self.faults[n][0] for n in names]
        name = self.rng.choice(left) if left else self.rng.choices(names, weights)[0]
        with contextlib.suppress(redis.ConnectionError):  # it is away just now
            await self.faults[name][1]()
            self.tally.faults[name] += 1

    def _victim(self) -> str:
        workers = [n for n in self.processes if n != "api" and n not in self.stopped]
        return self.rng.choice(workers or [n for n in self.processes if n != "api"])

    async def kill_worker(self) -> None:
        self.processes[self._victim()].kill()

    async def stop_worker(self) -> None:
        name = self._victim()
        self.processes[name].send_signal(signal.SIGSTOP)
        self.stopped[name] = time.monotonic() + STOPPED

    async def kill_api(self) -> None:
        self.processes["api"].kill()

    async def restart_broker(self) -> None:
        kill = self.rng.random() < 0.5
        await asyncio.to_thread(self.valkey.stop, kill=kill)
        await asyncio.sleep(self.rng.uniform(0, 1))
        await asyncio.to_thread(self.valkey.start)

    async def reset_connections(self) -> None:
        for kind in ("normal", "pubsub"):
            self.client.client_kill_filter(_type=kind, skipme=True)

    async def deliver_twice(self) -> None:
        """What a worker holds, or what waits, is in a queue once more."""
        held = [json.loads(r) for r in self.client.hvals(keys.unacked())]
        queues = [k for s in STAGES for k in queue_keys(keys.stage_queue("chaos", s))]
        found = [(m, rk) for m, _, rk in held]
        found += [
            (json.loads(m), k.split("\x06")[0]) for k in queues for m in self.client.lrange(k, 0, 9)
        ]
        found = [f for f in found if f[0]["headers"].get("task") == "omniq.stage"]
        if found:
            message, queue = self.rng.choice(found)
            message["properties"]["delivery_tag"] = str(uuid4())
            if self.rng.random() < 0.5:
                message["headers"]["redelivered"] = True
                message["properties"]["delivery_info"]["redelivered"] = True
            self.client.lpush(queue, json.dumps(message))

    async def purge(self) -> None:
        stage = self.rng.choice(STAGES)
        self.client.delete(*queue_keys(keys.stage_queue("chaos", stage)))

    async def fill_memory(self) -> None:
        self.client.config_set("maxmemory", "100kb")
        await asyncio.sleep(self.rng.uniform(0.2, 1.5))
        while True:
            try:
                self.client.config_set("maxmemory", "0")
            except redis.ConnectionError:
                await asyncio.sleep(0.1)
            else:
                return

    # -- load ----------------------------------------------------------------------------------

    async def feed(self, store: JobStore, jobs: int, seconds: float) -> None:
        """Submit that many jobs in about that time, by HTTP and by Python in turn."""
        began = time.monotonic()
        async with httpx.AsyncClient(timeout=5) as http:
            for number in range(jobs):
                prompt = f"job {number} of {self.rng.random()}"
                if number % 20 == 7:
                    prompt += " die=1"
                job_id = await self._accepted(store, http, prompt, number % 2 == 0)
                self.prompts[job_id] = prompt
                self.tally.accepted += 1
                if number % 10 == 3:
                    self.cancelled.add(job_id)
                    asyncio.get_running_loop().call_later(
                        self.rng.uniform(0, 0.5), self._cancel_soon, store, job_id
                    )
                due = began + seconds * (number + 1) / jobs
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def _accepted(
        self, store: JobStore, http: httpx.AsyncClient, prompt: str, by_http: bool
    ) -> str:
        while True:
            try:
                if not by_http:
                    record = await submit(store, pipeline="chaos", inputs={"prompt": prompt})
                    return record.id
                answer = await http.post(
                    f"http://127.0.0.1:{self.api_port}/v1/jobs",
                    json={"pipeline": "chaos", "input": {"prompt": prompt}},
                )
                if answer.status_code == 202:
                    return str(answer.json()["id"])
                if answer.status_code != 503:
                    self.tally.wrong.append(f"submission: {answer.status_code} {answer.text}")
            except (OmniqError, httpx.HTTPError):
                pass
            self.tally.refused += 1
            await asyncio.sleep(0.2)

    def _cancel_soon(self, store: JobStore, job_id: str) -> None:
        async def cancel() -> None:
            while True:
                try:
                    await store.cancel(job_id)
                except OmniqError:
                    await asyncio.sleep(0.3)
                else:
                    return

        task = asyncio.create_task(cancel())
        self._cancelling.add(task)

    # -- the whole -----------------------------------------------------------------------------

    async def run(self, *, jobs: int, faults: int, pause: float) -> Tally:
        """Load the system and strike it so many times, ``pause`` seconds apart on average."""
        began = time.monotonic()
        store = JobStore.from_settings()
        self.start_all()
        tending = asyncio.create_task(self._tend_on())
        feeding = asyncio.create_task(self.feed(store, jobs, faults * pause))
        try:
            await asyncio.sleep(3)
            for _ in range(faults):
                await self.strike()
                await asyncio.sleep(self.rng.uniform(0.5, 1.5) * pause)
            await feeding
            await self._settle(store)
        finally:
            feeding.cancel()
            tending.cancel()
            await asyncio.gather(feeding, tending, return_exceptions=True)
            self.stop_all()
            await store.close()
        self._look_for_leftovers()
        self.tally.seconds = time.monotonic() - began
        return self.tally

    async def _tend_on(self) -> None:
        while True:
            self.tend()
            await asyncio.sleep(0.1)

    async def _settle(self, store: JobStore) -> None:
        """Wait for every job's end, then look at each."""
        deadline = time.monotonic() + PATIENCE
        waiting = {i.decode() for i in self.client.zrange(keys.jobs_index(), 0, -1)}
        waiting |= set(self.prompts)
        while waiting:
            for job_id in sorted(waiting):
                record = await store.get(job_id)
                if record.state.final:
                    waiting.discard(job_id)
                    await self._check(store, record)
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.2)
        for job_id in waiting:
            record = await store.get(job_id)
            stages = {n: (s.state.value, s.attempts) for n, s in record.stages.items()}
            self.tally.lost.append(f"{job_id} {record.state} {stages}")
        # What a killed worker had written and not recorded is found by the others.
        deadline = time.monotonic() + SWEPT
        while self._blobs() and time.monotonic() < deadline:
            await asyncio.sleep(0.2)

    def _blobs(self) -> list[bytes]:
        """Keys of blobs in Redis, whole and half written, and of the notes of them."""
        found = ("omniq:blob:*", "omniq:part:*", keys.blob_notes())
        return [key for pattern in found for key in self.client.scan_iter(pattern, count=1000)]

    async def _check(self, store: JobStore, record: JobRecord) -> None:
        tally = self.tally
        tally.states[record.state.value] += 1
        tally.attempts += sum(s.attempts for s in record.stages.values())
        types = Counter[tuple[str, str | None]]()
        async for event in store.events(record.id):
            if event is not None:
                types[event.type, event.stage] += 1
        ends = sum(n for (kind, _), n in types.items() if kind == f"job.{record.state.value}")
        if ends != 1:
            tally.doubled.append(f"{record.id} ended {ends} times")
        for stage in STAGES:
            done = types["stage.succeeded", stage]
            if done > 1 or (done == 0 and record.state is JobState.SUCCEEDED):
                tally.doubled.append(f"{record.id} {stage} succeeded {done} times")
        prompt = str(record.spec.inputs["prompt"])
        if record.state is JobState.SUCCEEDED:
            if record.values["text"] != chaos_engines.expected(prompt):
                tally.unequal.append(record.id)
        elif record.state is not JobState.CANCELLED or record.id not in self.cancelled:
            tally.wrong.append(f"{record.id} {record.state} {record.error}")

    def _look_for_leftovers(self) -> None:
        left = self.tally.left
        left += [f"shared memory: {b}" for b in blobs_in(self.shm)]
        held = self.client.hlen(keys.unacked()) + self.client.zcard(f"{keys.unacked()}_index")
        if held:
            left.append(f"{held} messages are noted as held")
        left += [f"unfinished: {i!r}" for i in self.client.zrange(keys.open_jobs("chaos"), 0, -1)]
        left += [f"blob in Redis: {key!r}" for key in self._blobs()]
        for key in self.client.scan_iter(count=1000):
            name = key.decode(errors="replace")
            if ":" in name and self.client.ttl(key) == -1 and not name.startswith(LASTING):
                left.append(f"key without expiry: {name}")


def use(environment: dict[str, str]) -> None:
    """Let this process have the settings, too."""
    os.environ.update(environment)
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()


def report(tally: Tally, log: Any = None) -> None:
    """Print a run's table."""
    print(tally.table(), file=log or sys.stdout, flush=True)

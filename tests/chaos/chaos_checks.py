"""What a run came to: the end of every job, and what is left."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import chaos_engines
import redis
from chaos_load import Load
from chaos_processes import FILES_SLACK, LEASE, MEMORY_SLACK, STAGES, Processes
from support import blobs_in

from omniq import keys
from omniq.jobs.dead import DeadLetters
from omniq.jobs.model import JobRecord, JobState

#: So long nothing may end, with jobs unfinished, once nothing is done to the system any more.
PATIENCE = 90.0
#: So long what killed workers have written to Redis may stay after that: some leases.
SWEPT = 5 * LEASE
#: How long what a process holds may take to be let go of.
CALM = 30.0
#: Keys that have no time to live, because they describe the system and not its jobs.
LASTING = (
    "_kombu.",
    "omniq:dead",
    "omniq:jobs",
    "omniq:workers",
    "omniq:waiting:",
    "unacked_mutex",
)
#: How each kind of poison ends its job.
CODES = {"kill": "delivery_limit", "invalid": "invalid_request", "error": "engine_error"}


@dataclass
class Tally:
    """The table of a run."""

    seed: int
    accepted: int = 0
    refused: int = 0
    poison: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    attempts: int = 0
    readers: tuple[int, int] = (0, 0)
    files: int = 0
    memory: int = 0
    oldest: float = 0.0
    to_redis: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.lost or self.doubled or self.unequal or self.wrong or self.left)

    def table(self) -> str:
        """For people."""
        rows: list[tuple[str, object]] = [
            ("seed", self.seed),
            ("jobs accepted", self.accepted),
            ("submissions refused or unanswered", self.refused),
            *((f"poison: {name}", count) for name, count in sorted(self.poison.items())),
            *((f"fault: {name}", count) for name, count in sorted(self.faults.items())),
            ("faults", self.faults.total()),
            *((f"ended as {name}", count) for name, count in sorted(self.states.items())),
            ("runs of stages begun", self.attempts),
            ("slow readers that saw the end", self.readers[0]),
            ("slow readers that were cut off", self.readers[1]),
            ("blobs refused for want of shared memory", self.to_redis),
            ("lost", len(self.lost)),
            ("doubled", len(self.doubled)),
            ("byte-unequal", len(self.unequal)),
            ("wrong final state", len(self.wrong)),
            ("left behind", len(self.left)),
            ("open files above idle, the most", self.files),
            ("MB above idle, the most", self.memory >> 20),
            ("age of the oldest process, s", round(self.oldest)),
            ("seconds", round(self.seconds)),
        ]
        lines = [f"{name:<42}{value!s:>8}" for name, value in rows]
        for name in ("lost", "doubled", "unequal", "wrong", "left"):
            lines += [f"{name}: {item}" for item in getattr(self, name)[:10]]
        return "\n".join(lines + self.notes)


class Checks:
    """Fills a tally in."""

    def __init__(self, tally: Tally, load: Load, processes: Processes) -> None:
        self.tally, self.load, self.processes = tally, load, processes
        self.client = redis.Redis(port=processes.valkey.port)

    async def settle(self) -> None:
        """Wait for every job's end, then look at each."""
        deadline = time.monotonic() + PATIENCE
        waiting = {i.decode() for i in self.client.zrange(keys.jobs_index(), 0, -1)}
        waiting |= set(self.load.prompts)
        while waiting and time.monotonic() < deadline:
            for job_id in sorted(waiting):
                record = await self.load.store.get(job_id)
                if record.state.final:
                    waiting.discard(job_id)
                    await self._check(record)
                    deadline = time.monotonic() + PATIENCE
            await asyncio.sleep(0.2)
        for job_id in waiting:
            record = await self.load.store.get(job_id)
            stages = {n: (s.state.value, s.attempts) for n, s in record.stages.items()}
            prompt = record.spec.inputs["prompt"]
            self.tally.lost.append(f"{job_id} {record.state} {stages} {prompt}")
        # What a killed worker had written and not recorded is found by the others.
        deadline = time.monotonic() + SWEPT
        while self._blobs() and time.monotonic() < deadline:
            await asyncio.sleep(0.2)

    def _blobs(self) -> list[bytes]:
        """Keys of blobs in Redis, whole and half written, and of the notes of them."""
        found = ("omniq:blob:*", "omniq:part:*", keys.blob_notes())
        return [key for pattern in found for key in self.client.scan_iter(pattern, count=1000)]

    async def _check(self, record: JobRecord) -> None:
        tally = self.tally
        tally.states[record.state.value] += 1
        tally.attempts += sum(s.attempts for s in record.stages.values())
        types = Counter[tuple[str, str | None]]()
        async for event in self.load.store.events(record.id):
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
        _, poisoned, poison = prompt.partition("poison=")
        if poisoned:
            tally.poison[poison] += 1
            code = (record.error or {}).get("code")
            if record.state is not JobState.FAILED or code != CODES[poison]:
                tally.wrong.append(f"{record.id} {poison}: {record.state} {record.error}")
            if poison != "invalid":  # that is nobody's dead letter
                await DeadLetters(self.load.store).get(record.id)
        elif record.state is JobState.SUCCEEDED:
            if record.values["text"] != chaos_engines.expected(prompt):
                tally.unequal.append(record.id)
        elif record.state is not JobState.CANCELLED or record.id not in self.load.cancelled:
            tally.wrong.append(f"{record.id} {record.state} {record.error} {prompt}")

    async def let_go(self) -> None:
        """Wait until every process holds about what it held when it was idle at first."""
        deadline = time.monotonic() + CALM
        while True:
            files, memory = self.processes.more_than_idle()
            over = [f"{n} has {c} open files more" for n, c in files.items() if c > FILES_SLACK]
            over += [
                f"{n} has {b >> 20} MB more"
                for n, b in memory.items()
                if b > MEMORY_SLACK and n != "broker"  # which keeps the jobs
            ]
            if not over or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        self.tally.left += over
        self.tally.files = max(files.values(), default=0)
        self.tally.memory = max((b for n, b in memory.items() if n != "broker"), default=0)
        self.tally.oldest = self.processes.oldest()

    def leftovers(self) -> None:
        """Of what all processes, which have ended, should have taken along."""
        left = self.tally.left
        left += [f"shared memory: {b}" for b in blobs_in(self.processes.shm)]
        held = self.client.hlen(keys.unacked()) + self.client.zcard(f"{keys.unacked()}_index")
        if held:
            left.append(f"{held} messages are noted as held")
        left += [f"unfinished: {i!r}" for i in self.client.zrange(keys.open_jobs("chaos"), 0, -1)]
        left += [f"blob in Redis: {key!r}" for key in self._blobs()]
        for key in self.client.scan_iter(count=1000):
            name = key.decode(errors="replace")
            if ":" in name and self.client.ttl(key) == -1 and not name.startswith(LASTING):
                left.append(f"key without expiry: {name}")
        for log in self.processes.folder.glob("*.log"):
            self.tally.to_redis += log.read_bytes().count(b"no room for")

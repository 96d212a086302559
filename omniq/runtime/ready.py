"""Whether every stage of a pipeline has a ready worker, and why not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from omniq.config import PipelineConfig
from omniq.errors import BrokerUnavailable, NotReady
from omniq.jobs.workers import WorkerInfo, WorkerRegistry, WorkerState
from omniq.redis_client import connect
from omniq.runtime.machine import memory_line, shm_line

POLL = 0.1
LOG_LINES = 8


@dataclass(frozen=True, slots=True)
class StageReadiness:
    """One stage and the workers that report for it."""

    stage: str
    workers: list[WorkerInfo] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether one of them serves."""
        return any(w.state is WorkerState.READY for w in self.workers)

    @property
    def state(self) -> str:
        """``missing``, or the best state any of its workers is in."""
        order = [WorkerState.READY, WorkerState.LOADING, WorkerState.DRAINING, WorkerState.FAILED]
        states = {w.state for w in self.workers}
        return next((s.value for s in order if s in states), "missing")

    def explain(self) -> list[str]:
        """Lines for people: each worker's state, reason, device, memory and last log lines."""
        if not self.workers:
            return [f"stage {self.stage}: no worker has reported"]
        lines = []
        for w in self.workers:
            reason = f": {w.reason}" if w.reason else ""
            devices = ",".join(w.devices) or "cpu"
            lines.append(
                f"stage {self.stage}: worker {w.id} is {w.state.value} for "
                f"{max(0.0, time.time() - w.since):.0f} s{reason} "
                f"(pid {w.pid} on {w.hostname}, {devices}, {w.rss_bytes / 2**20:.0f} MiB)"
            )
            if w.state is not WorkerState.READY:
                lines += [f"    {line}" for line in w.last_log[-LOG_LINES:]]
        return lines


async def readiness(
    registry: WorkerRegistry, pipeline: PipelineConfig, pids: set[int] | None = None
) -> list[StageReadiness]:
    """Every stage in pipeline order. With ``pids`` only these processes' workers count.

    Raises:
        BrokerUnavailable: nobody can be asked.
    """
    workers = await registry.all(pipeline.name)
    return [
        StageReadiness(
            s.stage_id,
            [w for w in workers if w.stage == s.stage_id and (pids is None or w.pid in pids)],
        )
        for s in pipeline.stages
    ]


async def wait_ready(
    pipeline: PipelineConfig,
    timeout: float,
    *,
    pids: set[int] | None = None,
    on_change: Callable[[str, str], None] = lambda stage, state: None,
    check: Callable[[list[StageReadiness]], None] = lambda stages: None,
) -> None:
    """Wait until every stage has a ready worker; the broker itself may still be starting.

    Args:
        on_change: called with stage and state whenever a stage's state changes.
        check: called on every look; raises to give up early (a worker process has died).

    Raises:
        NotReady: not in time, with what is known of every stage that is missing.
    """
    redis = connect()
    registry = WorkerRegistry(redis)
    deadline = time.monotonic() + timeout
    stages = [StageReadiness(s.stage_id) for s in pipeline.stages]
    shown: dict[str, str] = {}
    trouble = "the broker has not answered"
    try:
        while True:
            try:
                stages = await readiness(registry, pipeline, pids)
                trouble = ""
            except BrokerUnavailable as exc:
                trouble = exc.message
            for stage in stages:
                if shown.get(stage.stage, "missing") != stage.state:
                    shown[stage.stage] = stage.state
                    on_change(stage.stage, stage.state)
            if not trouble and all(s.ready for s in stages):
                return
            check(stages)
            if time.monotonic() > deadline:
                raise not_ready(stages, f"not ready within {timeout:g} s", [trouble])
            await asyncio.sleep(POLL)
    finally:
        await redis.aclose()


def not_ready(stages: list[StageReadiness], what: str, more: list[str]) -> NotReady:
    """The error with its diagnostics: stages, then the machine's memory."""
    waiting = [s for s in stages if not s.ready]
    lines = [line for s in waiting for line in s.explain()]
    lines += [line for line in more if line]
    lines += [memory_line(), shm_line()]
    names = ", ".join(s.stage for s in waiting) or "none"
    return NotReady(
        f"stages {names}: {what}\n" + "\n".join(f"  {line}" for line in lines),
        hint="`omniq doctor` checks this machine; OMNIQ_READY_TIMEOUT allows more time",
        stages={s.stage: s.state for s in stages},
    )

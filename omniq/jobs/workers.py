"""The registry of live workers: who serves which stage, where, and in what state."""

from __future__ import annotations

import logging
from enum import StrEnum

from pydantic import BaseModel, Field, ValidationError

from omniq import keys
from omniq.blobs.choice import BlobUse
from omniq.jobs.admission import pool_pressure
from omniq.jobs.clock import ServerClock
from omniq.jobs.scripts import JobScripts
from omniq.redis_client import Client, broker_errors
from omniq.settings import get_settings

logger = logging.getLogger(__name__)

MISSED_BEATS = 5


class WorkerState(StrEnum):
    """Life of a worker."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class WorkerInfo(BaseModel):
    """What a worker says of itself with every heartbeat."""

    id: str
    pipeline: str
    stage: str
    engine: str = ""
    state: WorkerState
    reason: str | None = Field(None, description="Why it is not ready.")
    host: str = Field(description="Identity of the machine (boot id and shared-memory device).")
    hostname: str
    pid: int
    devices: list[str] = Field(default_factory=list)
    since: float = Field(description="Unix time of the present state.")
    seen: float = Field(description="Unix time of the last heartbeat.")
    in_flight: int = 0
    max_in_flight: int = 1
    rss_bytes: int = 0
    blobs: BlobUse | None = Field(None, description="Its blobs; null until it has loaded.")
    last_log: list[str] = Field(default_factory=list, description="Its last log lines.")


class WorkerRegistry:
    """Async access to the registry; raises BrokerUnavailable when Redis cannot be used."""

    def __init__(self, redis: Client) -> None:
        self.redis = redis
        self._clock = ServerClock(redis)
        self._run = JobScripts(redis).run
        self._strange = False

    async def beat(self, info: WorkerInfo) -> None:
        """Write one worker's status; without renewal it expires after five heartbeats.

        Besides, no jobs are accepted for its pipeline while its host's shared memory is near full,
        and jobs that are held back are let go if there is room. Of the status ``seen`` is set here.
        """
        info = info.model_copy(update={"seen": await self._clock.now()})
        ttl = int(get_settings().heartbeat * MISSED_BEATS * 1000)
        use = info.blobs
        full = None
        if use is not None and use.shared_memory:
            room = use.max_bytes - use.host_bytes + use.slab_bytes - use.used_bytes
            full = pool_pressure(room, use.max_bytes)
        with broker_errors():
            async with self.redis.pipeline(transaction=True) as pipe:
                pipe.set(keys.worker(info.id), info.model_dump_json(), px=ttl)
                pipe.zadd(keys.workers_index(), {info.id: info.seen})
                if full is not None:
                    pipe.set(keys.pool_full(info.pipeline), full, px=ttl)
                await pipe.execute()
        await self._run("let_go", "-", [info.pipeline])

    async def remove(self, worker_id: str) -> None:
        """Forget a worker that has stopped."""
        with broker_errors():
            async with self.redis.pipeline(transaction=True) as pipe:
                pipe.delete(keys.worker(worker_id))
                pipe.zrem(keys.workers_index(), worker_id)
                await pipe.execute()

    async def all(self, pipeline: str | None = None) -> list[WorkerInfo]:
        """Workers that are alive, in the order of their ids; without those of another version of
        omniq that say what this one cannot read.
        """
        workers = []
        for worker_id, status in (await self._statuses()).items():
            try:
                worker = WorkerInfo.model_validate_json(status)
            except ValidationError as exc:  # no reason not to hear the others; the log is told once
                if not self._strange:
                    logger.warning(
                        "worker %s, of another version of omniq, is left out: %s", worker_id, exc
                    )
                self._strange = True
                continue
            if pipeline is None or worker.pipeline == pipeline:
                workers.append(worker)
        return sorted(workers, key=lambda w: w.id)

    async def alive(self) -> set[str]:
        """Ids of all workers that are alive, of whichever version."""
        return set(await self._statuses())

    async def _statuses(self) -> dict[str, bytes]:
        """What each worker that is alive says of itself, by id."""
        # By one clock for all: those of the workers' hosts may differ.
        old = await self._clock.now() - 10 * MISSED_BEATS * get_settings().heartbeat
        with broker_errors():
            await self.redis.zremrangebyscore(keys.workers_index(), "-inf", old)
            # redis-py's own methods look up their signatures at every call; stages ask each second.
            ids = await self.redis.execute_command("ZRANGE", keys.workers_index(), 0, -1)
            if not ids:
                return {}
            names = [i.decode() for i in ids]
            raw = await self.redis.execute_command("MGET", *map(keys.worker, names))
        return {n: status for n, status in zip(names, raw, strict=True) if status is not None}

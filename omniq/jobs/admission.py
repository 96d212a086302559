"""Who is let in: what a new job asks of the script that records it (``lua/create.lua``).

The system has limits (unfinished jobs of a pipeline, messages that wait for a stage, the broker's
memory, bytes of input files, shared memory), a tenant has a share (jobs at once, a day, a second).
All of them are checked in the step that records the job, so that nobody gets past them between a
look and a leap, whoever submits. What is refused leaves no trace but its turn: the time after which
it is told to come back is taken from the pace at which jobs have ended lately, one place later for
each that was refused before it.

As soon as there are tenants, no more of a pipeline's jobs are put into its queues than keep its
workers busy. The others are held back and let go in turn, one of each tenant (start-time fair
queueing, ``lua/_share.lua``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from omniq import keys
from omniq.celery import celery_priority
from omniq.errors import ConfigError, Overloaded, Refused, ShareUsed
from omniq.redis_client import Client, broker_errors
from omniq.settings import Settings, get_settings

if TYPE_CHECKING:
    from omniq.config import PipelineConfig
    from omniq.jobs.model import JobSpec

TENANT = r"^[a-z0-9][a-z0-9_.-]{0,63}$"
LEVELS = range(10)
"""Priorities of jobs that are held back, the highest first."""
NOBODY = ""
"""The tenant of jobs that were submitted without a tenant's key; it has no share to keep."""


class Share(BaseModel):
    """What one tenant may use; None: without limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: str = Field(NOBODY, pattern=rf"^$|{TENANT}")
    rate: float | None = Field(None, gt=0, le=1e6, description="Jobs a second, on average.")
    burst: int = Field(1, ge=1, le=10**6, description="Jobs at once after a pause.")
    max_jobs: int | None = Field(None, ge=1, description="Unfinished jobs at the same time.")
    daily: int | None = Field(None, ge=1, description="Jobs a day (UTC).")
    max_priority: int = Field(9, ge=0, le=9, description="Highest priority of a job.")

    @cached_property
    def ask(self) -> dict[str, Any]:
        """As ``create.lua`` reads it."""
        limits = {"max_jobs": self.max_jobs, "daily": self.daily, "rate": self.rate}
        return {
            "tenant": self.tenant,
            "burst": self.burst,
            **{name: limit for name, limit in limits.items() if limit is not None},
        }

    def after(self, refused: Refused) -> Usage | None:
        """What is left after a refusal, as far as that tells."""
        if refused.limit == "daily_jobs":
            return Usage(today=0)
        if refused.limit == "rate" and self.rate is not None:
            return Usage(at_once=0, full_after=refused.retry_after + (self.burst - 1) / self.rate)
        return None


@dataclass(frozen=True, slots=True)
class Usage:
    """What is left of a share, as the last job that was let in, or refused, has found it."""

    today: int | None = None
    """Jobs left today."""
    at_once: int | None = None
    """Jobs that may come at once."""
    full_after: float = 0.0
    """Seconds until a whole burst may come again."""

    @classmethod
    def read(cls, answer: Sequence[bytes]) -> Usage:
        """From what ``create.lua`` says of a job that was let in."""
        today, at_once, full_after = answer
        return cls(
            int(today) if today else None,
            int(at_once) if at_once else None,
            float(full_after or 0),
        )


@dataclass(frozen=True, slots=True)
class Again:
    """By which key a request that is sent again is known, and what it must ask for."""

    key: str
    """The client's; of its tenant only."""
    print: str
    """Digest of what is asked for, without spaces."""


@dataclass(frozen=True)
class Admission:
    """The limits of one pipeline."""

    pipeline: str
    most: int
    """Unfinished jobs."""
    queues: Sequence[str]
    """Of its stages."""
    limits: Sequence[int]
    """Messages that may wait in each."""
    window: int
    """Messages in any of them that keep its workers busy."""

    @classmethod
    def of(cls, config: PipelineConfig) -> Admission:
        """Of a pipeline, by its file and the settings."""
        settings = get_settings()
        known = _KNOWN.get(config.name)
        # Jobs come by the thousand a second, files and settings stay as they are.
        if known is None or known[0] is not config or known[1] is not settings:
            known = _KNOWN[config.name] = (config, settings, cls._read(config, settings))
        return known[2]

    @classmethod
    def _read(cls, config: PipelineConfig, settings: Settings) -> Admission:
        return cls(
            pipeline=config.name,
            most=config.max_jobs or settings.max_jobs,
            queues=[keys.stage_queue(config.name, s.stage_id) for s in config.stages],
            limits=[s.max_waiting or settings.max_waiting for s in config.stages],
            # Twice what a worker takes: the next ones are there before it has ended with these.
            window=max(settings.fair_window, *(2 * s.max_in_flight for s in config.stages)),
        )

    @classmethod
    def of_spec(cls, spec: JobSpec) -> Admission:
        """Of a job whose pipeline's file is not at hand, by the settings alone."""
        settings = get_settings()
        queues = [keys.stage_queue(spec.pipeline, stage) for stage in spec.stages]
        limits = [settings.max_waiting] * len(queues)
        return cls(spec.pipeline, settings.max_jobs, queues, limits, settings.fair_window)

    def ask(
        self,
        spec: JobSpec,
        share: Share,
        *,
        again: Again | None = None,
        hook: str | None = None,
        room_for: int = 1,
    ) -> bytes:
        """The argument of ``create.lua``."""
        settings = get_settings()
        asked: dict[str, Any] = {"level": celery_priority(spec.priority), **share.ask}
        if spec.files:
            asked["inbytes"] = input_bytes(spec)
        if again is not None:
            asked["idempotency"] = f"{share.tenant}:{again.key}"
            asked["print"] = again.print
            asked["idempotency_ttl"] = int(settings.idempotency_ttl * 1000)
        if hook is not None:
            asked["hook"] = hook
        if room_for > 1:
            asked["count"] = room_for
        return self._lasting[:-1] + b"," + orjson.dumps(asked)[1:]

    @cached_property
    def _lasting(self) -> bytes:
        """What is the same for all jobs."""
        settings = get_settings()
        return orjson.dumps(
            {
                "pipeline": self.pipeline,
                "most": self.most,
                "queues": self.queues,
                "limits": self.limits,
                "window": self.window,
                "watermark": settings.broker_watermark,
                "tombstones": int(settings.tombstones * 1000),
            }
        )


#: What was found last of each pipeline, by its name.
_KNOWN: dict[str, tuple[PipelineConfig, Settings, Admission]] = {}


async def held_back(redis: Client, pipeline: str) -> dict[str, int]:
    """How many jobs of a pipeline are held back, of each tenant that has some.

    Raises:
        BrokerUnavailable: the broker did not answer.
    """
    with broker_errors():
        tenants = [t.decode() for t in await redis.zrange(keys.held_tenants(pipeline), 0, -1)]
        pipe = redis.pipeline(transaction=False)
        for tenant in tenants:
            for level in LEVELS:
                pipe.llen(keys.held_jobs(pipeline, tenant, level))
        lengths = await pipe.execute()
    counts = zip(*[iter(lengths)] * len(LEVELS), strict=True)
    return {tenant: n for tenant, of in zip(tenants, counts, strict=True) if (n := sum(of))}


def input_bytes(spec: JobSpec) -> int:
    """Bytes of a job's input files."""
    return sum(ref.nbytes for ref in spec.files.values())


def refusal(answer: Sequence[bytes]) -> Refused:
    """The error that a script's refusal (``refused`` in ``lua/_share.lua``) means."""
    whose, limit, value, size, after = (part.decode() for part in answer[1:])
    kind = ShareUsed if whose == "share" else Overloaded
    return kind(limit, _number(value), _number(size), float(after))


def _number(text: str) -> float:
    return float(text) if not text.isdigit() else int(text)


def pool_pressure(room: int, most: int) -> str | None:
    """How a host's shared memory is used, for ``create.lua``, if it is near full; else None.

    Args:
        room: bytes that blobs may still take, in slots that are free or yet to be made.
        most: bytes they may take in all.
    """
    settings = get_settings()
    try:
        found = os.statvfs(settings.shm_dir)
    except OSError as exc:
        raise ConfigError(f"OMNIQ_SHM_DIR: {settings.shm_dir}: {exc.strerror}") from exc
    most = min(most, found.f_blocks * found.f_frsize)
    if most == 0 or room >= (1 - settings.broker_watermark) * most:
        return None
    return f"{most - max(room, 0)}/{most}"

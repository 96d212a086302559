"""The ledger: every unfinished job has a message, or is sent a new one.

The job's record says which of its stages should have a message; it lies in a queue, or a worker
holds it. A stock Celery worker killed between taking a message and noting it, ``celery purge``, a
flushed queue or a broker that was restored without its newest writes leave a job without one. It
would stay as it is for ever. Here such jobs are found and their stage's message is sent again. If
the old one turns up after all, the second to begin is a duplicate.
"""

from __future__ import annotations

import asyncio
import logging
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from typing import Any

import orjson

from omniq import chain, keys
from omniq.celery import queue_keys
from omniq.config import PipelineConfig
from omniq.errors import BrokerUnavailable, JobNotFound, JobUnreadable, PipelineChanged
from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore
from omniq.jobs.workers import WorkerRegistry
from omniq.publish import STAGE, Post, posted
from omniq.redis_client import broker_errors
from omniq.settings import get_settings

logger = logging.getLogger(__name__)

#: A message that is on its way from one place to another may be in neither for a moment: a job is
#: looked at twice, so many seconds apart.
CONFIRM = 1.0
#: Messages and jobs looked at in one go.
PAGE = 500
#: Looking takes at most this share of the time.
SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Lost:
    """A stage without a message, as the record has it."""

    job: str
    stage: str
    state: str
    fence: str
    since: str
    worker: str
    cancelling: bool


@dataclass(slots=True)
class Report:
    """What one pass over a pipeline found."""

    pipeline: str
    open_jobs: int = 0
    messages: int = 0
    lost: list[Lost] = field(default_factory=list)
    sent: int = 0
    """Messages sent again, runs given up of jobs that were being cancelled, and jobs given up that
    cannot be served here."""


class Reconciler:
    """Looks after the jobs of one pipeline; any number may, one does at a time."""

    def __init__(self, store: JobStore, pipeline: PipelineConfig) -> None:
        self._store, self._pipeline = store, pipeline
        self._registry = WorkerRegistry(store.redis)

    async def run(self, name: str) -> None:
        """Look now and then, unless another one does, until this task is cancelled.

        Args:
            name: of the caller, for people.
        """
        key, pause = keys.reconciler(self._pipeline.name), 0.0
        while True:
            interval = get_settings().reconcile_interval
            await asyncio.sleep(max(interval, pause))
            try:
                with broker_errors():
                    # Not renewed: the next pass is whosever comes first then.
                    mine = await self._store.redis.set(key, name, nx=True, px=int(interval * 1000))
                if mine:
                    began = time.monotonic()
                    await self.reconcile()
                    pause = (time.monotonic() - began - CONFIRM) / SHARE
            except BrokerUnavailable as exc:
                logger.warning("lost messages are looked for later: %s", exc.message)

    async def reconcile(self, *, grace: float | None = None, send: bool = True) -> Report:
        """One pass.

        Args:
            grace: a stage that has changed within so many seconds is left alone; default: the
                setting ``reconcile_interval``.
            send: False: only say what is lost.

        Raises:
            BrokerUnavailable: it could not be finished.
        """
        grace = get_settings().reconcile_interval if grace is None else grace
        report = Report(self._pipeline.name)
        suspects = await self._suspects(grace, report)
        if suspects:
            await asyncio.sleep(CONFIRM)
            again = await self._suspects(grace, report)
            report.lost = [lost for lost in again if lost in suspects]
        if send:
            for lost in report.lost:
                report.sent += await self._send(lost)
        return report

    async def _suspects(self, grace: float, report: Report) -> Collection[Lost]:
        with broker_errors():
            ids = await self._store.redis.zrange(keys.open_jobs(self._pipeline.name), 0, -1)
        report.open_jobs = len(ids)
        if not ids:
            return []
        there: set[tuple[str, str]] = set()
        report.messages = 0
        async for job_stage in self._messages():
            there.add(job_stage)
            report.messages += 1
        jobs = [i.decode() for i in ids]
        if self._pipeline.is_linear:  # one message at a time
            with_message = {job for job, _ in there}
            jobs = [job for job in jobs if job not in with_message]
        found = [
            lost
            for at in range(0, len(jobs), PAGE)
            for some in await asyncio.gather(
                *(self._standing(j, grace) for j in jobs[at : at + PAGE])
            )
            for lost in some
            if (lost.job, lost.stage) not in there
        ]
        if not any(lost.state == "running" for lost in found):
            return [lost for lost in found if not lost.cancelling]
        alive = await self._registry.alive()
        # Whoever lives ends its run without a message, too.
        return [
            lost
            for lost in found
            if (lost.worker not in alive if lost.state == "running" else not lost.cancelling)
        ]

    async def _standing(self, job_id: str, grace: float) -> list[Lost]:
        answer = await self._store.run_script("standing", job_id, [repr(grace)])
        state, *rest = (value.decode() for value in answer)
        if not state:  # its record has passed
            with broker_errors():
                await self._store.redis.zrem(keys.open_jobs(self._pipeline.name), job_id)
        cancelling = state == JobState.CANCELLING
        return [
            Lost(job_id, stage, was, fence, since, worker, cancelling)
            for stage, was, fence, since, worker in zip(*[iter(rest)] * 5, strict=True)
        ]

    async def _messages(self) -> AsyncIterator[tuple[str, str]]:
        """Job and stage of every message of the pipeline's stages. Queues first: what a worker
        takes meanwhile is held afterwards.
        """
        redis = self._store.redis
        for stage in self._pipeline.stages:
            for name in queue_keys(keys.stage_queue(self._pipeline.name, stage.stage_id)):
                at, page = 0, [b""]
                while page:
                    # From the end that messages are put to: those that come shift the rest.
                    with broker_errors():
                        page = await redis.lrange(name, at, at + PAGE - 1)
                    at += len(page)
                    for item in page:
                        if (found := _job_stage(item)) is not None:
                            yield found
        cursor = 0
        while True:
            with broker_errors():
                cursor, held = await redis.hscan(keys.unacked(), cursor, count=PAGE)
            for record in held.values():
                if (found := _job_stage(record)) is not None:
                    yield found
            if not cursor:
                return

    async def _send(self, lost: Lost) -> bool:
        posts: list[Post] = []
        error, outcome = b"", "gets a new one"
        try:
            record = await self._store.get(lost.job)
            pipeline = chain.served(record.spec, self._pipeline)
            posts = [chain.post_again(record.spec, pipeline, lost.stage)]
        except JobNotFound:
            return False
        except (JobUnreadable, PipelineChanged) as exc:  # a process that can may try it again
            error = orjson.dumps(exc.to_dict())
            outcome = f"fails: {exc.message}"
        sent = bool(
            await self._store.run_script(
                "requeue",
                lost.job,
                [lost.stage, lost.state, lost.fence, lost.since, error, *posted(posts)],
                *(p.queue for p in posts),
            )
        )
        if sent:
            at = (lost.job, lost.stage, lost.state)
            logger.warning("job %s stage %s (%s) had no message and %s", *at, outcome)
        return sent


def _job_stage(item: bytes) -> tuple[str, str] | None:
    """Job and stage of a queue's message, or of the note of one that is held."""
    try:
        message: Any = orjson.loads(item)
        message = message[0] if isinstance(message, list) else message
        if message["headers"]["task"] != STAGE:
            return None
        body: Any = message["body"]
        if message["properties"].get("body_encoding") == "base64":
            body = b64decode(body)
        _, kwargs, _ = orjson.loads(body)
        return kwargs["job"], kwargs["stage"]
    except (ValueError, LookupError, TypeError):
        return None  # none of a job's

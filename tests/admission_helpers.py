"""A pipeline whose stages are played by hand, for the tests of admission."""

from __future__ import annotations

import json
from typing import Any

from omniq import chain, keys
from omniq.celery import celery_priority, queue_keys
from omniq.jobs.admission import Share
from omniq.jobs.model import JobRecord, JobState, StageResult, Verdict
from omniq.jobs.store import JobStore
from omniq.publish import Parent, post
from omniq.submit import submit

STAGES = ("ar", "dit", "decode")
PIPELINE = "small"
NOBODYS = Share()
ADA, BOB = Share(tenant="ada"), Share(tenant="bob")


async def new(store: JobStore, share: Share = NOBODYS, **more: Any) -> JobRecord:
    return await submit(store.of(share), pipeline=PIPELINE, inputs={"prompt": "x"}, **more)


async def take(store: JobStore, stage: str) -> str | None:
    """Take one message of a stage as stock Celery does; the job's id."""
    names = queue_keys(keys.stage_queue(PIPELINE, stage))
    popped = await store.redis.execute_command("LMPOP", len(names), *names, "RIGHT")
    if popped is None:
        return None
    job_id: str = json.loads(popped[1][0])["headers"]["id"].partition(".")[0]
    return job_id


async def serve(store: JobStore, stage: str) -> str | None:
    """Take one message of a stage and do its work; the job's id."""
    job_id = await take(store, stage)
    if job_id is not None:
        await run(store, job_id, stage)
    return job_id


async def run(store: JobStore, job_id: str, stage: str) -> None:
    """As a worker that has the stage's message; what follows is sent."""
    grant = await store.begin_stage(job_id, stage, "w", redelivered=False)
    if grant.verdict is not Verdict.RUN:
        return
    spec = grant.spec
    assert spec is not None
    behind = list(STAGES[STAGES.index(stage) + 1 :])
    parent = Parent(f"{job_id}.{stage}", job_id, celery_priority(spec.priority))
    posts = [post(chain._stage(spec, s), parent=parent) for s in behind[:1]]
    assert await store.finish_stage(job_id, stage, grant.fence, StageResult(), posts)


async def finish(store: JobStore, job: JobRecord) -> None:
    for stage in STAGES:
        await run(store, job.id, stage)
    assert (await store.get(job.id)).state is JobState.SUCCEEDED


async def let_share(store: JobStore) -> None:
    """There is a tenant's key."""
    await store.redis.hset(keys.api_keys(), "x", "y")


async def drain(store: JobStore) -> list[str]:
    """Serve all there is, one at a time; the jobs in the order in which their first stage ran."""
    order = []
    while True:
        served = [await serve(store, stage) for stage in reversed(STAGES)]
        if served[-1] is not None:
            order.append(served[-1])
        if not any(served):
            return order

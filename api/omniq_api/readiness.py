"""Whether the served pipelines can serve, and why not."""

from __future__ import annotations

from omniq import keys
from omniq.celery import queue_keys
from omniq.config import PipelineConfig, available_pipelines
from omniq.jobs.workers import WorkerInfo, WorkerState
from omniq.redis_client import Client, broker_errors
from omniq.runtime.ready import StageReadiness
from omniq_api.schemas import PipelineReadinessView, ReadinessView, StageReadinessView
from omniq_api.services import Services


async def readiness_view(services: Services, default: str) -> ReadinessView:
    """Readiness of the default pipeline and of every other one that has a worker.

    Raises:
        BrokerUnavailable: nobody can be asked.
    """
    workers = await services.workers.all()
    serving = {w.pipeline for w in workers} | {default}
    pipelines = {
        name: await _pipeline(services.redis, pipeline, workers)
        for name, pipeline in available_pipelines().items()
        if name in serving
    }
    ready = default in pipelines and pipelines[default].ready
    return ReadinessView(ready=ready, default_pipeline=default, pipelines=pipelines)


async def _pipeline(
    redis: Client, pipeline: PipelineConfig, workers: list[WorkerInfo]
) -> PipelineReadinessView:
    stages: dict[str, StageReadinessView] = {}
    for config in pipeline.stages:
        stage = config.stage_id
        own = [w for w in workers if (w.pipeline, w.stage) == (pipeline.name, stage)]
        length = await queue_length(redis, keys.stage_queue(pipeline.name, stage))
        stages[stage] = _stage(StageReadiness(stage, own), length)
    ready = all(s.state == "ready" for s in stages.values())
    with broker_errors():
        unfinished = await redis.zcard(keys.open_jobs(pipeline.name))
    return PipelineReadinessView(ready=ready, open_jobs=unfinished, stages=stages)


def _stage(stage: StageReadiness, length: int) -> StageReadinessView:
    reason = None
    if not stage.workers:
        reason = "no worker has reported"
    elif not stage.ready:
        reason = "; ".join(w.reason for w in stage.workers if w.reason) or None
    return StageReadinessView.model_validate(
        {
            "state": stage.state,
            "reason": reason,
            "workers": len(stage.workers),
            "ready_workers": sum(w.state is WorkerState.READY for w in stage.workers),
            "queue_length": length,
        }
    )


async def queue_length(redis: Client, queue: str) -> int:
    """Messages waiting in a queue, over all its priorities."""
    with broker_errors():
        pipe = redis.pipeline(transaction=False)
        for key in queue_keys(queue):
            pipe.llen(key)
        return sum(await pipe.execute())

"""Which store the tensors of each edge travel through now, and why."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field

from omniq.blobs.choice import Store, choose, where
from omniq.config import PipelineConfig, available_pipelines
from omniq.config.pipeline import REQUEST
from omniq.jobs.workers import WorkerInfo, WorkerState


class EdgeStore(BaseModel):
    """One edge, as producers on one host serve it."""

    pipeline: str
    source: str = Field(description="stage.output")
    target: str = Field(description="stage.input")
    host: str | None = Field(description="Identity of the producers' machine; null if none lives.")
    store: Store | None = Field(description="Where tensors go now; null if no producer lives.")
    reason: str = Field(description="Why there.")


def hosts_of(workers: Sequence[WorkerInfo], stage: str) -> set[str]:
    """Hosts on which a stage has workers that read blobs, or will."""
    return {w.host for w in workers if w.stage == stage and w.state is not WorkerState.FAILED}


def stores_in_use(workers: Sequence[WorkerInfo]) -> list[EdgeStore]:
    """:func:`edge_stores` of every pipeline that one of the workers serves."""
    serving = {w.pipeline for w in workers}
    pipelines = [p for name, p in available_pipelines().items() if name in serving]
    return [edge for pipeline in pipelines for edge in edge_stores(pipeline, workers)]


def edge_stores(pipeline: PipelineConfig, workers: Sequence[WorkerInfo]) -> list[EdgeStore]:
    """What producers choose for every edge between stages, one entry for each of their hosts.

    Args:
        workers: all live workers, also of other pipelines.
    """
    own = [w for w in workers if w.pipeline == pipeline.name]
    found: dict[tuple[str, ...], EdgeStore] = {}
    for edge in pipeline.edges:
        if edge.producer == REQUEST:
            continue  # lies in the job's record
        ends = {"pipeline": pipeline.name, "source": edge.source, "target": edge.target}
        producers = [w for w in own if w.stage == edge.producer and w.blobs is not None]
        if not producers:
            reason = f"no worker of stage {edge.producer!r} is ready"
            entry = EdgeStore(**ends, host=None, store=None, reason=reason)
            found[edge.source, edge.target] = entry
        # One output is written once, for all that read it.
        readers = [hosts_of(own, stage) for stage in pipeline.readers_of(edge.source)]
        for worker in producers:
            assert worker.blobs is not None
            store, reason = choose(
                worker.blobs.mode,
                shared_memory=worker.blobs.shared_memory,
                consumers=where(worker.host, readers),
            )
            key = edge.source, edge.target, worker.host, reason
            found[key] = EdgeStore(**ends, host=worker.host, store=store, reason=reason)
    return list(found.values())

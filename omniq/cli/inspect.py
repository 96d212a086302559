"""``omniq inspect``: what runs, what waits, what is held."""

from __future__ import annotations

import time

import click

from omniq import keys
from omniq.blobs.choice import BlobUse
from omniq.celery import queue_keys
from omniq.cli.options import echo_json, echo_table, json_option, with_store
from omniq.config import available_pipelines
from omniq.jobs.admission import held_back
from omniq.jobs.edges import EdgeStore, stores_in_use
from omniq.jobs.store import JobStore
from omniq.jobs.workers import WorkerInfo, WorkerRegistry
from omniq.redis_client import broker_errors

WORKERS = ("WORKER", "PIPELINE", "STAGE", "STATE", "BUSY", "MEMORY", "DEVICES", "SEEN")
POOLS = ("BLOBS OF", "STORE", "PUT SHM/REDIS", "SLABS", "IN USE/SLABS", "HOST POOL/CAP")
EDGES = ("PIPELINE", "EDGE", "HOST", "STORE", "WHY")


@click.command()
@json_option
def inspect(as_json: bool) -> None:
    """Workers, blob stores, edges and queues of the running system."""
    workers, queues, held = with_store(_look)
    edges = stores_in_use(workers)
    if as_json:
        dumped = {
            name: [entry.model_dump(mode="json") for entry in entries]
            for name, entries in (("workers", workers), ("edges", edges))
        }
        echo_json({**dumped, "queues": queues, "held_back": held})
        return
    echo_table(WORKERS, [_row(w) for w in workers])
    click.echo()
    echo_table(POOLS, [_pool(w.id, w.blobs) for w in workers if w.blobs])
    click.echo()
    echo_table(EDGES, [_edge(e) for e in edges])
    click.echo()
    echo_table(("QUEUE", "WAITING"), list(queues.items()))
    if held:
        click.echo()
        rows = [(p, tenant or "-", n) for p, of in held.items() for tenant, n in of.items()]
        echo_table(("HELD BACK IN", "TENANT", "JOBS"), rows)


async def _look(
    store: JobStore,
) -> tuple[list[WorkerInfo], dict[str, int], dict[str, dict[str, int]]]:
    """Live workers, how many messages wait in the queues of the pipelines they serve, and how many
    jobs of each pipeline and tenant are held back.
    """
    workers = await WorkerRegistry(store.redis).all()
    serving = {w.pipeline for w in workers}
    names = [keys.control_queue()] + [
        keys.stage_queue(name, stage.stage_id)
        for name, pipeline in available_pipelines().items()
        if name in serving
        for stage in pipeline.stages
    ]
    waiting = {}
    with broker_errors():
        for name in names:
            lengths = [await store.redis.llen(key) for key in queue_keys(name)]
            waiting[name] = sum(lengths)
    held = {name: await held_back(store.redis, name) for name in available_pipelines()}
    return workers, waiting, {name: of for name, of in held.items() if of}


def _row(worker: WorkerInfo) -> tuple[object, ...]:
    return (
        worker.id,
        worker.pipeline,
        worker.stage,
        worker.state.value,
        f"{worker.in_flight}/{worker.max_in_flight}",
        f"{worker.rss_bytes / 2**20:.0f} MiB",
        ",".join(worker.devices) or "cpu",
        f"{max(0.0, time.time() - worker.seen):.0f}s ago",
    )


def _pool(worker_id: str, use: BlobUse) -> tuple[object, ...]:
    return (
        worker_id,
        use.mode,
        f"{use.puts.get('shm', 0)}/{use.puts.get('redis', 0)}",
        use.slabs if use.shared_memory else "no shared memory",
        f"{_mib(use.used_bytes)}/{_mib(use.slab_bytes)} MiB",
        f"{_mib(use.host_bytes)}/{_mib(use.max_bytes)} MiB",
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f}"


def _edge(edge: EdgeStore) -> tuple[object, ...]:
    ends = f"{edge.source} -> {edge.target}"
    return edge.pipeline, ends, edge.host or "-", edge.store or "-", edge.reason

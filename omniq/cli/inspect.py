"""``omniq inspect``: what runs, what waits, what is held."""

from __future__ import annotations

import time

import click

from omniq import keys
from omniq.celery import queue_keys
from omniq.cli.options import echo_json, echo_table, json_option, with_store
from omniq.config import available_pipelines
from omniq.jobs.store import JobStore
from omniq.jobs.workers import WorkerInfo, WorkerRegistry
from omniq.redis_client import broker_errors


@click.command()
@json_option
def inspect(as_json: bool) -> None:
    """Workers, queues and blob stores of the running system."""
    workers, queues = with_store(_look)
    if as_json:
        echo_json({"workers": [w.model_dump(mode="json") for w in workers], "queues": queues})
        return
    header = ("WORKER", "PIPELINE", "STAGE", "STATE", "BUSY", "MEMORY", "DEVICES", "SEEN")
    echo_table(header, [_row(w) for w in workers])
    click.echo()
    echo_table(("QUEUE", "WAITING"), list(queues.items()))


async def _look(store: JobStore) -> tuple[list[WorkerInfo], dict[str, int]]:
    """Live workers, and how many messages wait in the queues of the pipelines they serve."""
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
    return workers, waiting


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

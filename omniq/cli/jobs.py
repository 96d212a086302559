"""``omniq jobs``: jobs of the running system, straight from the job store."""

from __future__ import annotations

import json
import time

import click

from omniq.cli.options import Id, echo, echo_json, echo_table, json_option, with_store
from omniq.jobs.model import JobEvent, JobRecord, JobState
from omniq.jobs.store import JobStore


@click.group()
def jobs() -> None:
    """List, show, watch and cancel jobs."""


@jobs.command("list")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([s.value for s in JobState]),
    help="Only jobs in this state; may be repeated.",
)
@click.option("--pipeline", help="Only jobs of this pipeline.")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 1000))
@json_option
def list_jobs(states: tuple[str, ...], pipeline: str | None, limit: int, as_json: bool) -> None:
    """Newest jobs first."""
    wanted = {JobState(s) for s in states} or None
    records, more = with_store(
        lambda store: store.list(states=wanted, pipeline=pipeline, limit=limit)
    )
    if as_json:
        echo_json([r.model_dump(mode="json") for r in records])
        return
    echo_table(("JOB", "STATE", "PIPELINE", "AGE", "PROMPT"), [_row(r) for r in records])
    if more:
        click.echo(f"... and more: --limit above {limit}", err=True)


@jobs.command()
@click.argument("job_id", type=Id())
@json_option
def show(job_id: str, as_json: bool) -> None:
    """One job: state, stages with times, results, error."""
    _show(with_store(lambda store: store.get(job_id)), as_json)


@jobs.command()
@click.argument("job_id", type=Id())
@json_option
def cancel(job_id: str, as_json: bool) -> None:
    """Ask a job to stop; one that has ended stays as it is."""
    _show(with_store(lambda store: store.cancel(job_id)), as_json)


@jobs.command()
@click.argument("job_id", type=Id())
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@json_option
def events(job_id: str, follow: bool, as_json: bool) -> None:
    """What has happened to a job, in order."""

    async def run(store: JobStore) -> None:
        async for event in store.events(job_id, block=0.2 if not follow else 15.0):
            if event is not None:
                _echo_event(event, as_json)
            elif not follow:
                return

    with_store(run)


def _row(record: JobRecord) -> tuple[object, ...]:
    return (
        record.id,
        _state(record),
        record.spec.pipeline,
        f"{time.time() - record.spec.created:.0f}s",
        excerpt(record),
    )


def _state(record: JobRecord) -> str:
    return f"{record.state.value} (partial)" if record.partial else record.state.value


def excerpt(record: JobRecord, length: int = 48) -> str:
    """The beginning of the prompt, on one line."""
    prompt = " ".join(str(next(iter(record.spec.inputs.values()), "")).split())
    return prompt if len(prompt) <= length else prompt[: length - 1] + "…"


def _show(record: JobRecord, as_json: bool) -> None:
    if as_json:
        echo_json(record.model_dump(mode="json"))
        return
    echo(f"{record.id}  {_state(record)}  {record.spec.pipeline}")
    echo(f"prompt: {excerpt(record, 400)}")
    rows = []
    for name, stage in record.stages.items():
        took = f"{stage.finished - stage.started:.2f}s" if stage.finished and stage.started else ""
        step = f"{stage.step}/{stage.total}" if stage.total else ""
        rows.append((name, stage.state.value, stage.attempts, took, step, stage.worker or ""))
    echo_table(("STAGE", "STATE", "ATTEMPTS", "TOOK", "STEP", "WORKER"), rows)
    for name, value in record.values.items():
        echo(f"{name}: {value}")
    for info in record.artifacts.values():
        echo(f"file {info.name}: {info.content_type}, {info.nbytes} bytes")
    for name, why in record.missing.items():
        error = f"{why.error.get('code')}: {why.error.get('message')}"
        echo(f"missing {name}: stage {why.stage}: {error}")
    if record.error:
        echo(f"error: {record.error.get('code')}: {record.error.get('message')}")


def _echo_event(event: JobEvent, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(event.model_dump(mode="json")))
        return
    clock = time.strftime("%H:%M:%S", time.localtime(event.time))
    data = " ".join(f"{k}={v}" for k, v in event.data.items())
    echo(f"{clock}.{int(event.time % 1 * 1000):03d} {event.type} {event.stage or ''} {data}")

"""``omniq dlq``: jobs that failed for good, and what is no message."""

from __future__ import annotations

import time

import click

from omniq.cli.options import Id, echo, echo_json, echo_table, json_option, with_store
from omniq.jobs.dead import DeadLetter, DeadLetters
from omniq.jobs.store import JobStore


@click.group()
def dlq() -> None:
    """Dead letters: list, show, retry and drop."""


@dlq.command("list")
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 1000))
@json_option
def list_letters(limit: int, as_json: bool) -> None:
    """Newest first: jobs, then what came by a queue and is no message."""
    letters = with_store(lambda store: DeadLetters(store).list(limit))
    if as_json:
        echo_json([letter.model_dump(mode="json") for letter in letters])
        return
    echo_table(("ID", "REASON", "PIPELINE", "STAGE", "AGE", "ERROR"), [_row(x) for x in letters])


@dlq.command()
@click.argument("letter_id", type=Id())
@json_option
def show(letter_id: str, as_json: bool) -> None:
    """One dead letter: why, where, its traceback, the keys of what its stage read."""
    letter = with_store(lambda store: DeadLetters(store).get(letter_id))
    if as_json:
        echo_json(letter.model_dump(mode="json"))
        return
    echo(f"{letter.id}  {letter.reason}: {letter.message}")
    if letter.kind == "message":
        return
    echo(f"stage {letter.stage} of {letter.pipeline}, last run by {letter.worker}")
    echo(f"attempts {letter.attempts}, deliveries {letter.deliveries}")
    for name, key in letter.inputs.items():
        echo(f"input {name}: {key}")
    resumes = ", ".join(letter.resumes_at) or "nowhere: its pipeline is not configured here"
    echo(f"a retry begins at {resumes}")
    if letter.traceback:
        echo(letter.traceback)


@dlq.command()
@click.argument("letter_ids", type=Id(), nargs=-1, required=True)
def retry(letter_ids: tuple[str, ...]) -> None:
    """Try jobs again: from the stage that failed, or from before it if what it reads is gone."""

    async def run(store: JobStore) -> None:
        for letter_id in letter_ids:
            record = await DeadLetters(store).retry(letter_id)
            echo(f"{record.id}  {record.state.value}")

    with_store(run)


@dlq.command()
@click.argument("letter_ids", type=Id(), nargs=-1, required=True)
def drop(letter_ids: tuple[str, ...]) -> None:
    """Give dead letters up."""

    async def run(store: JobStore) -> None:
        for letter_id in letter_ids:
            await DeadLetters(store).drop(letter_id)
            echo(f"{letter_id}  dropped")

    with_store(run)


def _row(letter: DeadLetter) -> tuple[object, ...]:
    age = "" if letter.time is None else f"{time.time() - letter.time:.0f}s"
    error = " ".join(letter.message.split())[:60]
    return letter.id, letter.reason, letter.pipeline or "", letter.stage or "", age, error

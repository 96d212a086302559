"""``omniq reconcile``: one look for jobs whose message was lost."""

from __future__ import annotations

from dataclasses import asdict

import click

from omniq.cli.options import Seconds, echo_json, echo_table, json_option, with_store
from omniq.config import available_pipelines, get_pipeline
from omniq.jobs.reconcile import Reconciler, Report
from omniq.jobs.store import JobStore


@click.command()
@click.option("--pipeline", help="Only jobs of this pipeline; default: of all that are configured.")
@click.option(
    "--grace",
    type=Seconds(),
    help="Leave alone what has changed within so many seconds; default: OMNIQ_RECONCILE_INTERVAL.",
)
@click.option("--dry-run", is_flag=True, help="Only say what is lost.")
@json_option
def reconcile(pipeline: str | None, grace: float | None, dry_run: bool, as_json: bool) -> None:
    """Find jobs without a message and send their stage's message again.

    Workers do so by themselves, one at a time for each pipeline.
    """
    configs = [get_pipeline(pipeline)] if pipeline else list(available_pipelines().values())

    async def run(store: JobStore) -> list[Report]:
        return [
            await Reconciler(store, config).reconcile(grace=grace, send=not dry_run)
            for config in configs
        ]

    reports = with_store(run)
    if as_json:
        echo_json([asdict(report) for report in reports])
        return
    echo_table(
        ("PIPELINE", "UNFINISHED", "MESSAGES", "LOST", "SENT AGAIN"),
        [(r.pipeline, r.open_jobs, r.messages, len(r.lost), r.sent) for r in reports],
    )
    for report in reports:
        for lost in report.lost:
            click.echo(f"{lost.job} {lost.stage}: {lost.state}, without a message")

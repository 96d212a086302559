"""``omniq pipelines``, ``omniq validate``, ``omniq engines``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import click

from omniq.cli.options import echo_json, echo_table, json_option
from omniq.config import PipelineConfig, available_pipelines, load_pipeline
from omniq.engines.registry import describe, resolve
from omniq.errors import ConfigError


@click.command()
@json_option
def pipelines(as_json: bool) -> None:
    """List the available pipelines: built-in ones and those of OMNIQ_PIPELINES."""
    found = available_pipelines().values()
    if as_json:
        echo_json([p.model_dump(mode="json", by_alias=True) for p in found])
        return
    for pipeline in found:
        click.echo(f"{pipeline.name} (version {pipeline.version}): {pipeline.description}")
        for stage in pipeline.stages:
            after = ", ".join(pipeline.upstream(stage.stage_id)) or "the request"
            click.echo(f"    {stage.stage_id}: {stage.engine_type} {stage.model} after {after}")


@click.command()
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path)
)
def validate(files: tuple[Path, ...]) -> None:
    """Check pipeline files; faults are printed as FILE:LINE: what, and the exit code is 1."""
    faulty = False
    for path in files:
        try:
            pipeline = load_pipeline(path)
            _check_engines(pipeline, path)
        except ConfigError as exc:
            faulty = True
            click.echo(exc.message, err=True)
        else:
            stages = " -> ".join(pipeline.topological_order())
            click.echo(f"{path}: ok: pipeline {pipeline.name}, stages {stages}")
    if faulty:
        sys.exit(1)


def _check_engines(pipeline: PipelineConfig, path: Path) -> None:
    """Raise :class:`ConfigError` if a stage names an engine that is not known here."""
    for i, stage in enumerate(pipeline.stages):
        try:
            resolve(stage.engine_type, stage.engine)
        except ConfigError as exc:
            raise ConfigError(f"{path}: stages.{i}.engine: {exc.message}") from exc


@click.command()
@json_option
def engines(as_json: bool) -> None:
    """List engines by type, and whether each can be used here."""
    found = describe()
    if as_json:
        echo_json([asdict(e) for e in found])
        return
    rows = [
        (e.engine_type, e.name, "yes" if e.available else f"no: {e.reason}", e.origin)
        for e in found
    ]
    echo_table(("TYPE", "ENGINE", "AVAILABLE", "FROM"), rows)

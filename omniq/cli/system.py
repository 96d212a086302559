"""The processes of a system: ``omniq up`` for all of them, and a command for each one."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from importlib.util import find_spec

import click

from omniq.cli.options import pipeline_option
from omniq.config import get_pipeline
from omniq.errors import ConfigError
from omniq.runtime.broker import run_broker
from omniq.runtime.external import CONNECT_TIMEOUT, wait_for_server
from omniq.runtime.machine import cpu_count
from omniq.runtime.ports import require_api_port, require_flower_port
from omniq.runtime.processes import all_processes, procfile
from omniq.runtime.restart import Restarter
from omniq.runtime.supervise import require, supervise
from omniq.settings import get_settings

FLOWER_MAX_TASKS = 10_000
"""Flower keeps so many tasks in memory; its default of 100,000 slows its pages to a crawl."""
FLOWER_COLUMNS = "name,args,kwargs,state,received,started,runtime,worker,retries"


@click.command()
@pipeline_option
@click.option("--print-procfile", is_flag=True, help="Only print the equivalent Procfile.")
def up(pipeline: str, print_procfile: bool) -> None:
    """Start broker, API, Flower and one worker per stage; Ctrl-C stops everything.

    When every stage is ready it says where API and Flower listen, and shows a request to paste.
    """
    config = get_pipeline(pipeline)
    if print_procfile:
        click.echo(procfile(config), nl=False)
        return
    require("honcho", "flower", user="omniq up")
    settings = get_settings()
    require_api_port(settings.api_host, settings.api_port)
    require_flower_port("127.0.0.1", settings.flower_port)
    # One password for Flower and for the banner that tells it.
    os.environ.setdefault("OMNIQ_FLOWER_AUTH", new_flower_auth())
    sys.exit(supervise(all_processes(config), os.environ))


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), help="Instead of OMNIQ_BROKER_PORT.")
@click.option("--ephemeral", is_flag=True, help="Keep nothing on disk.")
def broker(port: int | None, ephemeral: bool) -> None:
    """Run the embedded Valkey on loopback, its data in OMNIQ_DATA_DIR.

    With OMNIQ_BROKER_URL set nothing is started: that server is checked and watched.
    On SIGTERM it waits a few seconds for workers and API to disconnect, then stops.
    """
    sys.exit(run_broker(port=port, ephemeral=ephemeral))


@click.command()
@click.option("--host", help="Instead of OMNIQ_API_HOST.")
@click.option("--port", type=click.IntRange(1, 65535), help="Instead of OMNIQ_API_PORT.")
def api(host: str | None, port: int | None) -> None:
    """Run the HTTP API."""
    from omniq_api.main import run_api  # noqa: PLC0415 - only this process needs FastAPI

    settings = get_settings()
    host, port = host or settings.api_host, port or settings.api_port
    require_api_port(host, port)
    sys.exit(run_api(host, port))


@click.command()
@pipeline_option
@click.option("--stage", required=True, help="Stage id.")
@click.option("--devices", help="Comma-separated, e.g. 0 or 0,1 or cpu; default: as configured.")
@click.option("--name", help="Worker name; default: made from stage, host and process id.")
@click.option(
    "--restart", is_flag=True, help="Start it again whenever it ends, after growing pauses."
)
def worker(pipeline: str, stage: str, devices: str | None, name: str | None, restart: bool) -> None:
    """Run the worker of one stage: load its model, report ready, then consume its queue.

    Unless OMP_NUM_THREADS says otherwise, it computes with its share of this machine's CPUs: all of
    them divided by the pipeline's stages.
    """
    config = get_pipeline(pipeline)
    if stage not in (known := [s.stage_id for s in config.stages]):
        raise ConfigError(f"pipeline {pipeline} has no stage {stage!r}; it has: {', '.join(known)}")
    if restart:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        arguments = ["worker", "--pipeline", pipeline, "--stage", stage]
        for option, value in (("--devices", devices), ("--name", name)):
            arguments += [option, value] if value else []
        sys.exit(Restarter(arguments, pipeline, stage).run())
    # Before torch is imported. Workers that all take every CPU wait for each other's threads: on a
    # busy machine a step then takes many times as long.
    share = max(1, cpu_count() // len(config.stages))
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
    from omniq_workers.main import run_worker  # noqa: PLC0415 - only this process needs engines

    sys.exit(run_worker(pipeline, stage, devices.split(",") if devices else None, name))


@click.command()
@click.option("--address", default="127.0.0.1", show_default=True, help="Address to listen on.")
def flower(address: str) -> None:
    """Run Flower on OMNIQ_FLOWER_PORT, behind OMNIQ_FLOWER_AUTH or a new password."""
    if find_spec("flower") is None:
        raise ConfigError("Flower is not installed", hint="install the extra omniq[monitor]")
    settings = get_settings()
    auth = settings.flower_auth or new_flower_auth()
    user, _, password = auth.partition(":")
    if not user or not password:
        raise ConfigError("OMNIQ_FLOWER_AUTH must be user:password")
    require_flower_port(address, settings.flower_port)
    shown = password if settings.flower_auth is None else "as in OMNIQ_FLOWER_AUTH"
    click.echo(f"flower: http://{address}:{settings.flower_port} user {user}, password {shown}")
    sys.stdout.flush()
    # Flower itself comes back only after growing pauses when the broker starts after it.
    if not wait_for_server(settings.redis_url, CONNECT_TIMEOUT):
        click.echo("flower: the broker does not answer yet, going on without it", err=True)
    command = [sys.executable, "-m", "celery", "-A", "omniq", "flower"]
    options = {
        "address": address,
        "port": settings.flower_port,
        "max-tasks": FLOWER_MAX_TASKS,
        "tasks-columns": FLOWER_COLUMNS,
        "logging": "warning",
    }
    command += [f"--{name}={value}" for name, value in options.items()]
    # The environment, not the command line: `ps` shows the latter to every user.
    os.execve(sys.executable, command, {**os.environ, "FLOWER_BASIC_AUTH": auth})


def new_flower_auth() -> str:
    """``user:password`` with a fresh random password."""
    return f"omniq:{secrets.token_urlsafe(12)}"

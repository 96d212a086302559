"""``omniq wait-ready`` and ``omniq banner``."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import click

from omniq.cli.options import Seconds, pipeline_option
from omniq.config import Modality, PipelineConfig, get_pipeline
from omniq.config.served import openai_model
from omniq.errors import NotReady
from omniq.runtime import ready as runtime_ready
from omniq.settings import get_settings

EXAMPLE_PROMPT = "a red circle above a blue square"
FLOWER_WAIT = 20.0
"""Seconds; the system serves without Flower, too."""


def _wait(pipeline: PipelineConfig, timeout: float | None) -> None:
    started = time.monotonic()

    def on_change(stage: str, state: str) -> None:
        click.echo(f"{time.monotonic() - started:6.1f} s  {pipeline.name}/{stage} {state}")
        sys.stdout.flush()

    seconds = get_settings().ready_timeout if timeout is None else timeout
    asyncio.run(runtime_ready.wait_ready(pipeline, seconds, on_change=on_change))


@click.command("wait-ready")
@pipeline_option
@click.option("--timeout", type=Seconds(), help="Seconds; default OMNIQ_READY_TIMEOUT.")
def wait_ready(pipeline: str, timeout: float | None) -> None:
    """Wait until every stage has a ready worker; exit code 1 and diagnostics if not in time."""
    _wait(get_pipeline(pipeline), timeout)


@click.command()
@pipeline_option
@click.option("--flower/--no-flower", default=True, help="Whether Flower is expected to run.")
def banner(pipeline: str, flower: bool) -> None:
    """Wait until ready, say where everything listens, then stay (for Procfiles)."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    config = get_pipeline(pipeline)
    _wait(config, None)
    settings = get_settings()
    if not _listens(_reachable(settings.api_host), settings.api_port, settings.ready_timeout):
        raise NotReady(f"the API does not listen on {settings.api_host}:{settings.api_port}")
    answers = flower and _listens("127.0.0.1", settings.flower_port, FLOWER_WAIT)
    click.echo(banner_text(config, flower=answers if flower else None))
    sys.stdout.flush()
    while True:  # honcho stops everything when one of its processes ends
        signal.pause()


def _leave(_signum: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def _reachable(host: str) -> str:
    """Where this machine reaches what listens on ``host``."""
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host


def _listens(host: str, port: int, seconds: float) -> bool:
    """Whether something accepts connections there within that time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        else:
            return True


def banner_text(config: PipelineConfig, *, flower: bool | None = True) -> str:
    """Addresses, and one request to paste that ends with a file on disk or an answer.

    ``flower``: whether it answers; None: it is no part of this system.
    """
    settings = get_settings()
    api = f"http://{_reachable(settings.api_host)}:{settings.api_port}"
    lines = ["", f"{config.name} is ready.", f"  API     {api}", f"  Docs    {api}/docs"]
    if (model := openai_model(config)) is not None:
        lines.append(f"  OpenAI  {api}/v1  (model {model.name})")
    if flower is not None:
        user, _, password = (settings.flower_auth or "").partition(":")
        login = f"user {user}, password {password}" if password else "login: see flower's 1st line"
        address = f"http://127.0.0.1:{settings.flower_port}  ({login})"
        lines.append(f"  Flower  {address if flower else 'does not answer'}")
    if model is not None and model.text is not None and "messages" in config.inputs:
        route, target = "chat/completions", ""
        body: dict[str, Any] = {
            "model": model.name,
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 32,
        }
    else:
        route = "generate"
        body = {"pipeline": config.name, "input": {next(iter(config.inputs)): EXAMPLE_PROMPT}}
        makes_image = any(o.type is Modality.IMAGE for o in config.outputs.values())
        target = " -o out.png" if makes_image else ""
    key = " -H 'authorization: Bearer KEY'" if settings.api_keys else ""
    return "\n".join(
        [
            *lines,
            "Try:",
            f"  curl -sS --fail-with-body {api}/v1/{route} -H 'content-type: application/json'"
            f"{key} -d {shlex.quote(json.dumps(body))}{target}",
            "",
        ]
    )

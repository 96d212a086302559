"""The processes of one omniq system on one machine: the only list of them.

``omniq up`` and :class:`omniq.runtime.local.LocalSystem` start what this module lists, and the
repository's ``Procfile`` is :func:`procfile` of the built-in pipeline (a test compares them).
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass

from omniq.config import PipelineConfig


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: its name for logs, and the arguments of its ``omniq`` command."""

    name: str
    args: tuple[str, ...]


def broker_process() -> ProcessSpec:
    """The embedded Valkey, or the watch on the configured one."""
    return ProcessSpec("broker", ("broker",))


def private_broker_process(port: int) -> ProcessSpec:
    """An embedded Valkey for one Python process: nothing on disk."""
    return ProcessSpec("broker", ("broker", "--port", str(port), "--ephemeral"))


def api_process() -> ProcessSpec:
    """The HTTP API."""
    return ProcessSpec("api", ("api",))


def worker_processes(pipeline: PipelineConfig) -> list[ProcessSpec]:
    """One worker per stage."""
    return [
        ProcessSpec(s.stage_id, ("worker", "--pipeline", pipeline.name, "--stage", s.stage_id))
        for s in pipeline.stages
    ]


def all_processes(pipeline: PipelineConfig) -> list[ProcessSpec]:
    """The whole system, as ``omniq up`` and the Procfile start it."""
    return [
        broker_process(),
        api_process(),
        ProcessSpec("flower", ("flower",)),
        *worker_processes(pipeline),
        ProcessSpec("ready", ("banner", "--pipeline", pipeline.name)),
    ]


def served_processes(pipeline: PipelineConfig) -> list[ProcessSpec]:
    """The same without Flower, as ``omniq serve`` starts it."""
    return [
        broker_process(),
        api_process(),
        *worker_processes(pipeline),
        ProcessSpec("ready", ("banner", "--no-flower", "--pipeline", pipeline.name)),
    ]


def procfile(pipeline: PipelineConfig) -> str:
    """A Procfile that starts :func:`all_processes`.

    ``exec`` replaces the shell that honcho starts each line in, so that signals reach omniq itself.
    """
    lines = [
        f"# Written by `omniq up --print-procfile --pipeline {pipeline.name}`.",
        *(f"{p.name}: exec omniq {shlex.join(p.args)}" for p in all_processes(pipeline)),
    ]
    return "\n".join(lines) + "\n"


def child_command(spec: ProcessSpec) -> list[str]:
    """Command line that runs it as a child of this process, and ends with it."""
    return [sys.executable, "-m", "omniq", "--parent", str(os.getpid()), *spec.args]

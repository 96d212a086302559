"""Running a list of processes in the foreground until one ends or Ctrl-C, by honcho."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from omniq.errors import ConfigError
from omniq.runtime.parent import die_with_parent
from omniq.runtime.processes import ProcessSpec


def require(*modules: str, user: str) -> None:
    """Check that what the extra ``omniq[monitor]`` brings is there.

    Raises:
        ConfigError: a module cannot be found; ``user`` is the command that needs it.
    """
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(
                f"`{user}` needs {module}, which is not installed",
                hint="install the extra omniq[monitor]",
            )


def supervise(processes: Sequence[ProcessSpec], env: Mapping[str, str]) -> int:
    """Run the processes with their output in turn on the terminal; returns the exit status.

    When one ends, all are stopped. None outlives this process, even if it is killed.
    """
    from honcho.manager import Manager  # noqa: PLC0415 - an optional extra

    manager = Manager()
    manager._process_ctor = _bound_process()
    python = shlex.quote(sys.executable)
    for process in processes:
        # Parent 0: whoever it is; honcho forks a watcher for each process, whose pid is unknown.
        command = f"exec {python} -m omniq --parent 0 {shlex.join(process.args)}"
        manager.add_process(process.name, command, env={**env, "PYTHONUNBUFFERED": "1"})
    manager.loop()
    return int(manager.returncode)


def _bound_process() -> type[Any]:
    """honcho's process whose watcher dies with this process itself, even by SIGKILL."""
    from honcho.process import Process  # noqa: PLC0415

    class BoundProcess(Process):
        def run(self, events: Any = None, ignore_signals: bool = False) -> None:
            die_with_parent(signal.SIGKILL)
            super().run(events, ignore_signals)

    return BoundProcess

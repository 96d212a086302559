"""The ``omniq`` command line.

Commands live in modules of their own that are imported when a command is used, so that
``omniq --help`` and the start of every process stay fast.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import click

from omniq import __version__

COMMANDS = {
    "up": ("omniq.cli.system", "Start broker, API, Flower and all workers; stop with Ctrl-C."),
    "serve": ("omniq.cli.serve", "Serve a model: broker, API and workers, with vLLM's flags."),
    "generate": ("omniq.cli.generate", "Make one output from a prompt and save it."),
    "jobs": ("omniq.cli.jobs", "List, show, watch and cancel jobs."),
    "keys": ("omniq.cli.keys", "Make, list and revoke tenants' API keys."),
    "dlq": ("omniq.cli.dlq", "Dead letters: jobs that failed for good; list, show, retry, drop."),
    "reconcile": ("omniq.cli.reconcile", "Send lost messages of unfinished jobs again, once."),
    "inspect": ("omniq.cli.inspect", "Workers, queues and blob stores of the running system."),
    "pipelines": ("omniq.cli.pipelines", "List the available pipelines."),
    "models": ("omniq.cli.models", "List the model families that `omniq serve` knows."),
    "validate": ("omniq.cli.pipelines", "Check pipeline files."),
    "engines": ("omniq.cli.pipelines", "List engines, and which are installed."),
    "config": ("omniq.cli.config", "Every OMNIQ_* setting: value, default, meaning."),
    "doctor": ("omniq.cli.doctor", "Check this machine and installation."),
    "broker": ("omniq.cli.system", "Run the embedded Valkey, or watch the configured server."),
    "api": ("omniq.cli.system", "Run the HTTP API."),
    "worker": ("omniq.cli.system", "Run the worker of one stage."),
    "flower": ("omniq.cli.system", "Run Flower, the Celery monitor."),
    "wait-ready": ("omniq.cli.ready", "Wait until every stage of a pipeline is ready."),
    "banner": ("omniq.cli.ready", "Wait until ready, say where everything listens, and stay."),
}
"""Name -> module that defines it (as a function of that name) and its line in the help."""

SECRETS = ("broker_url", "blob_redis_url", "flower_auth", "api_keys", "message_keys")
"""Settings that hold passwords, which no error repeats."""

BAD_INPUT = 2
FAILURE = 1


class CliError(click.ClickException):
    """An omniq error as one message on stderr and an exit code; no traceback."""

    def __init__(self, message: str, hint: str | None, exit_code: int) -> None:
        super().__init__(message)
        self.hint = hint
        vars(self)["exit_code"] = exit_code  # a class variable to the type checker only

    def show(self, file: Any = None) -> None:
        """Print it."""
        click.echo(f"omniq: {self.message}", err=True)
        if self.hint:
            click.echo(f"hint: {self.hint}", err=True)


class OmniqGroup(click.Group):
    """A group that imports its commands on use and turns omniq's errors into exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of :data:`COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises:
            CliError: in place of an omniq error, unless ``--debug`` asks for the traceback.
        """
        from pydantic import ValidationError  # noqa: PLC0415 - `--help` needs none of this
        from pydantic_settings import SettingsError  # noqa: PLC0415

        from omniq.errors import ConfigError, InvalidRequest, OmniqError  # noqa: PLC0415

        if ctx.params["parent"] is None:  # else the parent has said it
            _warn_of_unknown_variables()
        try:
            return super().invoke(ctx)
        except OmniqError as exc:
            if ctx.params["debug"]:
                raise
            code = BAD_INPUT if isinstance(exc, ConfigError | InvalidRequest) else FAILURE
            raise CliError(exc.message, exc.hint, code) from exc
        except (ValidationError, SettingsError) as exc:
            if ctx.params["debug"] or not _about_settings(exc):
                raise
            raise CliError(_settings_faults(exc), "`omniq config` explains all", BAD_INPUT) from exc


def _warn_of_unknown_variables() -> None:
    """A misspelt setting would otherwise leave its default in force, such as no API keys."""
    from omniq.settings import unknown_variables  # noqa: PLC0415

    for name, near in unknown_variables().items():
        meant = f"; did you mean {near}?" if near else ""
        click.echo(f"omniq: {name} is no setting{meant}", err=True)


def _about_settings(exc: Exception) -> bool:
    return getattr(exc, "title", "Settings") == "Settings"


def _settings_faults(exc: Any) -> str:
    if not hasattr(exc, "errors"):  # pydantic-settings could not even read a value
        field = re.search(r'field "(\w+)"', str(exc))
        return f"OMNIQ_{field[1].upper()}: must be JSON: {exc.__cause__}" if field else str(exc)
    lines = []
    for error in exc.errors(include_url=False):
        name = ".".join(str(part) for part in error["loc"])
        got = "" if name.partition(".")[0] in SECRETS else f" (got {error['input']!r})"
        lines.append(f"OMNIQ_{name.upper()}: {error['msg'].removeprefix('Value error, ')}{got}")
    return "\n".join(lines)


@click.group(cls=OmniqGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="omniq")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.option("--parent", type=int, hidden=True, help="End with this parent process (0: any).")
def cli(debug: bool, parent: int | None) -> None:
    """Durable, distributed serving of omni-modality models on Celery."""
    if parent is not None:
        from omniq.runtime.parent import die_with_parent  # noqa: PLC0415

        die_with_parent(parent=parent or None)


def main() -> None:
    """Entry point of the console script."""
    cli(prog_name="omniq")

"""``docs/commands.md`` of what the commands say of themselves; a test compares the two."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from omniq.cli.main import cli

#: Words of a help text that are code.
CODE = re.compile(r"OMNIQ_[A-Z_]*\*?|OMP_NUM_THREADS|(?<![\w-])--?[a-z][\w-]*|\*{3}|whsec_BASE64")

HEAD = """\
# Commands

What `omniq COMMAND --help` says, written by `python tools/commands_page.py > docs/commands.md`.
Commands that look at a running system find it by `OMNIQ_BROKER_URL`, else on `OMNIQ_BROKER_PORT` of
this machine ([configuration](configuration.md)).

| exit code | when |
|---|---|
| 0 | done |
| 1 | a job failed or is not known, a stage is not ready in time, the broker does not answer, … |
| 2 | a command, option, setting, model, pipeline's file, parameter or input is wrong |
| 130 | `up` or `serve` was ended by Ctrl-C |

`omniq --debug COMMAND` shows the traceback of an error.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for path, command in _commands(cli, ("omniq",)):
        level = "#" * len(path)
        parts.append(f"{level} {' '.join(path)}\n\n{_described(path, command)}")
    return "\n".join(parts)


def _commands(
    group: click.Group, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    ctx = click.Context(group, info_name=" ".join(path))
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))


def _described(path: tuple[str, ...], command: click.Command) -> str:
    ctx = click.Context(command, info_name=" ".join(path))
    text = "\n\n".join(_text(" ".join(p.split())) for p in (command.help or "").split("\n\n"))
    if isinstance(command, click.Group):
        return f"{text}\n"
    pieces = (piece for piece in command.collect_usage_pieces(ctx) if piece != "[OPTIONS]")
    usage = " ".join([*path, *pieces])
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    rows = "".join(f"| {_name(o)} | {_meaning(o, ctx)} |\n" for o in options)
    table = f"\n| option | meaning |\n|---|---|\n{rows}" if rows else ""
    return f"```bash\n{usage}\n```\n\n{text}\n{table}"


def _text(text: str) -> str:
    """Help as Markdown: names of options and settings are code."""
    parts = text.split("`")
    parts[::2] = [CODE.sub(lambda found: f"`{found[0]}`", part) for part in parts[::2]]
    return "`".join(parts)


def _name(option: click.Option) -> str:
    # No metavar of choices: "|" would end the table's cell.
    value = "" if option.is_flag else f" {option.metavar or option.type.name.split()[0].upper()}"
    return ", ".join(f"`{name}{value}`" for name in [*option.opts, *option.secondary_opts])


def _meaning(option: click.Option, ctx: click.Context) -> str:
    said = [_text(option.help)] if option.help else []
    if isinstance(option.type, click.Choice):
        said.append("One of " + ", ".join(f"`{c}`" for c in option.type.choices) + ".")
    elif isinstance(option.type, click.IntRange) and option.type.max is not None:
        said.append(f"{option.type.min} to {option.type.max}.")
    if isinstance(option.show_default, str):
        said.append(f"Default: `{option.show_default}`.")
    elif option.show_default:
        said.append(f"Default: `{option.get_default(ctx, call=False)}`.")
    if option.required:
        said.append("Required.")
    return " ".join(said)


if __name__ == "__main__":
    click.echo(page(), nl=False)

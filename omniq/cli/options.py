"""Options and printing that several commands share."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import click

from omniq.config.request import is_unicode
from omniq.jobs.store import JobStore
from omniq.settings import get_settings

T = TypeVar("T")

pipeline_option = click.option(
    "--pipeline",
    default=lambda: get_settings().default_pipeline,
    show_default="OMNIQ_DEFAULT_PIPELINE",
    help="Name of the pipeline.",
)


class Seconds(click.FloatRange):
    """A finite number of seconds from 0."""

    name = "seconds"

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return found


class Id(click.ParamType):
    """An id as the broker can be asked for it."""

    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See click."""
        if not is_unicode(str(value)):
            self.fail("must be valid Unicode", param, ctx)
        return str(value)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def with_store(work: Callable[[JobStore], Awaitable[T]]) -> T:
    """Run ``work`` with a job store on the configured broker."""

    async def run() -> T:
        store = JobStore.from_settings()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def shown(text: object) -> str:
    """A text of strangers as a terminal may be given it: control characters, which could move its
    cursor or write its title, as escapes.
    """
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "replace").decode()
        for c in str(text)
    )


def echo(text: object) -> None:
    """Print a text that may hold what strangers have sent."""
    click.echo(shown(text))


def echo_json(value: Any) -> None:
    """Print indented JSON."""
    click.echo(json.dumps(value, indent=2, default=str))


def echo_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns."""
    lines = [list(header), *([shown(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())

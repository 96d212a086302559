"""``omniq models``."""

from __future__ import annotations

import click

from omniq.cli.options import echo_json, echo_table, json_option


@click.command()
@json_option
def models(as_json: bool) -> None:
    """List the model families that `omniq serve MODEL` knows, and their stages."""
    from omniq.resolve.registry import with_origins  # noqa: PLC0415 - reads all packages

    found = with_origins()
    if as_json:
        echo_json(
            [
                {
                    "name": f.name,
                    "description": f.description,
                    "stages": list(f.stages),
                    "from": origin,
                }
                for f, origin in found
            ]
        )
        return
    rows = [(f.name, " -> ".join(f.stages), f.description, origin) for f, origin in found]
    echo_table(("FAMILY", "STAGES", "WHAT IT DOES", "FROM"), rows)

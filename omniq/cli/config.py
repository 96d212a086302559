"""``omniq config``: every setting."""

from __future__ import annotations

import textwrap
from typing import Any

import click

from omniq.cli.options import echo_json, json_option
from omniq.runtime.external import safe_url
from omniq.settings import Settings, get_settings


@click.command()
@json_option
@click.option("--markdown", is_flag=True, help="Print docs/configuration.md.")
@click.option("--show-secrets", is_flag=True, help="Show passwords instead of ***.")
def config(as_json: bool, markdown: bool, show_secrets: bool) -> None:
    """Every OMNIQ_* setting: value, default, meaning."""
    if markdown:
        click.echo(configuration_page(), nl=False)
        return
    rows = settings_table(show_secrets=show_secrets)
    if as_json:
        echo_json(rows)
        return
    for row in rows:
        changed = "" if row["value"] == row["default"] else f"   (default: {row['default']})"
        click.echo(f"{row['name']} = {row['value']}{changed}")
        click.echo(textwrap.indent(textwrap.fill(row["description"], 92), "    "))


def settings_table(*, show_secrets: bool = False) -> list[dict[str, Any]]:
    """Name, value, default and description of every setting, ready for JSON."""
    settings = get_settings()
    values = settings.model_dump(mode="json")
    if not show_secrets:
        for name in ("broker_url", "blob_redis_url"):
            values[name] = values[name] and safe_url(values[name])
        values["flower_auth"] = settings.flower_auth and (
            settings.flower_auth.partition(":")[0] + ":***"
        )
        for name in ("api_keys", "message_keys"):
            values[name] = ["***"] * len(values[name])
    defaults = {
        name: field.get_default(call_default_factory=True)
        for name, field in Settings.model_fields.items()
    }
    return [
        {
            "name": f"OMNIQ_{name.upper()}",
            "value": values[name],
            "default": defaults[name] if _plain(defaults[name]) else str(defaults[name]),
            "description": Settings.model_fields[name].description,
        }
        for name in Settings.model_fields
    ]


def configuration_page() -> str:
    """The text of ``docs/configuration.md``; a test compares the two."""
    lines = [
        "# Configuration",
        "",
        "Environment variables, read once by each process. `omniq config` prints them with their",
        "present values; `omniq config --markdown` writes this page. Commands warn of `OMNIQ_`",
        "variables that are no setting.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    ]
    for row in settings_table():
        default = "unset" if row["default"] is None else f"`{row['default']}`"
        lines.append(f"| `{row['name']}` | {default} | {row['description']} |")
    return "\n".join(lines) + "\n"


def _plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | dict)

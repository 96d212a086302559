"""``omniq keys``: tenants' API keys."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click
from pydantic import ValidationError

from omniq.cli.options import Id, echo_json, echo_table, json_option, with_store
from omniq.errors import InvalidRequest
from omniq.jobs.admission import Share
from omniq.jobs.webhooks import Webhook, checked
from omniq.tenants import TenantKey, TenantKeys

T = TypeVar("T")


@click.group()
def keys() -> None:
    """Make, list and revoke tenants' API keys."""


@keys.command()
@click.argument("tenant")
@click.option("--rate", type=float, help="Jobs a second, on average.")
@click.option("--burst", type=int, default=1, show_default=True, help="Jobs at once after a pause.")
@click.option("--max-jobs", type=int, help="Unfinished jobs at the same time.")
@click.option("--daily", type=int, help="Jobs a day (UTC).")
@click.option("--max-priority", type=int, default=9, show_default=True)
@click.option("--webhook-url", help="Told of the end of jobs that name no webhook of their own.")
@click.option("--webhook-secret", help="Signs its messages: whsec_BASE64.")
@json_option
def create(
    tenant: str,
    *,
    webhook_url: str | None,
    webhook_secret: str | None,
    as_json: bool,
    **limits: Any,
) -> None:
    """Make a key for TENANT and print it; it cannot be read again.

    A tenant may have several keys. From the first one on every request to the API needs a key.
    """
    if not tenant:
        raise InvalidRequest("TENANT: must be a name")
    share = _valid(Share, tenant=tenant, **limits)
    webhook = None
    if webhook_url is not None:
        webhook = Webhook.of({"url": webhook_url, "secret": webhook_secret})
    elif webhook_secret is not None:
        raise click.UsageError("--webhook-secret needs --webhook-url")

    async def run(found: TenantKeys) -> tuple[str, TenantKey]:
        if webhook is not None:
            await checked(webhook)
        return await found.create(share, webhook)

    key, entry = _with_keys(run)
    if as_json:
        echo_json({"key": key, **_shown(entry)})
    else:
        click.echo(key)


@keys.command("list")
@json_option
def list_keys(as_json: bool) -> None:
    """All keys by their ids, without their secrets."""
    found = _with_keys(lambda k: k.all())
    if as_json:
        echo_json([_shown(entry) for entry in found])
        return
    header = ("ID", "TENANT", "RATE", "BURST", "MAX JOBS", "DAILY", "MAX PRIORITY", "CREATED")
    echo_table(header, [_row(entry) for entry in found])


@keys.command()
@click.argument("key_id", metavar="ID", type=Id())
def revoke(key_id: str) -> None:
    """Have a key, by its id, be valid no more; within a second everywhere."""
    if not _with_keys(lambda k: k.revoke(key_id)):
        raise InvalidRequest(f"no key {key_id!r}; `omniq keys list` shows them")


def _with_keys(work: Callable[[TenantKeys], Awaitable[T]]) -> T:
    return with_store(lambda store: work(TenantKeys(store.redis)))


def _valid(model: type[T], **fields: Any) -> T:
    try:
        return model(**fields)
    except ValidationError as exc:
        first = exc.errors()[0]
        name = "-".join(map(str, first["loc"])).replace("_", "-")
        raise InvalidRequest(f"{name}: {first['msg']}") from exc


def _shown(entry: TenantKey) -> dict[str, Any]:
    hook = entry.webhook
    return {
        "id": entry.id,
        **entry.share.model_dump(),
        "webhook_url": None if hook is None else hook.url,
        "created": entry.created,
    }


def _row(entry: TenantKey) -> tuple[object, ...]:
    share = entry.share

    def or_none(limit: float | None) -> str:
        return "-" if limit is None else f"{limit:g}"

    return (
        entry.id,
        share.tenant,
        or_none(share.rate),
        share.burst if share.rate is not None else "-",
        or_none(share.max_jobs),
        or_none(share.daily),
        share.max_priority,
        time.strftime("%Y-%m-%d %H:%M", time.gmtime(entry.created)),
    )

"""Telling a URL of a job's end, as the Standard Webhooks specification has it.

A request may name a URL; the script that ends its job notes it in a schedule in Redis
(:func:`omniq.keys.webhooks`), in the same step. Whoever delivers (each process of the API does)
takes what is due under a lease, so that a deliverer that dies loses nothing; a message may come
twice, with the same id. It is the job as the API shows it. Deliveries that fail are tried again
(:data:`PAUSES`) as long as the job is kept.

A message is signed if there is a secret: ``webhook-signature: v1,BASE64`` is the HMAC-SHA256 of
``ID.TIMESTAMP.BODY`` (https://github.com/standard-webhooks/standard-webhooks).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from omniq.errors import InvalidRequest
from omniq.jobs.scripts import JobScripts
from omniq.net_guard import MAX_URL, checked_url
from omniq.redis_client import Client
from omniq.settings import get_settings

logger = logging.getLogger(__name__)

SECRET_PREFIX = "whsec_"
SECRET_BYTES = range(24, 65)
PAUSES = (5.0, 60.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0)
"""Seconds between the tries, each lengthened by up to a half at random."""


class Webhook(BaseModel):
    """Whom to tell of a job's end."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(max_length=MAX_URL, description="Takes a POST; any status 2xx is an answer.")
    secret: str | None = Field(
        None, description="`whsec_` and 24 to 64 bytes in base64; then messages are signed."
    )

    @field_validator("secret")
    @classmethod
    def _is_key(cls, value: str | None) -> str | None:
        if value is not None and len(secret_bytes(value)) not in SECRET_BYTES:
            raise ValueError("must be 'whsec_' and 24 to 64 bytes in base64")
        return value

    @classmethod
    def of(cls, given: Any) -> Webhook:
        """The webhook that an object of JSON says.

        Raises:
            InvalidRequest: naming every faulty field.
        """
        try:
            return cls.model_validate(given)
        except ValidationError as exc:
            found = exc.errors(include_url=False, include_input=False)
            faults = [
                {
                    "field": ".".join(map(str, ("webhook", *e["loc"]))),
                    "message": e["msg"].removeprefix("Value error, "),
                }
                for e in found
            ]
            first = faults[0]
            raise InvalidRequest(f"{first['field']}: {first['message']}", fields=faults) from exc


@dataclass(frozen=True, slots=True)
class Due:
    """A message to be sent now."""

    job: str
    hook: Webhook
    tries: int
    """With this one."""
    receiver: str = ""
    """Whose it is: a tenant, or else a host."""
    lease: str = ""
    """Its end, by which the one who has it is known."""


class Schedule:
    """Which messages are due; raises BrokerUnavailable when Redis cannot be used."""

    def __init__(self, redis: Client) -> None:
        self._run = JobScripts(redis).run

    async def claim(
        self, most: int, lease: float, each: int | None = None, has: Mapping[str, int] | None = None
    ) -> list[Due]:
        """Messages that are due; nobody else's for ``lease`` seconds.

        Args:
            each: most that one receiver may have at once.
            has: how many each receiver has already.
        """
        arguments = [most, repr(lease), each or most, orjson.dumps(has or {})]
        found = iter(await self._run("claim_hooks", "-", arguments))
        due = []
        for job, hook, tries, receiver, end in zip(*[found] * 5, strict=True):
            try:
                webhook = Webhook.model_validate_json(hook)
            except ValidationError:
                # Of another version of omniq: it must not hold up the others.
                logger.exception("the webhook of job %s cannot be read; given up", job.decode())
                await self._settle(job, end, "")
                continue
            due.append(Due(job.decode(), webhook, int(tries), receiver.decode(), end.decode()))
        return due

    async def settle(self, due: Due, again: float | None) -> None:
        """A message needs no other try, or one in ``again`` seconds; nothing happens if its lease
        has lapsed and another one has it, or if its job has ended anew.
        """
        await self._settle(due.job, due.lease, "" if again is None else repr(again))

    async def _settle(self, *arguments: str | bytes) -> None:
        await self._run("settle_hook", "-", arguments)


def secret_bytes(secret: str) -> bytes:
    """The key that a secret stands for; empty if it is none."""
    try:
        encoded = secret.removeprefix(SECRET_PREFIX)
        return base64.b64decode(encoded, validate=True) if encoded != secret else b""
    except (binascii.Error, ValueError):
        return b""


async def checked(hook: Webhook) -> str:
    """The hook as the job's record keeps it.

    Raises:
        InvalidRequest: its URL leads where it may not.
    """
    settings = get_settings()
    await checked_url(
        hook.url,
        allow=settings.webhook_allow,
        schemes=settings.webhook_schemes,
        field="webhook.url",
    )
    return hook.model_dump_json()


def signed(message_id: str, timestamp: int, body: bytes, secret: str | None) -> dict[str, str]:
    """The headers of a message."""
    headers = {"webhook-id": message_id, "webhook-timestamp": str(timestamp)}
    if secret is not None:
        text = f"{message_id}.{timestamp}.".encode() + body
        digest = hmac.digest(secret_bytes(secret), text, hashlib.sha256)
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers


def message(state: str, finished: str, job: Mapping[str, Any]) -> bytes:
    """The body of a message: its type, when the job has ended (ISO 8601), the job."""
    return orjson.dumps({"type": f"job.{state}", "timestamp": finished, "data": job})

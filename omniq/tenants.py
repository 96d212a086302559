"""Tenants' API keys: made, listed and revoked by the operator, kept in Redis hashed.

A key is ``omq_ID_SECRET``: the id finds its entry, the secret is 256 random bits, of which the
entry holds the SHA-256. (A slow hash is for passwords, which can be guessed; these cannot.)
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omniq import keys
from omniq.errors import NotReady
from omniq.jobs.admission import Share
from omniq.jobs.webhooks import Webhook
from omniq.redis_client import Client, broker_errors

logger = logging.getLogger(__name__)

PREFIX = "omq_"
_FORM = re.compile(rf"{PREFIX}([0-9a-f]{{12}})_([A-Za-z0-9_-]{{43}})")


class TenantKey(BaseModel):
    """One key, as it is kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    digest: str = Field(description="SHA-256 of the secret, in hex.", repr=False)
    share: Share
    webhook: Webhook | None = Field(
        None, description="Told of the end of jobs that name none.", repr=False
    )
    created: float = Field(description="Unix time.")


class TenantKeys:
    """All keys; methods raise :class:`~omniq.errors.BrokerUnavailable` without a broker."""

    def __init__(self, redis: Client) -> None:
        self.redis = redis

    async def create(self, share: Share, webhook: Webhook | None = None) -> tuple[str, TenantKey]:
        """A new key, which is nowhere else to be read, and its entry."""
        secret = secrets.token_urlsafe(32)
        entry = TenantKey(
            id=secrets.token_hex(6),
            digest=_digest(secret),
            share=share,
            webhook=webhook,
            created=time.time(),
        )
        with broker_errors():
            async with self.redis.pipeline(transaction=True) as pipe:
                pipe.hset(keys.api_keys(), entry.id, entry.model_dump_json())
                pipe.set(keys.api_closed(), 1)
                await pipe.execute()
        return f"{PREFIX}{entry.id}_{secret}", entry

    async def all(self) -> list[TenantKey]:
        """Every key, the oldest first; of those of another version of omniq the log tells."""
        with broker_errors():
            raw = await self.redis.hgetall(keys.api_keys())
        found = []
        for key_id, text in raw.items():
            try:
                found.append(_read(key_id.decode(), text))
            except NotReady as exc:
                logger.warning("%s", exc.message)
        return sorted(found, key=lambda k: k.created)

    async def closed(self) -> bool:
        """Whether there is one, or has been: to revoke the last one must not open the system."""
        with broker_errors():
            return bool(await self.redis.exists(keys.api_closed()))

    async def revoke(self, key_id: str) -> bool:
        """Forget a key; False: there is none of that id."""
        with broker_errors():
            return bool(await self.redis.hdel(keys.api_keys(), key_id))

    async def get(self, key_id: str) -> TenantKey | None:
        """The key of that id.

        Raises:
            NotReady: it is one of another version of omniq, whose limits this one cannot keep.
        """
        with broker_errors():
            raw = await self.redis.hget(keys.api_keys(), key_id)
        return None if raw is None else _read(key_id, raw)


def _read(key_id: str, text: bytes) -> TenantKey:
    try:
        return TenantKey.model_validate_json(text)
    except ValidationError as exc:
        raise NotReady(f"key {key_id} is not one of this version of omniq") from exc


def split(key: str) -> tuple[str, str] | None:
    """Id and digest of a tenant's key; None: it has not the form of one."""
    match = _FORM.fullmatch(key)
    return None if match is None else (match[1], _digest(match[2]))


def is_secret_of(entry: TenantKey, digest: str) -> bool:
    """Whether a key's digest is that of the entry, found out in a time that tells nothing."""
    return hmac.compare_digest(entry.digest, digest)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()

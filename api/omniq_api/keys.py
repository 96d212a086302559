"""API keys: who asks, by the key that every route below ``/v1`` wants if there are any.

The operator's keys are settings (``OMNIQ_API_KEYS``), tenants' are in Redis
(:mod:`omniq.tenants`), from where each process takes what it has not asked for a second ago.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections import OrderedDict
from collections.abc import Sequence

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniq import tenants
from omniq.errors import BrokerUnavailable, NotReady
from omniq.jobs.admission import Share, Usage
from omniq.tenants import TenantKey, TenantKeys
from omniq_api.openai_error import INVALID, SERVER, error_body
from omniq_api.problems import UNAVAILABLE_DETAIL, omniq_problem, problem_response

PROTECTED = "/v1"
UNAUTHORIZED = "send a valid API key as 'authorization: Bearer KEY'"
TRUST = 1.0
"""Seconds for which a look at the keys is good: a revoked key is valid no longer than that."""
REMEMBERED = 10_000
DAY = 86_400

KEY = "omniq.key"
"""In the ASGI scope: the tenant's key; None: the operator's, or none is asked for."""
UNKNOWN = "omniq.unknown"
"""In the ASGI scope: whether keys are asked for could not be found out."""
STORE = "omniq.store"
"""In the ASGI scope: the job store of a tenant's request."""


class _Known:
    """What this process knows of tenants' keys."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, tuple[float, TenantKey | None]] = OrderedDict()
        self._closed: tuple[float, bool] = (float("-inf"), False)

    async def key(self, found: TenantKeys, text: str) -> TenantKey | None:
        """The valid key that a client has sent; None: it is none."""
        parts = tenants.split(text)
        if parts is None:
            return None
        key_id, digest = parts
        until, entry = self._keys.get(key_id, (float("-inf"), None))
        if time.monotonic() > until:
            entry = await found.get(key_id)
            self._keys[key_id] = (time.monotonic() + TRUST, entry)
            self._keys.move_to_end(key_id)
            if len(self._keys) > REMEMBERED:
                self._keys.popitem(last=False)
        return entry if entry is not None and tenants.is_secret_of(entry, digest) else None

    @property
    def is_closed(self) -> bool:
        """Whether tenants' keys were asked for at the last look."""
        return self._closed[1]

    def fresh(self, text: bytes) -> bool:
        """Whether the broker need not be asked about a key, or about whether one is asked for."""
        if not text:
            return time.monotonic() <= self._closed[0]
        parts = tenants.split(text.decode("latin-1"))
        return parts is None or time.monotonic() <= self._keys.get(parts[0], (0.0, None))[0]

    async def closed(self, found: TenantKeys) -> bool:
        """Whether tenants' keys are asked for."""
        until, closed = self._closed
        if time.monotonic() > until:
            closed = await found.closed()
            self._closed = (time.monotonic() + TRUST, closed)
        return closed


class ApiKeyMiddleware:
    """Answers 401 to requests without a key; health, readiness and docs need none.

    Args:
        keys: the operator's.
        required: whether a key is asked for although there are none.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], *, required: bool = False) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._required = required or bool(keys)
        self._known = _Known()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        if scope["type"] != "http" or not self._is_protected(scope) or self._is_open(scope):
            await self.app(scope, receive, send)
            return
        refusal = await self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
        elif scope.get(KEY) is not None:
            await self.app(scope, receive, _with_limits(scope, send))
        else:
            await self.app(scope, receive, send)

    async def _refusal(self, scope: Scope) -> Response | None:
        """What to answer instead; else the scope says who asks."""
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else b""
        # Digests of one length, all compared: neither time tells anything about a key.
        digest = hashlib.sha256(key).digest()
        if sum(hmac.compare_digest(digest, known) for known in self._digests) > 0:
            return None
        services = scope["app"].state.services
        found = TenantKeys(services.redis)
        try:
            if not self._known.fresh(key):
                await services.probe.check()
            if key.startswith(tenants.PREFIX.encode()):
                entry = await self._known.key(found, key.decode("latin-1"))
                if entry is not None:
                    scope[KEY] = entry
                    return None
            if not self._required and not await self._known.closed(found):
                return None
        except (BrokerUnavailable, NotReady) as exc:
            if self._required or key:
                also = error_body(UNAVAILABLE_DETAIL, SERVER, code=exc.code)
                return omniq_problem(Request(scope), exc, also)
            # Nothing of a job can be read without a broker.
            scope[UNKNOWN] = True
            return None
        return _unauthorized(scope)

    def _is_open(self, scope: Scope) -> bool:
        """Whether it is known already that no key is asked for, and none was sent."""
        if self._required or self._known.is_closed or not self._known.fresh(b""):
            return False
        return not any(name == b"authorization" for name, _ in scope["headers"])

    def _is_protected(self, scope: Scope) -> bool:
        return is_protected(str(scope["path"]).removeprefix(str(scope.get("root_path", ""))))


def is_protected(path: str) -> bool:
    """Whether a path is one for which a key may be asked."""
    return path == PROTECTED or path.startswith(f"{PROTECTED}/")


def _unauthorized(scope: Scope) -> Response:
    return problem_response(
        Request(scope),
        401,
        "invalid_api_key",
        UNAUTHORIZED,
        headers={"www-authenticate": "Bearer"},
        # One document for both kinds of client: OpenAI's look for `error`.
        members=error_body(UNAUTHORIZED, INVALID, code="invalid_api_key"),
    )


def _with_limits(scope: Scope, send: Send) -> Send:
    """A ``send`` that says what is left of the tenant's share, if a job was asked for."""

    async def sending(message: Message) -> None:
        store = scope.get(STORE)
        if message["type"] == "http.response.start" and store is not None and store.usage:
            headers = MutableHeaders(scope=message)
            for name, value in limit_headers(store.share, store.usage).items():
                headers[name] = value
        await send(message)

    return sending


def limit_headers(share: Share, usage: Usage) -> dict[str, str]:
    """``RateLimit`` and ``RateLimit-Policy`` (draft-ietf-httpapi-ratelimit-headers-10)."""
    policies, left = [], []
    if share.rate is not None and usage.at_once is not None:
        window = max(1, math.ceil(share.burst / share.rate))
        policies.append(f'"rate";q={share.burst};w={window}')
        left.append(f'"rate";r={usage.at_once};t={math.ceil(usage.full_after)}')
    if share.daily is not None and usage.today is not None:
        policies.append(f'"daily";q={share.daily};w={DAY}')
        left.append(f'"daily";r={usage.today};t={math.ceil(DAY - time.time() % DAY)}')
    if not policies:
        return {}
    return {"ratelimit-policy": ", ".join(policies), "ratelimit": ", ".join(left)}

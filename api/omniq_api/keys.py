"""API keys: every route below ``/v1`` wants one of them, if there are any."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from omniq_api.openai_compat.faults import INVALID, error_body
from omniq_api.problems import problem_response

PROTECTED = "/v1"


class ApiKeyMiddleware:
    """Answers 401 to requests without a key; health, readiness and docs need none."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or refuse."""
        if scope["type"] == "http" and self._is_protected(scope) and not self._has_key(scope):
            message = "send a valid API key as 'authorization: Bearer KEY'"
            answer = problem_response(
                Request(scope),
                401,
                "invalid_api_key",
                message,
                headers={"www-authenticate": "Bearer"},
                # One document for both kinds of client: OpenAI's look for `error`.
                members=error_body(message, INVALID, code="invalid_api_key"),
            )
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_protected(self, scope: Scope) -> bool:
        path = str(scope["path"]).removeprefix(str(scope.get("root_path", "")))
        return path == PROTECTED or path.startswith(f"{PROTECTED}/")

    def _has_key(self, scope: Scope) -> bool:
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # Digests of one length, all compared: neither time tells anything about a key.
        digest = hashlib.sha256(key.strip()).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

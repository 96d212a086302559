"""OpenAI's form of an error: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any

INVALID = "invalid_request_error"
SERVER = "server_error"
TOO_MANY = "rate_limit_error"


def error_body(
    message: str, kind: str, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The document; also a member of problem details where nobody knows whether the client is one
    of OpenAI's API, as those look for ``error``.

    Args:
        kind: the client's fault (``INVALID``), the service's (``SERVER``), or ``TOO_MANY``.
    """
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

"""Bodies are strict JSON: no NaN, no lone surrogates, bounded depth, and the right content type."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from omniq_api.problems import ProblemError


class StrictJSONRequest(Request):
    """A request whose JSON is read by orjson, which refuses what ``json`` lets through."""

    async def json(self) -> Any:
        """The body's value.

        Raises:
            orjson.JSONDecodeError: a ``json.JSONDecodeError``, which FastAPI turns into its
                ``json_invalid`` validation error.
        """
        return orjson.loads(await self.body())


class StrictJSONRoute(APIRoute):
    """A route that reads strict JSON only."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the content type check."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def strict(request: Request) -> Response:
            if not isinstance(request, StrictJSONRequest):
                request = StrictJSONRequest(request.scope, request.receive)
            given = request.headers.get("content-type")
            if not _is_json(given) and (given is not None or await request.body()):
                raise ProblemError(
                    415,
                    "unsupported_media_type",
                    f"send the body as 'content-type: application/json', not {given!r}",
                    faults=[{"field": "Content-Type", "message": "must be application/json"}],
                    headers={"accept": "application/json"},
                )
            return await handler(request)

        return strict


def _is_json(content_type: str | None) -> bool:
    if content_type is None:
        return False
    header = Message()
    header["content-type"] = content_type
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (
        subtype == "json" or subtype.endswith("+json")
    )

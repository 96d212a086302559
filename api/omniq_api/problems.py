"""Errors as RFC 9457 problem details: one JSON shape for every fault a client can meet."""

from __future__ import annotations

import http
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import orjson
from fastapi import FastAPI
from fastapi.exceptions import HTTPException, RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omniq import errors
from omniq.config.request import is_form
from omniq_api.openai_error import INVALID, error_body

logger = logging.getLogger("omniq.api")

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:omniq:problem:"
RETRY_AFTER = "1"
MAX_FAULTS = 50
MAX_TEXT = 500

Fault = dict[str, str]

STATUS: dict[type[errors.OmniqError], int] = {
    errors.InvalidRequest: 422,
    errors.InputTooLarge: 413,
    errors.UnsupportedInput: 415,
    errors.JobNotFound: 404,
    errors.JobGone: 410,
    errors.JobUnreadable: 500,
    errors.IdempotencyConflict: 409,
    errors.ShareUsed: 429,
    errors.Overloaded: 503,
    errors.ArtifactNotFound: 404,
    errors.DeadLetterNotFound: 404,
    errors.DeadLetterLost: 409,
    errors.BrokerUnavailable: 503,
    errors.NotReady: 503,
    errors.StoreFull: 503,
}
"""Errors whose message is meant for clients or whose status says enough; all others are 500."""

UNAVAILABLE_DETAIL = "a part this service needs does not answer; try again"


class ProblemError(HTTPException):
    """An error answer decided by a route. FastAPI lets it pass wherever it lets HTTPException."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        faults: Sequence[Fault] = (),
        headers: Mapping[str, str] | None = None,
        **members: Any,
    ) -> None:
        super().__init__(status, detail, headers)
        self.code, self.faults, self.members = code, faults, members


def problem_response(
    request: Request,
    status: int,
    code: str,
    detail: str,
    *,
    faults: Sequence[Fault] = (),
    headers: Mapping[str, str] | None = None,
    instance: str | None = None,
    members: Mapping[str, Any] | None = None,
) -> Response:
    """One problem document; ``members`` are RFC 9457 extension members."""
    body: dict[str, Any] = {
        "type": TYPE_PREFIX + code,
        "title": _title(status),
        "status": status,
        "detail": _short(detail),
        "instance": instance or quote(_short(_path(request))),
        "code": code,
        **(members or {}),
    }
    if faults:
        body["errors"] = [{k: _short(str(v)) for k, v in f.items()} for f in faults[:MAX_FAULTS]]
    return Response(orjson.dumps(body), status, headers=headers, media_type=MEDIA_TYPE)


def _path(request: Request) -> str:
    # Not request.url: that also parses the Host header, which may hold anything.
    return str(request.scope["path"])


def _title(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _short(text: str) -> str:
    """Clients' own text comes back in messages: bounded, and always encodable."""
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 1] + "…"
    return text.encode("utf-8", "replace").decode()


def omniq_problem(
    request: Request, exc: errors.OmniqError, members: Mapping[str, Any] | None = None
) -> Response:
    """The problem for one of omniq's own errors; ``members`` go along with 503."""
    status = next((STATUS[c] for c in type(exc).__mro__ if c in STATUS), 500)
    if status == 500:
        return incident(request, exc)
    if isinstance(exc, errors.Refused):
        return problem_response(
            request,
            status,
            exc.code,
            exc.message,
            headers={"retry-after": str(max(1, math.ceil(exc.retry_after)))},
            members={"limit": exc.limit, "value": exc.value, "size": exc.size},
        )
    if status == 503:
        # The message names hosts and ports: for the log, not for clients.
        logger.warning("%s %r: %s", request.method, _path(request), exc)
        return problem_response(
            request,
            status,
            exc.code,
            UNAVAILABLE_DETAIL,
            headers={"retry-after": RETRY_AFTER},
            members=members,
        )
    faults = exc.fields if isinstance(exc, errors.InvalidRequest) else ()
    return problem_response(request, status, exc.code, exc.message, faults=faults)


def incident(request: Request, exc: Exception) -> Response:
    """500 without internals; the log holds the traceback under the id the client gets.

    A client that left before its body had come whole is no fault of the server's: nobody reads the
    answer, and strangers shall not fill the log.
    """
    if isinstance(exc, ClientDisconnect):
        return problem_response(request, 400, "incomplete_body", "the body has not come whole")
    incident_id = f"urn:uuid:{uuid.uuid4()}"
    logger.error("%s: %s %r failed", incident_id, request.method, _path(request), exc_info=exc)
    return problem_response(
        request,
        500,
        "internal_error",
        "the server failed on this request; its log says why under the id in 'instance'",
        instance=incident_id,
    )


def http_problem(request: Request, exc: StarletteHTTPException) -> Response:
    """The problem for an ``HTTPException`` of a route, of FastAPI or of the router."""
    if isinstance(exc, ProblemError):
        return problem_response(
            request,
            exc.status_code,
            exc.code,
            str(exc.detail),
            faults=exc.faults,
            headers=exc.headers,
            members=exc.members,
        )
    code = _title(exc.status_code).lower().replace(" ", "_").replace("-", "_")
    detail, headers = str(exc.detail), dict(exc.headers or {})
    if exc.status_code == 404:
        detail = f"no route {_path(request)}; see /docs"
    elif exc.status_code == 405:
        headers["Allow"] = allowed = ", ".join(_methods(request))
        detail = f"{request.method} is not allowed here; allowed: {allowed}"
    return problem_response(
        request,
        exc.status_code,
        code,
        detail,
        headers=headers,
        members=error_body(_short(detail), INVALID, code=code),
    )


def _methods(request: Request) -> list[str]:
    """All methods that the path has."""
    scope = request.scope
    found = {
        method
        for route in request.app.router.routes
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if route.matches({**scope, "method": method})[0] is Match.FULL
    }
    return sorted(found | ({"HEAD"} if "GET" in found else set()))


def validation_problem(request: Request, exc: RequestValidationError) -> Response:
    """The problem for input that does not fit a route's models: 400 if no JSON at all, else 422."""
    found = exc.errors()
    if found and found[0]["type"] == "json_invalid":
        reason = found[0]["ctx"]["error"]
        return problem_response(
            request,
            400,
            "malformed_json",
            f"the body is not valid JSON: {reason}",
            faults=[{"field": "body", "message": reason}],
        )
    # Of the forms that a field may have, the one whose type was right tells more.
    found = sorted(found, key=lambda e: _is_of_a_form(e) and e["type"].endswith("_type"))
    faults = [_fault(e) for e in found]
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    detail = f"{faults[0]['field']}: {faults[0]['message']}{more}"
    return problem_response(request, 422, errors.InvalidRequest.code, detail, faults=faults)


def _fault(error: dict[str, Any]) -> Fault:
    where, *path = error["loc"]
    if path and path[-1] == "[key]":
        path.pop()
    path = [part for part in path if not is_form(part)]
    field = ".".join(str(part) for part in path) or str(where)
    if where == "header":
        field = "-".join(part.capitalize() for part in field.split("-"))
    messages = {"extra_forbidden": "unknown field", "missing": "required, but missing"}
    message = messages.get(error["type"], error["msg"]).removeprefix("Value error, ")
    return {"field": field, "message": message}


def _is_of_a_form(error: Any) -> bool:
    return any(map(is_form, error["loc"]))


class IncidentMiddleware:
    """Answers whatever no handler took. Inside Starlette's own last resort, which logs twice."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; on an exception answer 500, or break the connection if an answer had begun."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception as exc:
            if started:
                raise
            await incident(Request(scope), exc)(scope, receive, send)


def install(app: FastAPI) -> None:
    """Make every error of ``app`` a problem document."""

    async def on_omniq(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, errors.OmniqError)
        return omniq_problem(request, exc)

    async def on_http(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, StarletteHTTPException)
        return http_problem(request, exc)

    async def on_validation(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        return validation_problem(request, exc)

    app.add_exception_handler(errors.OmniqError, on_omniq)
    app.add_exception_handler(StarletteHTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_middleware(IncidentMiddleware)

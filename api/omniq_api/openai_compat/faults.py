"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import http
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from omniq.errors import InvalidRequest, OmniqError
from omniq_api.openai_error import INVALID, SERVER, TOO_MANY, error_body
from omniq_api.problems import http_problem, incident, omniq_problem, validation_problem
from omniq_api.strict_json import StrictJSONRoute

SERVICES = "omniq.services"
"""In the ASGI scope: the services of a request that has its own."""
#: Status codes with which a route that runs jobs may answer.
FAULTS = (400, 404, 409, 413, 415, 429, 503, 504)


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str = Field(description="`invalid_request_error`, `rate_limit_error` or `server_error`.")
    param: str | None = Field(description="The faulty field.")
    code: str | None = Field(description="Stable name of the kind of problem.")


class ErrorBody(BaseModel):
    """Error answer in OpenAI's form."""

    error: ErrorObject


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``responses=`` of a route that can answer these errors."""
    return {
        status: {"model": ErrorBody, "description": http.HTTPStatus(status).phrase}
        for status in sorted({*statuses, 500})
    }


class OpenAIError(HTTPException):
    """An error answer of these routes."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(status, message)
        if code is None and status == 400:
            code = InvalidRequest.code
        self.body = error_body(message, kind or _kind(status), code=code, param=param)


def _kind(status: int) -> str:
    if status == 429:
        return TOO_MANY
    return INVALID if status < 500 else SERVER


class OpenAIRoute(StrictJSONRoute):
    """A route of which every error is in OpenAI's format.

    What it says and its status are those of the problem document that another route would answer;
    but input that does not fit is 400, as clients of OpenAI expect.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, whose exceptions become answers here."""
        handler = super().get_route_handler()

        async def answering(request: Request) -> Response:
            try:
                answer = await handler(request)
                services = request.scope.get(SERVICES)
                if services is not None and services.replayed:
                    answer.headers["idempotent-replayed"] = "true"
                return answer
            except OpenAIError as exc:
                return _json(exc.status_code, exc.body)
            except HTTPException as exc:
                return _translated(http_problem(request, exc))
            except RequestValidationError as exc:
                return _translated(validation_problem(request, exc))
            except OmniqError as exc:
                return _translated(omniq_problem(request, exc))
            except Exception as exc:  # logged under the id that the answer names
                return _translated(incident(request, exc))

        return answering


def _translated(problem: Response) -> Response:
    """A problem document in OpenAI's words."""
    found = orjson.loads(bytes(problem.body))
    status = 400 if problem.status_code == 422 else problem.status_code
    faults = found.get("errors") or [{}]
    param = faults[0].get("field")
    message = found["detail"]
    if problem.status_code == 500:
        message = f"{message}: {found['instance']}"
    # A model-wide fault of a body has no field of its own.
    if param == "body" and message.startswith("body: "):
        param, message = None, message.removeprefix("body: ")
    body = error_body(message, _kind(status), code=found["code"], param=param)
    answer = _json(status, body)
    for name in ("retry-after", "connection"):
        if name in problem.headers:
            answer.headers[name] = problem.headers[name]
    return answer


def _json(status: int, body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")

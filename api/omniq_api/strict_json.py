"""Bodies are strict JSON: no NaN, no lone surrogates, bounded depth, and the right content type.

Routes that take files also read forms: the JSON in one field, each file under its input's name.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from omniq_api.problems import ProblemError

JSON = "application/json"
FORM = "multipart/form-data"
#: The form's field that holds the request without its files.
JSON_FIELD = "request"
MAX_FILES = 32
#: More than one is a fault, which is told by the field's name.
MAX_FIELDS = 32
#: ``openapi_extra=`` of a route that reads forms.
FORM_BODY: dict[str, Any] = {
    "requestBody": {
        "content": {
            FORM: {
                "schema": {
                    "type": "object",
                    "required": [JSON_FIELD],
                    "properties": {
                        JSON_FIELD: {
                            "type": "string",
                            "description": "The request as JSON, without its files.",
                            "contentMediaType": JSON,
                            "contentSchema": {"$ref": "#/components/schemas/JobRequest"},
                        }
                    },
                    "additionalProperties": {
                        "type": "string",
                        "format": "binary",
                        "description": "A file under its input's name, which may be repeated.",
                    },
                }
            }
        }
    }
}
#: Bytes of that field.
MAX_JSON = 4 << 20


class StrictJSONRequest(Request):
    """A request whose JSON is read by orjson, which refuses what ``json`` lets through."""

    async def json(self) -> Any:
        """The body's value.

        Raises:
            orjson.JSONDecodeError: a ``json.JSONDecodeError``, which FastAPI turns into its
                ``json_invalid`` validation error.
        """
        return orjson.loads(await self.body())


class FormRequest(StrictJSONRequest):
    """A form, to be read as the JSON body that it stands for; files are bytes in it."""

    def __init__(self, scope: Scope, receive: Receive, value: Any) -> None:
        headers = [(k, v) for k, v in scope["headers"] if k != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        super().__init__({**scope, "headers": headers}, receive)
        self._value = value

    async def body(self) -> bytes:
        """Something: it has been read."""
        return b"{}"

    async def json(self) -> Any:
        """The body that the form stands for."""
        return self._value


class StrictJSONRoute(APIRoute):
    """A route that reads strict JSON only."""

    #: What the route reads: JSON, forms, or both.
    accepts: tuple[str, ...] = (JSON,)

    async def read_form(self, request: Request) -> Any:
        """The JSON body that a form stands for, where forms are read; files are bytes in it.

        Raises:
            ProblemError: the form cannot be read, or a field is not what it should be.
        """
        raise NotImplementedError

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the content type check."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        allowed = " or ".join(self.accepts)

        async def strict(request: Request) -> Response:
            if not isinstance(request, StrictJSONRequest):
                request = StrictJSONRequest(request.scope, request.receive)
            given = request.headers.get("content-type")
            if FORM in self.accepts and _type(given) == FORM:
                value = await self.read_form(request)
                return await handler(FormRequest(request.scope, request.receive, value))
            if JSON in self.accepts and (
                _is_json(given) or (given is None and not await request.body())
            ):
                return await handler(request)
            raise ProblemError(
                415,
                "unsupported_media_type",
                f"send the body as 'content-type: {allowed}', not {given!r}",
                faults=[{"field": "Content-Type", "message": f"must be {allowed}"}],
                headers={"accept": self.accepts[0]},
            )

        return strict


class FilesRoute(StrictJSONRoute):
    """A route that reads strict JSON, or a form with a field ``request`` of it and files."""

    accepts = (JSON, FORM)

    async def read_form(self, request: Request) -> Any:
        """The form's field ``request``, with the files among the inputs."""
        return await _read_job(request)


def _type(content_type: str | None) -> str:
    if content_type is None:
        return ""
    header = Message()
    header["content-type"] = content_type
    return header.get_content_type()


def _is_json(content_type: str | None) -> bool:
    main, _, subtype = _type(content_type).partition("/")
    return main == "application" and (subtype == "json" or subtype.endswith("+json"))


async def form_parts(request: Request, max_fields: int) -> list[tuple[str, str | bytes]]:
    """The parts of a form in order, by name: fields as text, files as bytes.

    Raises:
        ProblemError: the form cannot be read, or has too many parts or too long a field.
    """
    try:
        async with request.form(
            max_files=MAX_FILES, max_fields=max_fields, max_part_size=MAX_JSON
        ) as form:
            return [
                (name, await item.read() if isinstance(item, UploadFile) else item)
                for name, item in form.multi_items()
            ]
    except ProblemError:
        raise
    except StarletteHTTPException as exc:
        raise bad_form("body", str(exc.detail)) from exc


async def _read_job(request: Request) -> dict[str, Any]:
    value: Any = None
    files: dict[str, list[bytes]] = {}
    for name, item in await form_parts(request, MAX_FIELDS):
        if name == JSON_FIELD:
            if value is not None:
                raise bad_form(JSON_FIELD, "is given twice")
            try:
                value = orjson.loads(item)
            except orjson.JSONDecodeError as exc:
                raise bad_form(JSON_FIELD, f"is not valid JSON: {exc}") from exc
        elif isinstance(item, bytes):
            files.setdefault(name, []).append(item)
        else:
            raise bad_form(name, "must be a file")
    if not isinstance(value, dict):
        raise bad_form(JSON_FIELD, "must be the request as a JSON object")
    inputs = value.setdefault("input", {})
    if not isinstance(inputs, dict):
        raise bad_form(JSON_FIELD, "'input' must be an object")
    for name, data in files.items():
        if name in inputs:
            raise bad_form(name, "is given twice, also in the request's input")
        inputs[name] = data if len(data) > 1 else data[0]
    return value


def bad_form(field: str, message: str) -> ProblemError:
    """400: a part of the form is not what it should be."""
    return ProblemError(
        400, "malformed_form", f"{field}: {message}", faults=[{"field": field, "message": message}]
    )

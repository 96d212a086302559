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

FORM = "multipart/form-data"
#: The form's field that holds the request without its files.
JSON_FIELD = "request"
MAX_FILES = 32
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

    #: Whether forms are read too.
    forms = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind the content type check."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        allowed = f"application/json or {FORM}" if self.forms else "application/json"

        async def strict(request: Request) -> Response:
            if not isinstance(request, StrictJSONRequest):
                request = StrictJSONRequest(request.scope, request.receive)
            given = request.headers.get("content-type")
            if self.forms and _type(given) == FORM:
                return await handler(await _read_form(request))
            if not _is_json(given) and (given is not None or await request.body()):
                raise ProblemError(
                    415,
                    "unsupported_media_type",
                    f"send the body as 'content-type: {allowed}', not {given!r}",
                    faults=[{"field": "Content-Type", "message": f"must be {allowed}"}],
                    headers={"accept": "application/json"},
                )
            return await handler(request)

        return strict


class FilesRoute(StrictJSONRoute):
    """A route that reads strict JSON, or a form with a field ``request`` of it and files."""

    forms = True


def _type(content_type: str | None) -> str:
    if content_type is None:
        return ""
    header = Message()
    header["content-type"] = content_type
    return header.get_content_type()


def _is_json(content_type: str | None) -> bool:
    main, _, subtype = _type(content_type).partition("/")
    return main == "application" and (subtype == "json" or subtype.endswith("+json"))


async def _read_form(request: Request) -> FormRequest:
    """The body that a form stands for: its field ``request``, the files among the inputs.

    Raises:
        ProblemError: the form cannot be read, or a field is not what it should be.
    """
    value: Any = None
    files: dict[str, list[bytes]] = {}
    try:
        async with request.form(max_files=MAX_FILES, max_fields=1, max_part_size=MAX_JSON) as form:
            for name, item in form.multi_items():
                if name == JSON_FIELD:
                    if value is not None:
                        raise _bad_form(JSON_FIELD, "is given twice")
                    value = orjson.loads(item if isinstance(item, str) else await item.read())
                elif isinstance(item, UploadFile):
                    files.setdefault(name, []).append(await item.read())
                else:
                    raise _bad_form(name, "must be a file")
    except ProblemError:
        raise
    except StarletteHTTPException as exc:
        raise _bad_form("body", str(exc.detail)) from exc
    except orjson.JSONDecodeError as exc:
        raise _bad_form(JSON_FIELD, f"is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise _bad_form(JSON_FIELD, "must be the request as a JSON object")
    inputs = value.setdefault("input", {})
    if not isinstance(inputs, dict):
        raise _bad_form(JSON_FIELD, "'input' must be an object")
    for name, data in files.items():
        if name in inputs:
            raise _bad_form(name, "is given twice, also in the request's input")
        inputs[name] = data if len(data) > 1 else data[0]
    return FormRequest(request.scope, request.receive, value)


def _bad_form(field: str, message: str) -> ProblemError:
    return ProblemError(
        400, "malformed_form", f"{field}: {message}", faults=[{"field": field, "message": message}]
    )

"""The OpenAPI document: error answers of every route, with examples, as problem details."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field

from omniq_api.keys import UNAUTHORIZED, is_protected
from omniq_api.problems import MEDIA_TYPE, TYPE_PREFIX


class FieldFault(BaseModel):
    """One faulty field."""

    field: str = Field(description="Path of the field, e.g. `parameters.width`.")
    message: str = Field(description="What is wrong with it and what is allowed.")


class Problem(BaseModel):
    """Error answer (RFC 9457)."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="Identifies the kind of problem, like `code`.")
    title: str = Field(description="The status in words.")
    status: int
    detail: str = Field(description="What happened, for people.")
    instance: str = Field(description="The path asked for; on 500 the id under which it is logged.")
    code: str = Field(description="Stable name of the kind of problem, for programs.")
    errors: list[FieldFault] = Field(default_factory=list, description="Every faulty field.")


#: How a file is described.
FILE = {"schema": {"type": "string", "format": "binary"}}
SCHEME = "apiKey"
#: What may be answered before a route is reached; always a problem document.
BEFORE = (401, 413, 500, 503)

Example = tuple[str, str, str, list[tuple[str, str]]]

EXAMPLES: dict[int, Example] = {
    400: (
        "Malformed JSON",
        "malformed_json",
        "the body is not valid JSON: unexpected end of data",
        [("body", "unexpected end of data")],
    ),
    401: ("No valid API key", "invalid_api_key", UNAUTHORIZED, []),
    403: ("Not for tenants", "operators_only", "a tenant's key may not ask for this", []),
    404: (
        "Unknown",
        "job_not_found",
        "no job 'x': it never existed, or is no longer kept",
        [],
    ),
    409: ("Not finished", "job_not_finished", "job is running; it has no artifact 'image' yet", []),
    410: ("No longer kept", "job_gone", "job x is no longer kept", []),
    413: (
        "Body too large",
        "body_too_large",
        "the body must have at most 33554432 bytes",
        [("body", "must have at most 33554432 bytes")],
    ),
    415: (
        "Not JSON",
        "unsupported_media_type",
        "send the body as 'content-type: application/json', not 'text/plain'",
        [("Content-Type", "must be application/json")],
    ),
    422: (
        "Faulty fields",
        "invalid_request",
        "parameters.width: must be at least 64; got 0",
        [("parameters.width", "must be at least 64; got 0")],
    ),
    429: (
        "The tenant's share is used up; Retry-After says when to ask again",
        "share_used",
        "your limit concurrent_jobs is reached: at most 8, at present 8",
        [],
    ),
    500: (
        "Failed",
        "internal_error",
        "the server failed on this request; its log says why under the id in 'instance'",
        [],
    ),
    503: (
        "Overloaded, or the broker is unavailable; Retry-After says when to ask again",
        "broker_unavailable",
        "a part this service needs does not answer; try again",
        [],
    ),
    504: ("Not finished in time", "not_finished_in_time", "the job has not ended within 300 s", []),
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """``responses=`` of a route that can answer these errors."""
    return {status: _problem(status) for status in sorted({*statuses, 500})}


def _problem(status: int) -> dict[str, Any]:
    title, code, detail, faults = EXAMPLES[status]
    example: dict[str, Any] = {
        "type": TYPE_PREFIX + code,
        "title": title,
        "status": status,
        "detail": detail,
        "instance": "/v1/jobs",
        "code": code,
    }
    if faults:
        example["errors"] = [{"field": f, "message": m} for f, m in faults]
    return {
        "description": title,
        "content": {
            MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "example": example}
        },
    }


def install(app: FastAPI, *, keys: bool) -> None:
    """Make ``app.openapi()`` describe problems instead of FastAPI's own validation errors.

    Args:
        keys: whether an API key is asked for in any case; else it is if there are tenants.
    """

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                summary=app.summary,
                description=app.description,
                routes=app.routes,
                tags=app.openapi_tags,
            )
            template = "#/components/schemas/{model}"
            own = Problem.model_json_schema(ref_template=template)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(own.pop("$defs"))
            schemas["Problem"] = own
            _drop_fastapis_errors(schema)
            _ask_for_keys(schema, always=keys)
            _complete(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _drop_fastapis_errors(schema: dict[str, Any]) -> None:
    """Take out the 422 that FastAPI adds to routes whose parameters take any text anyway."""
    for unused in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(unused, None)
    for methods in schema["paths"].values():
        for operation in methods.values():
            if MEDIA_TYPE not in operation["responses"].get("422", {}).get("content", {MEDIA_TYPE}):
                del operation["responses"]["422"]


def _operations(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            yield path, operation


def _ask_for_keys(schema: dict[str, Any], *, always: bool) -> None:
    """Who asks is found out before a route is reached, and needs the broker."""
    schema["components"]["securitySchemes"] = {
        SCHEME: {
            "type": "http",
            "scheme": "bearer",
            "description": "The operator's key, or a tenant's.",
        }
    }
    for path, operation in _operations(schema):
        if is_protected(path):
            operation["security"] = [{SCHEME: []}] if always else [{SCHEME: []}, {}]
            operation["responses"]["401"] = _problem(401)
            operation["responses"].setdefault("503", _problem(503))


def _complete(schema: dict[str, Any]) -> None:
    """What FastAPI does not know: errors from before a route, and that events are no one text."""
    for _, operation in _operations(schema):
        for status in map(str, BEFORE):
            content = operation["responses"].get(status, {}).get("content", {})
            if content and MEDIA_TYPE not in content:
                content |= _problem(int(status))["content"]
        for response in operation["responses"].values():
            for content in response.get("content", {}).values():
                if "itemSchema" in content:
                    content.pop("schema", None)

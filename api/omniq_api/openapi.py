"""The OpenAPI document: error answers of every route, with examples, as problem details."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field

from omniq_api.keys import PROTECTED
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


Example = tuple[str, str, str, list[tuple[str, str]]]

EXAMPLES: dict[int, Example] = {
    400: (
        "Malformed JSON",
        "malformed_json",
        "the body is not valid JSON: unexpected end of data",
        [("body", "unexpected end of data")],
    ),
    401: (
        "No valid API key",
        "invalid_api_key",
        "send a valid API key as 'authorization: Bearer KEY'",
        [],
    ),
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
        "the body may have at most 33554432 bytes",
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


def install(app: FastAPI) -> None:
    """Make ``app.openapi()`` describe problems instead of FastAPI's own validation errors."""

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
            _ask_for_keys(schema)
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


def _ask_for_keys(schema: dict[str, Any]) -> None:
    """Say that the routes below ``/v1`` take an API key, so that clients and ``/docs`` send one.

    Whether one is wanted depends on the settings and on the keys there are: it may be left out.
    """
    schema["components"]["securitySchemes"] = {
        "api_key": {
            "type": "http",
            "scheme": "bearer",
            "description": "One of `OMNIQ_API_KEYS`, or a tenant's. Wanted if there is any.",
        }
    }
    for path, methods in schema["paths"].items():
        if path.startswith(f"{PROTECTED}/"):
            for operation in methods.values():
                operation["security"] = [{"api_key": []}, {}]
                operation["responses"]["401"] = _problem(401)

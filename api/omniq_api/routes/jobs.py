"""Jobs: accept, read, wait, watch, cancel, list."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Body, Header, Path, Query, Request, Response
from pydantic import AfterValidator, ValidationError

from omniq.jobs.model import JobEvent, JobRecord
from omniq.submit import IDEMPOTENCY_KEY, submit
from omniq_api.openapi import problems
from omniq_api.schemas import (
    EXAMPLE_ID,
    EXAMPLE_PROMPT,
    JobPage,
    JobQuery,
    JobRequest,
    JobView,
    job_summary,
    job_view,
)
from omniq_api.services import Base, IdempotencyKey, Live, Services, live_services, mount_path
from omniq_api.sse import HEARTBEAT, EventStreamResponse, check_event_id
from omniq_api.strict_json import FORM_BODY, FilesRoute, StrictJSONRequest, StrictJSONRoute
from omniq_api.waiting import ClientGone, wait_for_end

MAX_WAIT = 60.0
BEGINNING = "0"


class PlainFirstRoute(FilesRoute):
    """A submission route whose plainest form skips FastAPI's solving of dependencies.

    Plain is a faultless JSON body without a query. Everything else takes the long way, which is
    the only one that reports faults.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The short way in front of the long one."""
        thorough = super().get_route_handler()

        async def handler(request: Request) -> Response:
            request = StrictJSONRequest(request.scope, request.receive)
            body = await _plain_body(request)
            if body is None:
                return await thorough(request)
            services = await live_services(request)
            return _job_response(await submit_request(services, body), await mount_path(request))

        return handler


router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=StrictJSONRoute)
submission = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=PlainFirstRoute)

JobId = Annotated[str, Path(examples=[EXAMPLE_ID])]
Wait = Annotated[
    float,
    Query(
        ge=0,
        le=MAX_WAIT,
        allow_inf_nan=False,
        description="Seconds to wait for the job's end before answering with its state.",
    ),
]
JobBody = Annotated[
    JobRequest,
    Body(
        openapi_examples={
            "short": {
                "summary": "Only what is required",
                "value": {"pipeline": "tiny-omni", "input": {"prompt": EXAMPLE_PROMPT}},
            },
            "full": {
                "summary": "Everything",
                "value": JobRequest.model_config["json_schema_extra"]["examples"][0],
            },
        }
    ),
]
#: As ids of events are; the largest that Redis would take have a digit more.
EVENT_ID = "^[0-9]{1,19}(-[0-9]{1,19})?$"
#: One server-sent event; ``itemSchema``, of OpenAPI 3.2, is where FastAPI describes them, too.
EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "id": {"type": "string", "pattern": EVENT_ID},
        "event": {"type": "string"},
        "data": {"type": "string", "contentMediaType": "application/json"},
        "retry": {"type": "integer"},
    },
}
ACCEPTED: dict[int | str, dict[str, Any]] = {
    200: {"model": JobView, "description": "Ended within `wait`."},
    202: {
        "model": JobView,
        "description": "Accepted; `Location` is where it goes on.",
        "headers": {"Location": {"schema": {"type": "string"}, "description": "The job's URL."}},
    },
}


async def submit_request(
    services: Services, body: JobRequest, *, awaited: bool = False
) -> JobRecord:
    """Record and publish the job that ``body`` asks for; ``awaited``: its end is waited for."""
    return await submit(
        services.store,
        pipeline=body.pipeline,
        inputs=body.input,
        parameters=body.parameters,
        priority=body.priority if "priority" in body.model_fields_set else None,
        timeout=body.timeout,
        metadata=body.metadata,
        awaited=awaited,
        idempotency_key=services.idempotency_key,
        webhook=body.webhook or services.webhook,
        outputs=body.outputs,
        allow_partial=body.allow_partial,
        formats=body.formats,
    )


async def _plain_body(request: StrictJSONRequest) -> JobRequest | None:
    """The body if this is a plain submission; None if anything about it needs a closer look."""
    scope, headers = request.scope, request.headers
    if scope["query_string"] or headers.get("content-type") != "application/json":
        return None
    if not IDEMPOTENCY_KEY.fullmatch(headers.get("idempotency-key", "-")):
        return None
    try:
        return JobRequest.model_validate(await request.json())
    except (orjson.JSONDecodeError, ValidationError):
        return None


def replay_headers(record: JobRecord) -> dict[str, str]:
    """What a client is told if the job is that of an earlier request with its key."""
    return {"idempotent-replayed": "true"} if record.replayed else {}


def _job_response(record: JobRecord, base: str) -> Response:
    view = job_view(record, base)
    return Response(
        view.model_dump_json(),
        200 if record.state.final else 202,
        {"location": view.urls.self, **replay_headers(record)},
        "application/json",
    )


@submission.post(
    "",
    status_code=202,
    summary="Submit a job",
    openapi_extra=FORM_BODY,
    response_model=JobView,
    responses={**ACCEPTED, **problems(400, 409, 413, 415, 422, 429, 503)},
)
async def create_job(
    *,
    request: Request,
    services: Live,
    base: Base,
    body: JobBody,
    wait: Wait = 0.0,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Accept a job and answer at once, or, with `wait`, when it has ended or the time is over."""
    record = await submit_request(services, body, awaited=bool(wait))
    if wait:
        try:
            ended = await wait_for_end(services, request.receive, record.id, wait)
        except ClientGone:
            return Response(status_code=202)
        record = ended.model_copy(update={"replayed": record.replayed})
    return _job_response(record, base)


@router.get(
    "",
    summary="List jobs",
    responses=problems(422, 503),
)
async def list_jobs(services: Live, base: Base, query: Annotated[JobQuery, Query()]) -> JobPage:
    """Jobs, newest first. Repeat `state` to allow several."""
    records, following = await services.store.list(
        states=set(query.state) or None,
        pipeline=query.pipeline,
        limit=query.limit,
        cursor=query.cursor,
    )
    return JobPage(jobs=[job_summary(r, base) for r in records], next=following)


@router.get(
    "/{job_id}",
    summary="Read or await a job",
    response_model=JobView,
    responses=problems(404, 410, 422, 503),
)
async def get_job(
    request: Request, services: Live, base: Base, job_id: JobId, wait: Wait = 0.0
) -> Response | JobView:
    """The job as it is, or, with `wait`, as soon as it has ended or the time is over."""
    record = await services.store.get(job_id)
    if wait and not record.state.final:
        try:
            record = await wait_for_end(services, request.receive, job_id, wait)
        except ClientGone:
            return Response(status_code=202)
    return job_view(record, base)


@router.get(
    "/{job_id}/events",
    summary="Watch a job",
    status_code=200,
    response_class=EventStreamResponse,
    responses={
        200: {
            "description": "Server-sent events up to the job's end: `id` resumes, `event` is the "
            "type, `data` is JSON with `type`, `stage`, `time` and `data`. One of type "
            "`key.revoked`, without an id, is the last when the API key has been revoked.",
            "content": {
                "text/event-stream": {
                    "itemSchema": EVENT,
                    "example": "id: 1764428400123-0\nevent: stage.progress\n"
                    'data: {"type":"stage.progress","stage":"dit","time":1764428400.1,'
                    '"data":{"step":3,"total":20}}\n\n',
                }
            },
        },
        204: {"description": "The job has ended and nothing follows `Last-Event-ID`."},
        **problems(404, 410, 422, 503),
    },
)
async def watch_job(
    services: Live,
    job_id: JobId,
    last_event_id: Annotated[
        str,
        Header(
            alias="Last-Event-ID",
            description="Only events behind this one.",
            json_schema_extra={"pattern": EVENT_ID},
        ),
        AfterValidator(check_event_id),
    ] = BEGINNING,
) -> Response:
    """All events of the job from the first one, or from behind `Last-Event-ID`, then live ones."""
    record = await services.store.get(job_id)
    events = services.events(job_id, last_event_id, block=HEARTBEAT)
    if record.state.final and last_event_id != BEGINNING:
        # Browsers reconnect after every end; 204 tells them to stop.
        first = await anext(events, None)
        if first is None:
            return Response(status_code=204)
        events = _with_first(first, events)
    return EventStreamResponse(events)


async def _with_first(
    first: JobEvent | None, rest: AsyncGenerator[JobEvent | None]
) -> AsyncGenerator[JobEvent | None]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event


@router.post(
    "/{job_id}/cancel",
    summary="Cancel a job",
    responses=problems(404, 410, 503),
)
async def cancel_job(services: Live, base: Base, job_id: JobId) -> JobView:
    """Stop the job: a queued one at once, a running one as soon as its stage notices.

    A job that has ended already is returned as it is.
    """
    return job_view(await services.store.cancel(job_id), base)

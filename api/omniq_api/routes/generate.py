"""The one-call form: submit, wait, answer with the result itself."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from omniq.config import get_pipeline
from omniq.errors import InvalidRequest, JobFailed
from omniq.jobs.model import JobRecord, JobState
from omniq_api.negotiation import prefers
from omniq_api.openapi import FILE, problems
from omniq_api.problems import RETRY_AFTER, ProblemError
from omniq_api.routes.artifacts import artifact_response, first_media
from omniq_api.routes.jobs import JobBody, replay_headers, submit_request
from omniq_api.schemas import JobView, artifact_url, job_urls, job_view
from omniq_api.services import Base, IdempotencyKey, Live, Services
from omniq_api.strict_json import FORM_BODY, FilesRoute
from omniq_api.waiting import ClientGone, give_up, wait_for_end

DEFAULT_WAIT = 300.0
MAX_WAIT = 3600.0
FAILED_STATUS = {JobState.FAILED: 500, JobState.CANCELLED: 409, JobState.EXPIRED: 504}

router = APIRouter(tags=["generate"], route_class=FilesRoute)


@router.post(
    "/v1/generate",
    summary="Generate and return the result",
    openapi_extra=FORM_BODY,
    response_class=Response,
    responses={
        200: {
            "model": JobView,
            "description": "The first picture or video, or the finished job as JSON if `Accept` "
            "prefers that or the pipeline makes none. `X-Omniq-Job` names the job; "
            "`X-Omniq-Missing` the outputs that a partial success lacks.",
            "content": dict.fromkeys(("image/*", "video/*", "audio/*"), FILE),
        },
        **problems(400, 409, 413, 415, 422, 429, 503, 504),
    },
)
async def generate(
    *,
    request: Request,
    services: Live,
    base: Base,
    body: JobBody,
    wait: Annotated[
        float,
        Query(gt=0, le=MAX_WAIT, allow_inf_nan=False, description="Seconds to wait at most."),
    ] = DEFAULT_WAIT,
    accept: Annotated[str, Header()] = "*/*",
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Submit a job, wait for its end and answer with what it made.

    A client that disconnects cancels its job, unless it has an `Idempotency-Key`. When the time is
    over the job goes on, and the answer (504) says where.
    """
    record = await submit_request(services, body, awaited=True)
    job_id, replayed = record.id, replay_headers(record)
    try:
        record = await wait_for_end(services, request.receive, job_id, wait)
    except ClientGone:
        await give_up(services, [record])
        return Response(status_code=204)
    urls = job_urls(base, job_id)
    if not record.state.final:
        raise _unfinished(services, record, urls.self, wait)
    if record.state is not JobState.SUCCEEDED:
        error = record.error or {}
        code = str(error.get("code") or JobFailed.code)
        # What only the engine could find wrong with the request is still the request's fault.
        status = 422 if code == InvalidRequest.code else FAILED_STATUS[record.state]
        raise ProblemError(
            status,
            code,
            str(error.get("message") or f"the job was {record.state}"),
            state=record.state,
            job=urls.self,
        )
    headers = {"x-omniq-job": job_id, "vary": "accept", **replayed}
    if record.partial:
        headers["x-omniq-missing"] = ", ".join(sorted(record.missing))
    media = first_media(record.artifacts, list(get_pipeline(record.spec.pipeline).outputs))
    if media and prefers(accept, record.artifacts[media].content_type, "application/json"):
        data, info = await services.store.get_artifact(job_id, media)
        headers["content-location"] = artifact_url(urls.self, media)
        return artifact_response(data, info, headers)
    headers["content-location"] = urls.self
    view = job_view(record, base)
    return Response(view.model_dump_json(), media_type="application/json", headers=headers)


def _unfinished(services: Services, record: JobRecord, url: str, waited: float) -> ProblemError:
    """The job goes on without this request."""
    if services.stopping.is_set():
        return ProblemError(
            503,
            "shutting_down",
            "this server stops; the job goes on",
            headers={"location": url, "retry-after": RETRY_AFTER},
            state=record.state,
            job=url,
        )
    return ProblemError(
        504,
        "not_finished_in_time",
        f"the job has not ended within {waited:g} s; it goes on",
        headers={"location": url},
        state=record.state,
        job=url,
    )

"""The jobs of one request of these routes: submitted together, awaited together, cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import Request, Response

from omniq.errors import InvalidRequest
from omniq.jobs.admission import Share
from omniq.jobs.model import JobRecord, JobState
from omniq.submit import submit
from omniq_api.openai_compat import answers, mapping
from omniq_api.openai_compat.faults import OpenAIError
from omniq_api.openai_compat.mapping import Submission
from omniq_api.openai_error import SERVER
from omniq_api.services import Services
from omniq_api.waiting import ClientGone, give_up, unless_gone


async def submitted(
    services: Services, submissions: Sequence[Submission], *, stream: bool
) -> list[JobRecord]:
    """All jobs, or none; those that do not stream are for :func:`finished`.

    Raises:
        OpenAIError: the request has more jobs than the tenant may ever have at once.
        Refused: there is no room for all of them now.
    """
    done: list[JobRecord] = []
    count = len(submissions)
    _fits(services.store.share, count)
    try:
        for number, each in enumerate(submissions):
            done.append(
                await submit(
                    services.store,
                    pipeline=each.pipeline,
                    inputs=each.inputs,
                    parameters=each.parameters,
                    metadata=each.metadata,
                    stream=stream,
                    awaited=not stream,
                    idempotency_key=services.idempotency_key,
                    part=(number, count),
                    room_for=count - number,
                    webhook=services.webhook,
                    outputs=each.outputs,
                    allow_partial=each.allow_partial,
                )
            )
    except BaseException as exc:  # whatever it was: nobody gets to know of these jobs
        await give_up(services, done)
        if isinstance(exc, InvalidRequest):
            raise mapping.in_openai_terms(exc, each) from exc
        raise
    if services.idempotency_key is not None:  # and so these are the request's own
        services.replayed = all(job.replayed for job in done)
    return done


def _fits(share: Share, count: int) -> None:
    """A request that no waiting helps is not told to come back."""
    burst = None if share.rate is None else share.burst
    for limit, most in (("max_jobs", share.max_jobs), ("daily", share.daily), ("burst", burst)):
        if most is not None and count > most:
            raise OpenAIError(
                400,
                f"the request asks for {count} jobs; this key may have {most} at once ({limit})",
                code="share_too_small",
            )


async def finished(
    request: Request,
    services: Services,
    jobs: Sequence[JobRecord],
    submissions: Sequence[Submission],
) -> list[JobRecord]:
    """The jobs when all have ended well; none if the client has gone, which cancels them.

    Raises:
        OpenAIError: one of them failed, which cancels the others, or this server stops.
    """

    async def one(job: JobRecord, submission: Submission) -> JobRecord:
        record = await services.store.wait(job.id)
        if not record.state.final:
            raise OpenAIError(503, "this server stops; ask again", kind=SERVER)
        if record.state is not JobState.SUCCEEDED:
            raise answers.failure(record, submission)
        return record

    async def together() -> list[JobRecord]:
        return await asyncio.gather(*map(one, jobs, submissions))

    done = False
    try:
        records = await unless_gone(request.receive, together())
        done = True
        return records
    except ClientGone:
        return []
    finally:
        if not done:
            await give_up(services, jobs)


def answer(body: dict[str, Any]) -> Response:
    """An answer in JSON."""
    return Response(orjson.dumps(body), media_type="application/json")


def gone() -> Response:
    """For a client that has gone."""
    return Response(status_code=204)

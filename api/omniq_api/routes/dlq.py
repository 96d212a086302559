"""Dead letters: jobs that failed for good though nothing was wrong with their request.

For the operator: they are of all tenants.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel

from omniq.jobs.dead import DeadLetter, DeadLetters
from omniq_api.openapi import problems
from omniq_api.schemas import EXAMPLE_ID, JobView, job_view
from omniq_api.services import Base, Operator
from omniq_api.strict_json import StrictJSONRoute

router = APIRouter(prefix="/v1/dlq", tags=["dead letters"], route_class=StrictJSONRoute)

LetterId = Annotated[str, Path(max_length=128, examples=[EXAMPLE_ID])]


class DeadLetterList(BaseModel):
    """The newest dead letters."""

    dead_letters: list[DeadLetter]


@router.get("", summary="List dead letters", responses=problems(403, 422, 503))
async def list_letters(
    services: Operator, limit: Annotated[int, Query(ge=1, le=1000)] = 50
) -> DeadLetterList:
    """Jobs first, newest first; then what came by a queue and is no message."""
    return DeadLetterList(dead_letters=await DeadLetters(services.store).list(limit))


@router.get("/{letter_id}", summary="Read a dead letter", responses=problems(403, 404, 422, 503))
async def get_letter(services: Operator, letter_id: LetterId) -> DeadLetter:
    """Why and where it failed, its traceback, the keys of what its stage read."""
    return await DeadLetters(services.store).get(letter_id)


@router.post(
    "/{letter_id}/retry",
    status_code=202,
    summary="Try a job again",
    responses=problems(403, 404, 409, 422, 503),
)
async def retry_letter(services: Operator, base: Base, letter_id: LetterId) -> JobView:
    """From the stage that failed, or from before it if what that reads is gone; without the job's
    deadline. `409` if it holds no job, or its pipeline has changed.
    """
    return job_view(await DeadLetters(services.store).retry(letter_id), base)


@router.delete(
    "/{letter_id}",
    status_code=204,
    summary="Give a dead letter up",
    responses=problems(403, 404, 422, 503),
)
async def drop_letter(services: Operator, letter_id: LetterId) -> Response:
    """The job's record stays as long as that of any other job."""
    await DeadLetters(services.store).drop(letter_id)
    return Response(status_code=204)

"""Is the process alive, can the system serve, and who serves."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field

import omniq
from omniq.jobs.edges import EdgeStore, stores_in_use
from omniq.jobs.workers import WorkerInfo
from omniq.settings import get_settings
from omniq_api.openapi import problems
from omniq_api.readiness import readiness_view
from omniq_api.schemas import HealthView, ReadinessView
from omniq_api.services import Live, Operator

router = APIRouter(tags=["system"])


class WorkerList(BaseModel):
    """All workers that are alive, and how tensors travel between their stages."""

    workers: list[WorkerInfo]
    edges: list[EdgeStore] = Field(
        description="For each edge between stages of the pipelines that have a worker: the store "
        "its tensors go to now, and why."
    )


@router.get("/health", summary="Liveness", responses=problems())
async def health() -> HealthView:
    """The process answers; nothing else is asked."""
    return HealthView(version=omniq.__version__)


@router.get(
    "/ready",
    summary="Readiness",
    responses={
        **problems(),
        503: {
            "model": ReadinessView,
            "description": "A stage of the default pipeline has no ready worker. If the broker "
            "does not answer, the body is a problem document.",
        },
    },
)
async def ready(response: Response, services: Live) -> ReadinessView:
    """200 when every stage of the default pipeline has a ready worker, else 503; says why."""
    view = await readiness_view(services, get_settings().default_pipeline)
    response.status_code = 200 if view.ready else 503
    return view


@router.get("/v1/workers", summary="List workers", responses=problems(403, 422, 503))
async def list_workers(
    services: Operator, pipeline: Annotated[str | None, Query(max_length=64)] = None
) -> WorkerList:
    """Every worker that is alive: stage, state, devices, load, blobs, last log lines; and which
    store each edge between their stages uses. For the operator: tenants' keys may not.
    """
    workers = await services.workers.all(pipeline)
    return WorkerList(workers=workers, edges=stores_in_use(workers))

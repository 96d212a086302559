"""The pipelines this system is configured for."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from omniq.config import available_pipelines, get_pipeline
from omniq.errors import UnknownPipeline
from omniq.settings import get_settings
from omniq_api.describe import PipelineList, PipelineView, pipeline_view
from omniq_api.openapi import problems
from omniq_api.problems import ProblemError

router = APIRouter(prefix="/v1/pipelines", tags=["pipelines"])


@router.get("", summary="List pipelines", responses=problems())
async def list_pipelines() -> PipelineList:
    """Every configured pipeline with its inputs, outputs, parameters and stages."""
    longest = get_settings().max_prompt_chars
    found = available_pipelines().values()
    return PipelineList(pipelines=[pipeline_view(p, longest) for p in found])


@router.get("/{name}", summary="Read a pipeline", responses=problems(404))
async def read_pipeline(name: Annotated[str, Path(examples=["tiny-omni"])]) -> PipelineView:
    """One pipeline."""
    try:
        pipeline = get_pipeline(name)
    except UnknownPipeline as exc:
        # Here the name is the resource asked for, not a field of a body.
        raise ProblemError(404, exc.code, exc.message) from exc
    return pipeline_view(pipeline, get_settings().max_prompt_chars)

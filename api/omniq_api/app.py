"""The ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.responses import RedirectResponse

import omniq
from omniq.settings import get_settings
from omniq_api import openapi, problems
from omniq_api.keys import ApiKeyMiddleware
from omniq_api.limits import BodyLimitMiddleware, HeadMiddleware
from omniq_api.openai_compat import routes as openai_routes
from omniq_api.routes import artifacts, dlq, generate, health, jobs, pipelines
from omniq_api.services import open_services

DESCRIPTION = """
Submit a job to a pipeline, then poll, await or watch it, and fetch what it made. Or do all of it
in one call with `POST /v1/generate`.

Errors are problem details (RFC 9457) with a stable `code` and every faulty field in `errors`;
those of the OpenAI-compatible routes have OpenAI's form.
Times are Unix seconds.
"""
TAGS = [
    {"name": "generate", "description": "One call from prompt to result."},
    {"name": "openai", "description": "Text, pictures and speech, for OpenAI's clients."},
    {"name": "jobs", "description": "Durable requests and their results."},
    {"name": "dead letters", "description": "Jobs that failed for good, and may be tried again."},
    {"name": "pipelines", "description": "What can be asked for."},
    {"name": "system", "description": "Health, readiness, workers."},
]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with open_services(app.state.stopping) as services:
        app.state.services = services
        yield


def create_app() -> FastAPI:
    """The API on the configured broker, which need not run yet.

    A server that sets ``app.state.stopping`` (an ``asyncio.Event``) when it begins to stop ends
    event streams and long polls at once; see :mod:`omniq_api.main`.
    """
    app = FastAPIOffline(
        title="omniq",
        version=omniq.__version__,
        summary="Durable, distributed serving of omni-modality models.",
        description=DESCRIPTION,
        openapi_tags=TAGS,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
        swagger_ui_parameters={"defaultModelsExpandDepth": 0, "displayRequestDuration": True},
    )
    app.state.stopping = asyncio.Event()
    app.include_router(jobs.submission)  # first: routes are tried in this order
    for module in (openai_routes, generate, jobs, artifacts, dlq, pipelines, health):
        app.include_router(module.router)

    @app.get("/", include_in_schema=False)
    async def index() -> RedirectResponse:
        return RedirectResponse("docs")

    settings = get_settings()
    required = settings.api_auth == "required"
    app.add_middleware(
        BodyLimitMiddleware, limit=settings.max_body_bytes, seconds=settings.body_timeout
    )
    app.add_middleware(ApiKeyMiddleware, keys=settings.api_keys, required=required)
    app.add_middleware(HeadMiddleware)
    problems.install(app)
    openapi.install(app, keys=required or bool(settings.api_keys))
    return app

"""Fixtures of the API's tests: the real app on a real Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from api_support import ApiServer, serving
from fastapi import FastAPI

from omniq.jobs.store import JobStore


@pytest.fixture
async def store(broker: object) -> AsyncIterator[JobStore]:
    """The job store, as workers use it."""
    store = JobStore.from_settings()
    yield store
    await store.close()


@pytest.fixture
async def app(broker: object) -> AsyncIterator[FastAPI]:
    """The application, started."""
    from omniq_api.app import create_app

    app = create_app()
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, without a network between."""
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://api"
    ) as client:
        yield client


@pytest.fixture
def server(broker: object) -> Iterator[ApiServer]:
    """A replica in a process of its own."""
    with serving() as server:
        yield server


@pytest.fixture
async def http(server: ApiServer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of that replica."""
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        yield client

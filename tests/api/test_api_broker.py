"""Without a broker every answer is a 503, at once; with it back, everything works again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from api_support import BODY, problem, serving
from omniq_api.services import PROBE_TRUST

from omniq.settings import get_settings

ROUTES = [
    ("POST", "/v1/jobs"),
    ("POST", "/v1/generate"),
    ("GET", "/v1/jobs"),
    ("GET", "/v1/jobs/x"),
    ("GET", "/v1/jobs/x?wait=30"),
    ("GET", "/v1/jobs/x/events"),
    ("GET", "/v1/jobs/x/artifacts/image"),
    ("POST", "/v1/jobs/x/cancel"),
    ("GET", "/ready"),
    ("GET", "/v1/workers"),
]
NO_BROKER_ROUTES = ["/health", "/v1/pipelines", "/v1/pipelines/tiny-omni", "/docs", "/openapi.json"]
AT_ONCE = 1.5


@asynccontextmanager
async def api() -> AsyncIterator[httpx.AsyncClient]:
    from omniq_api.app import create_app

    app = create_app()
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://api") as client,
    ):
        yield client


async def ask(client: httpx.AsyncClient, method: str, path: str) -> httpx.Response:
    body: dict[str, Any] = {"json": BODY} if path in {"/v1/jobs", "/v1/generate"} else {}
    return await client.request(method, path, **(body if method == "POST" else {}))


async def is_unavailable_at_once(client: httpx.AsyncClient, method: str, path: str) -> None:
    begun = time.monotonic()
    response = await ask(client, method, path)
    assert time.monotonic() - begun < AT_ONCE, f"{method} {path}"
    found = problem(response)
    assert (found.status, found.code) == (503, "broker_unavailable"), f"{method} {path}"
    assert int(response.headers["retry-after"]) >= 1
    assert "127.0.0.1" not in response.text  # where the broker is concerns no client


@pytest.fixture
def mute_broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv("OMNIQ_BROKER_URL", f"redis://127.0.0.1:{port}/0")
        get_settings.cache_clear()
        yield
    get_settings.cache_clear()


async def test_a_stopped_broker_is_503_on_every_route(own_valkey: Any) -> None:
    own_valkey.stop()
    async with api() as client:
        for method, path in ROUTES:
            await is_unavailable_at_once(client, method, path)


async def test_openais_clients_are_told_so_in_their_form(own_valkey: Any) -> None:
    """Also where a key cannot be looked up, before their routes are reached."""
    own_valkey.stop()
    headers = {"authorization": f"Bearer omq_{'0' * 12}_{'a' * 43}"}
    async with api() as client:
        answer = await client.get("/v1/models", headers=headers)
        assert problem(answer).status == 503
        assert answer.json()["error"]["code"] == "broker_unavailable"


async def test_a_broker_that_never_answers_is_503_on_every_route(mute_broker: None) -> None:
    async with api() as client:
        await asyncio.gather(*(is_unavailable_at_once(client, m, p) for m, p in ROUTES))
        await is_unavailable_at_once(client, "POST", "/v1/jobs")


async def test_a_broker_that_freezes_is_503_and_enqueues_nothing(own_valkey: Any) -> None:
    async with api() as client:
        assert (await ask(client, "POST", "/v1/jobs")).status_code == 202
        await asyncio.sleep(2 * PROBE_TRUST)  # until the last good answer no longer counts
        os.kill(own_valkey.process.pid, signal.SIGSTOP)
        try:
            for _ in range(2):
                await is_unavailable_at_once(client, "POST", "/v1/jobs")
        finally:
            os.kill(own_valkey.process.pid, signal.SIGCONT)
        assert len((await client.get("/v1/jobs")).json()["jobs"]) == 1


async def test_a_broker_that_dies_under_a_busy_api_is_503_without_a_hang(own_valkey: Any) -> None:
    """Even within the moment for which it is trusted, and with its connections in the pool."""
    async with api() as client:
        assert (await ask(client, "POST", "/v1/jobs")).status_code == 202
        own_valkey.stop(kill=True)
        for _ in range(3):
            for method, path in ROUTES:
                await is_unavailable_at_once(client, method, path)


async def test_routes_that_need_no_broker_answer_without_one(own_valkey: Any) -> None:
    own_valkey.stop()
    async with api() as client:
        for path in NO_BROKER_ROUTES:
            assert (await client.get(path)).status_code == 200, path


async def test_everything_works_again_once_the_broker_is_back(own_valkey: Any) -> None:
    async with api() as client:
        job_id = (await ask(client, "POST", "/v1/jobs")).json()["id"]
        own_valkey.stop()
        await is_unavailable_at_once(client, "POST", "/v1/jobs")
        own_valkey.start()
        assert (await ask(client, "POST", "/v1/jobs")).status_code == 202
        assert (await client.get(f"/v1/jobs/{job_id}")).json()["state"] == "queued"


async def test_a_broker_that_is_full_is_503(own_valkey: Any) -> None:
    import redis

    with redis.Redis(port=own_valkey.port) as admin:
        admin.config_set("maxmemory", 1)
        admin.config_set("maxmemory-policy", "noeviction")
    async with api() as client:
        await is_unavailable_at_once(client, "POST", "/v1/jobs")


async def test_a_server_without_broker_starts_and_serves_a_mute_one_quickly(
    mute_broker: None,
) -> None:
    with serving() as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            await asyncio.gather(
                *(is_unavailable_at_once(client, "POST", "/v1/jobs") for _ in range(50))
            )
            assert (await client.get("/health")).json()["status"] == "ok"

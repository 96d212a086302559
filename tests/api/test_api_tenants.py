"""Tenants: keys, shares, and nobody sees what is another's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_support import (
    BODY,
    PNG,
    PROMPT,
    begin,
    eventually,
    parse_sse,
    play,
    problem,
    state_is,
)  # fmt: skip
from click.testing import CliRunner
from fastapi import FastAPI
from redis import Redis

from omniq import keys
from omniq.cli.main import cli
from omniq.config import available_pipelines
from omniq.jobs.admission import Share
from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore
from omniq.settings import get_settings
from omniq.tenants import TenantKeys

Client = Callable[[str | None], httpx.AsyncClient]
OPERATOR = "operators-own"
EMBEDDER = """
name: embedder
inputs: {prompt: {type: text}}
stages: [{stage_id: ar, engine_type: AR, model: none, output_modalities: [pooling]}]
edges: [{from: input.prompt, to: ar.prompt}]
outputs: {vector: {from: ar.pooling, type: pooling}}
"""


@pytest.fixture
def operators_key(broker: object, monkeypatch: pytest.MonkeyPatch) -> str:
    """Before the application is made."""
    monkeypatch.setenv("OMNIQ_API_KEYS", json.dumps([OPERATOR]))
    get_settings.cache_clear()
    return OPERATOR


@pytest.fixture
async def as_(operators_key: str, app: FastAPI) -> AsyncIterator[Client]:
    """Makes clients that send a key."""
    clients: list[httpx.AsyncClient] = []

    def make(key: str | None) -> httpx.AsyncClient:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app),
            base_url="http://api",
            headers={"authorization": f"Bearer {key}"} if key else {},
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        await client.aclose()


async def key_of(store: JobStore, tenant: str, **limits: Any) -> str:
    key, _ = await TenantKeys(store.redis).create(Share(tenant=tenant, **limits))
    return key


async def test_every_route_of_a_job_is_its_tenants_alone(as_: Client, store: JobStore) -> None:
    ada, bob = as_(await key_of(store, "ada")), as_(await key_of(store, "bob"))
    other_key, operator = as_(await key_of(store, "ada")), as_(OPERATOR)
    job_id = (await ada.post("/v1/jobs", json=BODY)).json()["id"]
    await play(store, job_id)
    open_id = (await ada.post("/v1/jobs", json=BODY)).json()["id"]
    await begin(store, open_id, "ar")
    path = f"/v1/jobs/{job_id}"
    for url in (path, f"{path}?wait=1", f"{path}/events", f"{path}/artifacts/image"):
        assert problem(await bob.get(url)).status == 404, url
        for allowed in (ada, other_key, operator):
            assert (await allowed.get(url)).status_code == 200, url
    assert problem(await bob.post(f"/v1/jobs/{open_id}/cancel")).status == 404
    assert (await store.get(open_id)).state is JobState.RUNNING
    for client, seen in ((ada, 2), (bob, 0), (operator, 2)):
        assert len((await client.get("/v1/jobs")).json()["jobs"]) == seen
    assert (await ada.post(f"/v1/jobs/{open_id}/cancel")).status_code == 200


async def test_a_result_is_no_input_of_another_tenants_job(as_: Client, store: JobStore) -> None:
    from omniq.submit import fetch_input

    ada = as_(await key_of(store, "ada"))
    job_id = (await ada.post("/v1/jobs", json=BODY)).json()["id"]
    await play(store, job_id)
    assert await fetch_input(store.of(Share(tenant="ada")), job_id, "image") == PNG
    with pytest.raises(Exception, match="no job"):
        await fetch_input(store.of(Share(tenant="bob")), job_id, "image")


async def test_openais_routes_are_a_tenants_too(as_: Client, store: JobStore) -> None:
    ada, bob = as_(await key_of(store, "ada")), as_(await key_of(store, "bob"))
    body = {"model": "tiny-omni", "prompt": PROMPT, "response_format": "url"}
    asking = asyncio.create_task(ada.post("/v1/images/generations", json=body))
    while not (jobs := (await store.list())[0]):
        await asyncio.sleep(0.01)
    await play(store, jobs[0].id)
    answer = await asking
    assert answer.status_code == 200, answer.text
    assert jobs[0].spec.tenant == "ada"
    url = answer.json()["data"][0]["url"]
    assert (await ada.get(url)).content == PNG
    assert (await bob.get(url)).status_code == 404
    assert (await as_(None).post("/v1/images/generations", json=body)).status_code == 401


async def test_what_is_the_operators_is_not_for_tenants(as_: Client, store: JobStore) -> None:
    ada = as_(await key_of(store, "ada"))
    for method, path in (
        ("GET", "/v1/workers"),
        ("GET", "/v1/dlq"),
        ("GET", "/v1/dlq/j"),
        ("POST", "/v1/dlq/j/retry"),
        ("DELETE", "/v1/dlq/j"),
    ):
        assert problem(await ada.request(method, path)).code == "operators_only"
    assert (await as_(OPERATOR).get("/v1/workers")).status_code == 200
    assert (await ada.get("/v1/pipelines")).status_code == 200


async def test_keys_are_kept_hashed_and_a_revoked_one_is_refused(
    as_: Client, store: JobStore, redis_client: Redis
) -> None:
    key = await key_of(store, "ada")
    secret = key.rpartition("_")[2]
    entry = redis_client.hgetall(keys.api_keys())
    assert secret.encode() not in b"".join(entry.values())
    ada = as_(key)
    assert (await ada.get("/v1/jobs")).status_code == 200
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
    for faulty in (wrong, key + "x", "omq_", "omq_000000000000_" + "a" * 43, "", "é" * 9):
        headers = {"authorization": f"Bearer {faulty}".encode()}
        answer = await as_(None).get("/v1/jobs", headers=headers)
        assert problem(answer).code == "invalid_api_key", faulty
    assert await TenantKeys(store.redis).revoke(key.split("_")[1])
    until = time.monotonic() + 5
    while (await ada.get("/v1/jobs")).status_code != 401:
        assert time.monotonic() < until
        await asyncio.sleep(0.05)


async def test_an_event_stream_ends_when_its_key_is_revoked(as_: Client, store: JobStore) -> None:
    """Also while nothing happens; that of another key goes on, and so does the job."""
    key = await key_of(store, "ada")
    ada, other = as_(key), as_(await key_of(store, "ada"))
    job_id = (await ada.post("/v1/jobs", json=BODY)).json()["id"]
    path = f"/v1/jobs/{job_id}/events"
    ended, goes_on = (asyncio.create_task(c.get(path)) for c in (ada, other))
    await asyncio.sleep(0.2)
    assert await TenantKeys(store.redis).revoke(key.split("_")[1])
    async with asyncio.timeout(20):
        *_, queued, last = parse_sse((await ended).text)
    assert (queued.type, last.type, last.id) == ("job.queued", "key.revoked", "")
    assert "revoked" in last.data["data"]["message"]
    assert (await ada.get(path)).status_code == 401
    assert not goes_on.done()
    await play(store, job_id)
    async with asyncio.timeout(20):
        assert parse_sse((await goes_on).text)[-1].type == "job.succeeded"


async def test_the_first_tenants_key_closes_an_open_system(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    assert (await client.get("/v1/jobs")).status_code == 200
    key = await key_of(store, "ada")
    until = time.monotonic() + 5
    while (await client.get("/v1/jobs")).status_code != 401:
        assert time.monotonic() < until
        await asyncio.sleep(0.05)
    assert await TenantKeys(store.redis).revoke(key.split("_")[1])
    await asyncio.sleep(1.2)  # what the process has known so long is no longer good
    assert (await client.get("/v1/jobs")).status_code == 401, "to revoke the last opens nothing"
    assert (await client.get("/health")).status_code == 200


async def test_a_used_up_share_is_answered_429_and_says_when(as_: Client, store: JobStore) -> None:
    ada = as_(await key_of(store, "ada", rate=0.5, burst=2, daily=10))
    first = await ada.post("/v1/jobs", json=BODY)
    assert first.headers["ratelimit-policy"] == '"rate";q=2;w=4, "daily";q=10;w=86400'
    assert first.headers["ratelimit"].startswith('"rate";r=1;t=2, "daily";r=9;t=')
    await ada.post("/v1/jobs", json=BODY)
    refused = await ada.post("/v1/jobs", json=BODY)
    found = problem(refused)
    assert (found.status, found.code, found.body["limit"]) == (429, "share_used", "rate")
    assert refused.headers["retry-after"] in ("1", "2")
    assert refused.headers["ratelimit"].startswith('"rate";r=0;t=')
    chat = {"model": "tiny-omni", "prompt": PROMPT}
    refused = await ada.post("/v1/images/generations", json=chat)
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert refused.headers["retry-after"] in ("1", "2")
    assert "ratelimit" not in (await ada.get("/v1/jobs")).headers, "reading costs nothing"


async def test_a_priority_above_the_tenants_highest_is_refused(
    as_: Client, store: JobStore
) -> None:
    ada = as_(await key_of(store, "ada", max_priority=2))
    assert (await ada.post("/v1/jobs", json=BODY)).json()["priority"] == 2
    found = problem(await ada.post("/v1/jobs", json={**BODY, "priority": 3}))
    assert (found.status, found.fields) == (422, ["priority"])


@pytest.fixture
def embedder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker: object) -> str:
    """A pipeline of which one request may ask for many jobs."""
    (tmp_path / "embedder.yaml").write_text(EMBEDDER)
    monkeypatch.setenv("OMNIQ_PIPELINES", json.dumps([str(tmp_path / "embedder.yaml")]))
    get_settings.cache_clear()
    available_pipelines.cache_clear()
    return "embedder"


async def test_many_jobs_of_one_request_are_all_taken_or_none(
    embedder: str, as_: Client, store: JobStore
) -> None:
    """What is refused has used up nothing, so that it can be taken when there is room."""
    ada = as_(await key_of(store, "ada", max_jobs=3, rate=0.01, burst=4, daily=4))
    one = asyncio.create_task(ada.post("/v1/embeddings", json={"model": embedder, "input": ["a"]}))
    while not (jobs := (await store.list())[0]):
        await asyncio.sleep(0.01)
    body = {"model": embedder, "input": ["a", "b", "c"]}
    answer = await ada.post("/v1/embeddings", json=body)
    assert answer.status_code == 429, answer.text
    assert len((await store.list())[0]) == 1
    await store.cancel(jobs[0].id)
    await one
    asking = asyncio.create_task(ada.post("/v1/embeddings", json=body))

    async def all_there() -> bool:
        return len((await store.list())[0]) == 4

    await eventually(all_there)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_request_of_more_jobs_than_a_share_ever_has_is_not_told_to_come_back(
    embedder: str, as_: Client, store: JobStore
) -> None:
    body = {"model": embedder, "input": ["a", "b", "c"]}
    for limits in ({"max_jobs": 2}, {"daily": 2}, {"rate": 5, "burst": 2}):
        ada = as_(await key_of(store, "ada", **limits))
        answer = await ada.post("/v1/embeddings", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "share_too_small"
    assert (await store.list())[0] == []


async def test_what_a_race_leaves_of_a_refused_request_is_cancelled(
    embedder: str, as_: Client, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was room for all, and another request took it: nobody would wait for the first."""
    from omniq_api.openai_compat import running

    async def as_if_there_were_room(store: JobStore, **asked: Any) -> Any:
        return await submit(store, **{**asked, "room_for": 1})

    submit = running.submit
    monkeypatch.setattr(running, "submit", as_if_there_were_room)
    ada = as_(await key_of(store, "ada", max_jobs=3))
    first = (
        await ada.post("/v1/jobs", json={"pipeline": embedder, "input": {"prompt": "x"}})
    ).json()
    body = {"model": embedder, "input": ["a", "b", "c"]}
    answer = await ada.post("/v1/embeddings", json=body)
    assert answer.status_code == 429, answer.text
    jobs, _ = await store.list()
    assert len(jobs) == 3
    for job in jobs:
        if job.id != first["id"]:
            await state_is(store, job.id, JobState.CANCELLED)


def test_the_operator_makes_lists_and_revokes_keys(broker: object, redis_client: Redis) -> None:
    def run(*args: str) -> Any:
        return CliRunner().invoke(cli, ["keys", *args], prog_name="omniq")

    made = run("create", "ada", "--rate", "5", "--burst", "10", "--max-jobs", "8", "--json")
    assert made.exit_code == 0, made.output
    entry = json.loads(made.output)
    assert entry["key"].startswith(f"omq_{entry['id']}_")
    assert (entry["tenant"], entry["rate"], entry["burst"], entry["max_jobs"]) == ("ada", 5, 10, 8)
    listed = run("list")
    assert entry["id"] in listed.output and entry["key"].rpartition("_")[2] not in listed.output
    for faulty in (["A B"], ["ada", "--rate", "0"], ["ada", "--max-priority", "10"], [""]):
        assert run("create", *faulty).exit_code == 2, faulty
    assert run("create", "ada", "--webhook-url", "https://127.0.0.1/").exit_code == 2
    assert run("revoke", entry["id"]).exit_code == 0
    assert run("revoke", entry["id"]).exit_code == 2
    assert redis_client.hlen(keys.api_keys()) == 0


async def test_a_key_of_another_version_stops_neither_others_nor_lists(
    as_: Client, store: JobStore
) -> None:
    text, entry = await TenantKeys(store.redis).create(Share(tenant="ada"))
    other, _ = await TenantKeys(store.redis).create(Share(tenant="bob"))
    newer = {**entry.model_dump(mode="json"), "share": {"tenant": "ada", "unheard_of": 1}}
    await store.redis.hset(keys.api_keys(), entry.id, json.dumps(newer))
    response = await as_(text).get("/v1/jobs")
    assert (problem(response).status, problem(response).code) == (503, "not_ready")
    assert response.headers["retry-after"]
    assert (await as_(other).get("/v1/jobs")).status_code == 200
    listed = await asyncio.to_thread(CliRunner().invoke, cli, ["keys", "list"])
    assert listed.exit_code == 0, listed.output
    assert "bob" in listed.output and "ada" not in listed.output

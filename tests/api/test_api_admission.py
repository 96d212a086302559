"""Overload, requests that come again, jobs that are no longer kept, and clients that go."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from api_support import (
    BODY,
    PNG,
    PROMPT,
    ApiServer,
    begin,
    eventually,
    only_job,
    play,
    problem,
    serving,
    state_is,
)

from omniq.jobs.model import ArtifactInfo, JobState, StageResult
from omniq.jobs.store import JobStore
from omniq.settings import get_settings

KEY = {"idempotency-key": "9f2c"}


def set_(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"OMNIQ_{name.upper()}", str(value))
    get_settings.cache_clear()


async def test_a_full_system_answers_503_with_the_limit_and_when_to_come_back(
    client: httpx.AsyncClient, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_(monkeypatch, max_jobs=2)
    for _ in range(2):
        assert (await client.post("/v1/jobs", json=BODY)).status_code == 202
    for post in ("/v1/jobs", "/v1/jobs?wait=5", "/v1/generate"):
        answer = await client.post(post, json=BODY)
        found = problem(answer)
        assert (found.status, found.code) == (503, "overloaded")
        assert (found.body["limit"], found.body["value"], found.body["size"]) == (
            "pipeline_jobs", 2, 2,
        )  # fmt: skip
        assert int(answer.headers["retry-after"]) >= 1
    body = {"model": "tiny-omni", "prompt": PROMPT}
    answer = await client.post("/v1/images/generations", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    assert len((await store.list())[0]) == 2


async def test_a_request_that_comes_again_is_answered_with_its_job(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    first = await client.post("/v1/jobs", json=BODY, headers=KEY)
    again = await client.post("/v1/jobs", json=BODY, headers=KEY)
    assert (first.status_code, again.status_code) == (202, 202)
    assert first.json() == again.json()
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    await play(store, first.json()["id"])
    done = await client.post("/v1/jobs?wait=5", json=BODY, headers=KEY)
    assert (done.status_code, done.json()["state"]) == (200, "succeeded")
    found = await client.post("/v1/generate", json=BODY, headers=KEY)
    assert (found.content, found.headers["idempotent-replayed"]) == (PNG, "true")
    other = await client.post("/v1/jobs", json={**BODY, "priority": 1}, headers=KEY)
    assert (problem(other).status, problem(other).code) == (409, "idempotency_conflict")
    faulty = await client.post("/v1/jobs", json=BODY, headers={"idempotency-key": "x" * 256})
    assert problem(faulty).fields == ["Idempotency-Key"]


async def test_requests_at_the_same_time_and_after_a_restart_are_one_job(
    broker: object, store: JobStore
) -> None:
    with serving() as one, serving() as two:
        async with httpx.AsyncClient(timeout=30) as http:
            urls = [f"{s.url}/v1/jobs" for s in (one, two) for _ in range(8)]
            posts = [http.post(url, json=BODY, headers=KEY) for url in urls]
            answers = await asyncio.gather(*posts)
    assert len({a.json()["id"] for a in answers}) == 1
    assert sum("idempotent-replayed" not in a.headers for a in answers) == 1
    with serving() as new:
        answer = httpx.post(f"{new.url}/v1/jobs", json=BODY, headers=KEY)
    assert answer.json()["id"] == await only_job(store)


async def test_openais_routes_know_requests_that_come_again(
    server: ApiServer, http: httpx.AsyncClient, store: JobStore
) -> None:
    """Also: with a key, a client that goes does not take its jobs along."""
    body = {"model": "tiny-omni", "prompt": PROMPT, "n": 2, "seed": 3}
    url = "/v1/images/generations"
    with pytest.raises(httpx.ReadTimeout):
        await http.post(url, json=body, headers=KEY, timeout=0.7)
    jobs, _ = await store.list()
    asking = asyncio.create_task(http.post(url, json=body, headers=KEY))
    await asyncio.sleep(0.3)
    for job in jobs:
        await play(store, job.id)
    answer = await asking
    assert answer.status_code == 200, answer.text
    assert answer.headers["idempotent-replayed"] == "true"
    assert len((await store.list())[0]) == len(jobs)
    for change in ({"prompt": "x"}, {"n": 1}):
        other = await http.post(url, json={**body, **change}, headers=KEY)
        assert other.status_code == 409, change
    assert len((await store.list())[0]) == len(jobs)


@pytest.mark.parametrize("path", ["/v1/generate", "/v1/images/generations"])
async def test_a_client_that_goes_cancels_its_jobs(
    server: ApiServer, http: httpx.AsyncClient, store: JobStore, path: str
) -> None:
    body = BODY if path == "/v1/generate" else {"model": "tiny-omni", "prompt": PROMPT}
    with pytest.raises(httpx.ReadTimeout):
        await http.post(path, json=body, timeout=0.5)
    await state_is(store, await only_job(store), JobState.CANCELLED)


async def test_a_job_that_is_no_longer_kept_is_gone_and_an_unknown_one_is_not_found(
    client: httpx.AsyncClient, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_(monkeypatch, retention=0.3)
    job_id = (await client.post("/v1/jobs", json=BODY)).json()["id"]
    await play(store, job_id)
    path = f"/v1/jobs/{job_id}"
    assert (await client.get(f"{path}/artifacts/image")).status_code == 200

    async def gone() -> bool:
        return (await client.get(path)).status_code == 410

    await eventually(gone, 5)
    for _ in range(2):
        for url in (path, f"{path}?wait=1", f"{path}/events", f"{path}/artifacts/image"):
            assert problem(await client.get(url)).code == "job_gone", url
        assert problem(await client.post(f"{path}/cancel")).code == "job_gone"
        assert (await client.get("/v1/jobs")).json()["jobs"] == []
    assert problem(await client.get(f"/v1/jobs/{'0' * 28}")).code == "job_not_found"


async def test_result_files_come_in_the_order_of_the_pipelines_outputs(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = (await client.post("/v1/jobs", json=BODY)).json()["id"]
    for stage in ("ar", "dit"):
        assert await store.finish_stage(
            job_id, stage, await begin(store, job_id, stage), StageResult()
        )
    fence = await begin(store, job_id, "decode")
    names = ["image", *(f"image-{i}" for i in range(1, 12))]
    infos = {}
    for name in sorted(names, reverse=True):
        key = await store.put_artifact(job_id, name, fence, PNG)
        infos[name] = ArtifactInfo(
            name=name, content_type="image/png", nbytes=1, key=key,
            meta={"index": names.index(name)},
        )  # fmt: skip
    assert await store.finish_stage(job_id, "decode", fence, StageResult(artifacts=infos))
    shown = (await client.get(f"/v1/jobs/{job_id}")).json()["artifacts"]
    assert [a["name"] for a in shown] == names

"""The one-call form."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable
from pathlib import Path

import httpx
import pytest
from api_support import BODY, PNG, PROMPT, ApiServer, begin, only_job, play, problem, state_is
from omniq_api.negotiation import prefers

from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore

IMAGE = "image/png"
JSON = "application/json"


async def answered(
    store: JobStore, request: Awaitable[httpx.Response]
) -> tuple[str, httpx.Response]:
    """The job that ``request`` submits, played to its end, and the answer."""
    asking = asyncio.ensure_future(request)
    job_id = await only_job(store)
    await play(store, job_id)
    return job_id, await asyncio.wait_for(asking, 10)


@pytest.mark.parametrize("accept", [None, "*/*", "image/*", "image/png,*/*;q=0.8"])
async def test_the_answer_is_the_picture(
    client: httpx.AsyncClient, store: JobStore, accept: str | None
) -> None:
    headers = {"accept": accept} if accept else {}
    job_id, response = await answered(
        store, client.post("/v1/generate", json=BODY, headers=headers)
    )
    assert response.status_code == 200
    assert response.headers["content-type"] == IMAGE
    assert response.content == PNG
    assert response.headers["x-omniq-job"] == job_id
    assert response.headers["content-location"] == f"/v1/jobs/{job_id}/artifacts/image"


async def test_a_client_that_prefers_json_gets_the_finished_job(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id, response = await answered(
        store, client.post("/v1/generate", json=BODY, headers={"accept": JSON})
    )
    job = response.json()
    assert (job["id"], job["state"]) == (job_id, "succeeded")
    assert response.headers["content-location"] == f"/v1/jobs/{job_id}"


async def test_the_printed_curl_line_writes_the_picture(
    server: ApiServer, store: JobStore, tmp_path: Path
) -> None:
    line = (
        f"curl -s {server.url}/v1/generate -H 'content-type: application/json' "
        f'-d \'{{"pipeline":"tiny-omni","input":{{"prompt":"{PROMPT}"}}}}\' -o {tmp_path}/out.png'
    )
    curl = subprocess.Popen(line, shell=True)
    await play(store, await only_job(store))
    assert await asyncio.to_thread(curl.wait, 10) == 0
    assert (tmp_path / "out.png").read_bytes() == PNG


@pytest.mark.parametrize(("code", "status"), [("engine_error", 500), ("invalid_request", 422)])
async def test_a_failed_job_is_a_problem_with_its_error(
    client: httpx.AsyncClient, store: JobStore, code: str, status: int
) -> None:
    """What only the engine finds wrong with a request is still the request's fault."""
    asking = asyncio.ensure_future(client.post("/v1/generate", json=BODY))
    job_id = await only_job(store)
    fence = await begin(store, job_id, "ar")
    await store.fail_stage(job_id, "ar", fence, {"code": code, "message": "no luck"})
    found = problem(await asking)
    assert (found.status, found.code, found.detail) == (status, code, "no luck")
    assert found.body["job"] == f"/v1/jobs/{job_id}"


async def test_a_job_cancelled_by_somebody_else_is_a_409(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    asking = asyncio.ensure_future(client.post("/v1/generate", json=BODY))
    await store.cancel(await only_job(store))
    found = problem(await asking)
    assert (found.status, found.body["state"]) == (409, "cancelled")


async def test_when_time_is_over_the_answer_says_where_the_job_goes_on(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    response = await client.post("/v1/generate?wait=0.2", json=BODY)
    job_id = await only_job(store)
    found = problem(response)
    assert (found.status, found.code) == (504, "not_finished_in_time")
    assert response.headers["location"] == found.body["job"] == f"/v1/jobs/{job_id}"
    assert (await store.get(job_id)).state is JobState.QUEUED


async def test_a_client_that_disconnects_cancels_its_job(
    http: httpx.AsyncClient, store: JobStore
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/generate", json=BODY, timeout=0.5)
    await state_is(store, await only_job(store), JobState.CANCELLED)


async def test_a_client_that_disconnects_asks_a_running_job_to_stop(
    http: httpx.AsyncClient, store: JobStore
) -> None:
    asking = asyncio.ensure_future(http.post("/v1/generate", json=BODY))
    job_id = await only_job(store)
    await begin(store, job_id, "ar")
    asking.cancel()
    await state_is(store, job_id, JobState.CANCELLING)


async def test_a_client_that_disconnects_from_a_submission_with_wait_leaves_its_job_alone(
    http: httpx.AsyncClient, store: JobStore
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/jobs?wait=30", json=BODY, timeout=0.5)
    await asyncio.sleep(0.3)
    assert (await store.get(await only_job(store))).state is JobState.QUEUED


@pytest.mark.parametrize(
    ("accept", "image"),
    [
        ("*/*", True),
        ("image/*", True),
        ("image/png", True),
        ("application/json", False),
        ("application/json, */*;q=0.5", False),
        ("application/json;q=0.5, image/*", True),
        ("image/*;q=0.5, application/json", False),
        ("text/html,application/xhtml+xml,image/avif,image/webp,*/*;q=0.8", True),
        ("image/webp, application/json", False),
        ("image/png;q=0, */*", False),
        ("text/plain", False),
        ("", False),
        ("IMAGE/PNG ; Q=1", True),
        ("image/png;q=x", True),
        (",;,", False),
    ],
)
def test_accept_decides_between_picture_and_json(accept: str, image: bool) -> None:
    assert prefers(accept, IMAGE, JSON) is image

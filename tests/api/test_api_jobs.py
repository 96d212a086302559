"""Submitting, reading, listing and cancelling jobs."""

from __future__ import annotations

import json

import httpx
import pytest
from api_support import BODY, PROMPT, begin, play, problem
from redis import Redis

from omniq import keys
from omniq.celery import queue_keys
from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore


async def submit(client: httpx.AsyncClient, **more: object) -> str:
    response = await client.post("/v1/jobs", json={**BODY, **more})
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


async def test_submitting_answers_202_with_the_jobs_location(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/jobs", json=BODY)
    job = response.json()
    assert response.status_code == 202
    assert response.headers["location"] == f"/v1/jobs/{job['id']}" == job["urls"]["self"]
    assert job["state"] == "queued"
    assert job["input"] == {"prompt": PROMPT}
    assert set(job["stages"]) == {"ar", "dit", "decode"}


async def test_a_submitted_job_is_published_to_its_first_stages_queue(
    client: httpx.AsyncClient, redis_client: Redis
) -> None:
    job_id = await submit(client, priority=9)
    queues = queue_keys("omniq.tiny-omni.ar")
    messages = [m for q in queues for m in redis_client.lrange(q, 0, -1)]
    assert len(messages) == 1
    assert job_id in str(messages[0])


async def test_a_plain_submission_is_answered_like_one_that_takes_the_long_way(
    client: httpx.AsyncClient,
) -> None:
    """Without a query and with the bare content type FastAPI's dependency solver is passed by."""
    body = {**BODY, "parameters": {"seed": 7}, "metadata": {"user": "ada"}}
    plain = await client.post("/v1/jobs", json=body)
    queried = await client.post("/v1/jobs?wait=0", json=body)
    charset = await client.post(
        "/v1/jobs",
        content=plain.request.content,
        headers={"content-type": "application/json; charset=utf-8"},
    )
    for other in (queried, charset):
        assert other.status_code == plain.status_code == 202
        assert list(other.headers) == list(plain.headers)
        here, there = plain.json(), other.json()
        assert list(here) == list(there)
        for job in (here, there):
            for own in ("id", "created", "urls"):
                del job[own]
        assert here == there


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"pipeline": 1}', b"\xff"])
async def test_a_faulty_body_is_told_alike_on_both_ways(
    client: httpx.AsyncClient, content: bytes
) -> None:
    headers = {"content-type": "application/json"}
    plain = await client.post("/v1/jobs", content=content, headers=headers)
    queried = await client.post("/v1/jobs?wait=0", content=content, headers=headers)
    assert plain.status_code in {400, 422}
    assert plain.content == queried.content


async def test_everything_sent_comes_back_with_the_job(client: httpx.AsyncClient) -> None:
    job_id = await submit(
        client,
        parameters={"seed": 7, "num_inference_steps": 4, "ar": {"temperature": 0.0}},
        priority=8,
        timeout=30,
        metadata={"user": "ada"},
    )
    job = (await client.get(f"/v1/jobs/{job_id}")).json()
    assert job["parameters"]["dit"]["seed"] == 7
    assert job["parameters"]["dit"]["num_inference_steps"] == 4
    assert job["parameters"]["ar"]["temperature"] == 0.0
    assert job["priority"] == 8
    assert job["deadline"] == pytest.approx(job["created"] + 30)
    assert job["metadata"] == {"user": "ada"}


async def test_a_finished_job_shows_values_artifacts_and_stage_times(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(client)
    await play(store, job_id)
    job = (await client.get(f"/v1/jobs/{job_id}")).json()
    assert job["state"] == "succeeded"
    assert job["created"] <= job["started"] <= job["finished"]
    assert job["values"] == {"text": "A red circle."}
    assert job["artifacts"][0]["url"] == f"/v1/jobs/{job_id}/artifacts/image"
    assert (job["stages"]["dit"]["step"], job["stages"]["dit"]["total"]) == (3, 3)
    assert "key" not in str(job["artifacts"])


async def test_a_failed_job_shows_its_error(client: httpx.AsyncClient, store: JobStore) -> None:
    job_id = await submit(client)
    fence = await begin(store, job_id, "ar")
    await store.fail_stage(job_id, "ar", fence, {"code": "engine_error", "message": "broken"})
    job = (await client.get(f"/v1/jobs/{job_id}")).json()
    assert job["state"] == "failed"
    assert job["error"] == {"code": "engine_error", "message": "broken"}


async def test_a_queued_job_is_cancelled_at_once(client: httpx.AsyncClient) -> None:
    job_id = await submit(client)
    response = await client.post(f"/v1/jobs/{job_id}/cancel")
    assert (response.status_code, response.json()["state"]) == (200, "cancelled")


async def test_a_running_job_is_cancelling_until_its_stage_has_stopped(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(client)
    fence = await begin(store, job_id, "ar")
    response = await client.post(f"/v1/jobs/{job_id}/cancel")
    assert response.json()["state"] == "cancelling"
    assert not await store.progress(job_id, "ar", fence, 1, 2)
    await store.stop_stage(job_id, "ar", fence)
    assert (await client.get(f"/v1/jobs/{job_id}")).json()["state"] == "cancelled"


async def test_cancelling_a_finished_job_changes_nothing(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(client)
    await play(store, job_id)
    response = await client.post(f"/v1/jobs/{job_id}/cancel")
    assert (response.status_code, response.json()["state"]) == (200, "succeeded")


async def test_a_job_that_another_version_has_recorded_is_cancelled(
    client: httpx.AsyncClient, redis_client: Redis
) -> None:
    """What this one cannot read of it is left out."""
    job_id = await submit(client)
    redis_client.hset(keys.job(job_id), "spec", json.dumps({"id": job_id, "future": 1}))
    response = await client.post(f"/v1/jobs/{job_id}/cancel")
    job = response.json()
    assert (response.status_code, job["id"], job["state"]) == (200, job_id, "cancelled")
    assert (job["pipeline"], set(job["stages"])) == ("tiny-omni", {"ar", "dit", "decode"})


async def test_jobs_are_listed_newest_first_and_filtered(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    ids = [await submit(client) for _ in range(4)]
    await play(store, ids[1])
    await store.cancel(ids[2])

    async def listed(query: str) -> list[str]:
        response = await client.get(f"/v1/jobs?{query}")
        assert response.status_code == 200, response.text
        return [j["id"] for j in response.json()["jobs"]]

    assert await listed("") == ids[::-1]
    assert await listed("state=succeeded") == [ids[1]]
    assert await listed("state=succeeded&state=cancelled") == [ids[2], ids[1]]
    assert await listed("pipeline=tiny-omni&state=queued") == [ids[3], ids[0]]
    assert await listed("pipeline=other") == []


async def test_pages_join_without_gap_or_repeat(client: httpx.AsyncClient) -> None:
    ids = [await submit(client) for _ in range(7)]
    seen: list[str] = []
    cursor: str | None = None
    while True:
        params: dict[str, str | int] = {"limit": 3, **({"cursor": cursor} if cursor else {})}
        page = (await client.get("/v1/jobs", params=params)).json()
        seen += [j["id"] for j in page["jobs"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert seen == ids[::-1]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=1000", "limit"),
        ("state=done", "state.0"),
        ("cursor=abc", "cursor"),
        ("status=failed", "status"),
    ],
)
async def test_a_wrong_list_query_names_the_field(
    client: httpx.AsyncClient, query: str, field: str
) -> None:
    found = problem(await client.get(f"/v1/jobs?{query}"))
    assert (found.status, found.fields) == (422, [field])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("GET", "?wait=30"),
        ("GET", "/events"),
        ("GET", "/artifacts/image"),
        ("POST", "/cancel"),
    ],
)
@pytest.mark.parametrize("job_id", ["nosuchjob", "x" * 500, "%00%ff", "a}:events"])
async def test_an_unknown_job_is_404(
    client: httpx.AsyncClient, method: str, path: str, job_id: str
) -> None:
    found = problem(await client.request(method, f"/v1/jobs/{job_id}{path}"))
    assert (found.status, found.code) == (404, "job_not_found")


async def test_an_expired_job_is_shown_as_expired(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(client, timeout=0.001)
    await store.begin_stage(job_id, "ar", "w", redelivered=False)
    job = (await client.get(f"/v1/jobs/{job_id}")).json()
    assert job["state"] == JobState.EXPIRED

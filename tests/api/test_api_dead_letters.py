"""The routes of dead letters."""

from __future__ import annotations

import httpx
from api_support import BODY, begin

from omniq.jobs.store import JobStore


async def test_a_dead_letter_is_listed_read_retried_and_dropped(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = (await client.post("/v1/jobs", json=BODY)).json()["id"]
    record = await store.get(job_id)
    stage = record.spec.stages[0]
    for _ in range(2):
        fence = await begin(store, job_id, stage)
        error = {"code": "engine_error", "message": "broken"}
        assert await store.fail_stage(job_id, stage, fence, error, "Traceback: broken")
        (letter,) = (await client.get("/v1/dlq")).json()["dead_letters"]
        assert letter["id"] == job_id and letter["traceback"] == "Traceback: broken"
        assert (await client.get(f"/v1/dlq/{job_id}")).json() == letter
        answer = await client.post(f"/v1/dlq/{job_id}/retry")
        assert answer.status_code == 202
        assert (answer.json()["id"], answer.json()["state"]) == (job_id, "queued")
        assert (await client.get("/v1/dlq")).json()["dead_letters"] == []

    for method, path in (
        ("GET", f"/v1/dlq/{job_id}"),
        ("POST", f"/v1/dlq/{job_id}/retry"),
        ("DELETE", f"/v1/dlq/{job_id}"),
        ("GET", "/v1/dlq/message.0"),
    ):
        answer = await client.request(method, path)
        assert (answer.status_code, answer.json()["code"]) == (404, "dead_letter_not_found")

    fence = await begin(store, job_id, stage)
    await store.fail_stage(job_id, stage, fence, error, "Traceback: broken")
    assert (await client.delete(f"/v1/dlq/{job_id}")).status_code == 204
    assert (await client.get(f"/v1/dlq/{job_id}")).status_code == 404
    assert (await client.get(f"/v1/jobs/{job_id}")).json()["state"] == "failed"
    await store.redis.lpush("omniq:undecodable", "rubbish")
    (letter,) = (await client.get("/v1/dlq")).json()["dead_letters"]
    answer = await client.post(f"/v1/dlq/{letter['id']}/retry")
    assert (answer.status_code, answer.json()["code"]) == (409, "dead_letter_lost")

"""Fetching result files."""

from __future__ import annotations

import httpx
import pytest
from api_support import BODY, PNG, begin, play, problem
from omniq_api.routes.artifacts import filename

from omniq.jobs.model import ArtifactInfo, StageResult
from omniq.jobs.store import JobStore


async def submit(client: httpx.AsyncClient) -> str:
    return str((await client.post("/v1/jobs", json=BODY)).json()["id"])


async def test_an_artifact_comes_with_its_type_and_safe_headers(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(client)
    await play(store, job_id)
    response = await client.get(f"/v1/jobs/{job_id}/artifacts/image")
    assert response.content == PNG
    assert response.headers["content-type"] == "image/png"
    assert response.headers["content-length"] == str(len(PNG))
    assert response.headers["content-disposition"] == 'inline; filename="image"'
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in response.headers["content-security-policy"]


async def test_an_unchanged_artifact_is_not_sent_again(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(client)
    await play(store, job_id)
    url = f"/v1/jobs/{job_id}/artifacts/image"
    tag = (await client.get(url)).headers["etag"]
    for given in (tag, f'"other", W/{tag}', "*"):
        response = await client.get(url, headers={"if-none-match": given})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == tag
    other = await client.get(url, headers={"if-none-match": '"other"'})
    assert other.content == PNG


async def test_an_artifact_that_is_not_there_yet_is_409(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(client)
    await begin(store, job_id, "ar")
    found = problem(await client.get(f"/v1/jobs/{job_id}/artifacts/image"))
    assert (found.status, found.code) == (409, "job_not_finished")


@pytest.mark.parametrize("name", ["nothing", "..%2F..%2Fetc%2Fpasswd", "%00", "x" * 300])
async def test_an_artifact_that_a_finished_job_lacks_is_404(
    client: httpx.AsyncClient, store: JobStore, name: str
) -> None:
    job_id = await submit(client)
    await play(store, job_id)
    found = problem(await client.get(f"/v1/jobs/{job_id}/artifacts/{name}"))
    assert found.status == 404


async def test_an_artifact_whose_bytes_are_gone_is_404(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(client)
    record = await play(store, job_id)
    await store.redis.delete(record.artifacts["image"].key)
    found = problem(await client.get(f"/v1/jobs/{job_id}/artifacts/image"))
    assert (found.status, found.code) == (404, "artifact_not_found")


async def test_a_name_with_odd_characters_has_a_url_that_works(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(client)
    fence = await begin(store, job_id, "ar")
    key = await store.put_artifact(job_id, "a b/ü?", fence, b"text")
    info = ArtifactInfo(name="a b/ü?", content_type="text/plain", nbytes=4, key=key)
    await store.finish_stage(job_id, "ar", fence, StageResult(artifacts={"a b/ü?": info}))
    job = (await client.get(f"/v1/jobs/{job_id}")).json()
    url = job["artifacts"][0]["url"]
    assert url.isascii()
    assert (await client.get(url)).content == b"text"


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("image.png", "image.png"),
        ('a"; filename=evil.exe', "a_filename_evil.exe"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("line\r\nset-cookie: x", "line_set-cookie_x"),
        ("☃", "_"),
        ("...", "artifact"),
    ],
)
def test_file_names_are_harmless(name: str, safe: str) -> None:
    assert filename(ArtifactInfo(name=name, content_type="x/y", nbytes=0)) == safe

"""Pictures over HTTP: data URLs, uploads, results of other jobs; limits; and where they end up."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from api_support import PNG, begin, problem, stored
from safetensors.numpy import load

from omniq.blobs import RedisStore
from omniq.blobs.base import BlobRef
from omniq.config import available_pipelines
from omniq.jobs.admission import Share
from omniq.jobs.model import ArtifactInfo, JobState, StageResult
from omniq.jobs.store import JobStore
from omniq.settings import get_settings
from omniq.tenants import TenantKeys

PIPELINE = """
name: edit
inputs:
  prompt: {type: text}
  image: {type: image, max_items: 2, max_pixels: 5000}
  latents: {type: latents, required: false}
stages:
  - {stage_id: dit, engine_type: DiT, model: none}
edges:
  - {from: input.prompt, to: dit.prompt}
  - {from: input.image, to: dit.image}
  - {from: input.latents, to: dit.latents}
outputs:
  image: {from: dit.image, type: image}
"""
DATA_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
BODY = {"pipeline": "edit", "input": {"prompt": "make it red"}}
RED = np.full((64, 64, 3), (200, 30, 30), np.uint8)


@pytest.fixture(autouse=True)
def _pipeline(broker: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "edit.yaml").write_text(PIPELINE)
    monkeypatch.setenv("OMNIQ_PIPELINES", json.dumps([str(tmp_path)]))
    monkeypatch.setenv("OMNIQ_MAX_INPUT_BYTES", "100000")
    get_settings.cache_clear()
    available_pipelines.cache_clear()
    yield
    get_settings.cache_clear()
    available_pipelines.cache_clear()


def body_with(image: object) -> dict[str, object]:
    return {**BODY, "input": {"prompt": "make it red", "image": image}}


async def test_a_data_url_becomes_a_blob_that_ends_with_the_job(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    """The job's record says what the picture is like, and does not hold it."""
    answer = await client.post("/v1/jobs", json=body_with(DATA_URL))
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert job["input"]["image"] == [{"width": 64, "height": 64}]
    assert len(answer.content) < 2000
    assert np.array_equal((await stored(store, job["id"]))["0000"], RED)
    assert await store.redis.pttl(f"omniq:blob:{job['id']}.input.0.image") > 0
    fence = await begin(store, job["id"], "dit")
    key = await store.put_artifact(job["id"], "image", fence, PNG)
    info = ArtifactInfo(name="image", content_type="image/png", nbytes=len(PNG), key=key)
    await store.finish_stage(job["id"], "dit", fence, StageResult(artifacts={"image": info}))
    assert await store.redis.keys("omniq:blob:*") == []

    made = {"job": job["id"], "artifact": "image"}
    url = (await client.get(f"/v1/jobs/{job['id']}")).json()["artifacts"][0]["url"]
    for image in (made, url, [url, DATA_URL]):
        following = await client.post("/v1/jobs", json=body_with(image))
        assert following.status_code == 202, following.text
        found = await stored(store, following.json()["id"])
        assert all(np.array_equal(p, RED) for p in found.values())
        assert len(found) == (2 if isinstance(image, list) else 1)


async def test_a_result_that_is_too_large_is_refused_unread(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    """Its file is not there, so reading it would have failed."""
    job = (await client.post("/v1/jobs", json=body_with(DATA_URL))).json()
    fence = await begin(store, job["id"], "dit")
    info = ArtifactInfo(name="image", content_type="image/png", nbytes=100_001, key="nowhere")
    await store.finish_stage(job["id"], "dit", fence, StageResult(artifacts={"image": info}))
    image = {"job": job["id"], "artifact": "image"}
    answer = problem(await client.post("/v1/jobs", json=body_with(image)))
    assert (answer.status, answer.fields) == (413, ["input.image"])
    assert "must have at most 100000 bytes, has 100001" in answer.detail


async def test_a_cancelled_job_frees_its_pictures(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    job = (await client.post("/v1/jobs", json=body_with(DATA_URL))).json()
    assert len(await store.redis.keys("omniq:blob:*")) == 1
    await client.post(f"/v1/jobs/{job['id']}/cancel")
    assert (await store.get(job["id"])).state is JobState.CANCELLED
    assert await store.redis.keys("omniq:blob:*") == []


@pytest.mark.parametrize("as_file", [True, False])
async def test_uploads(client: httpx.AsyncClient, store: JobStore, as_file: bool) -> None:
    """A form: the request in one field, files under their inputs' names, several under one."""
    from safetensors.numpy import save

    latents = save({"latents": np.ones((1, 4, 8, 8), np.float32)})
    request = json.dumps(BODY)
    files = [("image", ("a.png", PNG)), ("image", ("b.png", PNG)), ("latents", ("l", latents))]
    data = {} if as_file else {"request": request}
    if as_file:
        files.append(("request", ("r.json", request.encode())))
    answer = await client.post("/v1/jobs?wait=0.1", data=data, files=files)
    assert answer.status_code == 202, answer.text
    job_id = answer.json()["id"]
    assert [np.array_equal(p, RED) for p in (await stored(store, job_id)).values()] == [True, True]
    assert (await stored(store, job_id, "latents"))["latents"].sum() == 256
    assert load(latents)["latents"].shape == (1, 4, 8, 8)


async def test_files_that_cannot_be_used(client: httpx.AsyncClient, store: JobStore) -> None:
    """413 too large, 415 of another kind, 422 anything else; nothing is left behind."""
    large = "data:image/png;base64," + "A" * 200_000
    for image, status, code in (
        (large, 413, "input_too_large"),
        ("data:image/gif;base64,R0lGODlh", 415, "unsupported_input"),
        ("data:image/png;base64,%%%", 422, "invalid_request"),
        ("http://169.254.169.254/x.png", 422, "invalid_request"),
        ("/etc/passwd", 422, "invalid_request"),
        ({"job": "0" * 28, "artifact": "image"}, 422, "invalid_request"),
        ([DATA_URL] * 3, 422, "invalid_request"),
        (7, 422, "invalid_request"),
    ):
        answer = problem(await client.post("/v1/jobs", json=body_with(image)))
        assert (answer.status, answer.code) == (status, code), image
        assert answer.fields[0].startswith("input.image")
    assert problem(await client.post("/v1/jobs", json=BODY)).fields == ["input.image"]
    assert (await store.list())[0] == []
    assert await store.redis.keys("omniq:blob:*") == []


async def test_a_job_that_finds_no_room_for_all_its_files_leaves_none(
    client: httpx.AsyncClient, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second blob is refused by the server: no job, and the first blob is freed."""
    from safetensors.numpy import save

    put = RedisStore.put_bytes

    def full(self: RedisStore, blob_id: str, data: memoryview) -> BlobRef:
        if blob_id.endswith(".latents"):
            limit = self.client.config_get("maxmemory")["maxmemory"]
            self.client.config_set("maxmemory", 1)
            try:
                return put(self, blob_id, data)
            finally:
                self.client.config_set("maxmemory", limit)
        return put(self, blob_id, data)

    monkeypatch.setattr(RedisStore, "put_bytes", full)
    latents = save({"latents": np.ones((1, 4, 8, 8), np.float32)})
    answer = problem(
        await client.post(
            "/v1/jobs",
            data={"request": json.dumps(BODY)},
            files=[("image", ("a.png", PNG)), ("latents", ("l", latents))],
        )
    )
    assert answer.status == 503
    assert (await store.list())[0] == []
    assert await store.redis.keys("omniq:blob:*") == []


@pytest.mark.parametrize("whose", ["share", "system"])
async def test_a_job_that_is_refused_has_no_file_looked_at_or_written(
    client: httpx.AsyncClient, store: JobStore, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    if whose == "share":
        key, _ = await TenantKeys(store.redis).create(Share(tenant="ada", max_jobs=1))
        client.headers["authorization"] = f"Bearer {key}"
    else:
        monkeypatch.setenv("OMNIQ_MAX_JOBS", "1")
        get_settings.cache_clear()
    assert (await client.post("/v1/jobs", json=body_with(DATA_URL))).status_code == 202
    (there,) = await store.redis.keys("omniq:blob:*")
    touched: list[str] = []
    monkeypatch.setattr(RedisStore, "put_bytes", lambda *_: touched.append("written"))
    for image in (DATA_URL, "data:image/png;base64,AAAA"):
        response = await client.post("/v1/jobs", json=body_with(image))
        expected = (429, "share_used") if whose == "share" else (503, "overloaded")
        assert (problem(response).status, problem(response).code) == expected
        assert int(response.headers["retry-after"]) >= 1
    assert not touched
    assert await store.redis.keys("omniq:blob:*") == [there]
    assert (
        await store.redis.get("omniq:inputs:bytes")
        == str(int((await store.list())[0][0].spec.files["image"].nbytes)).encode()
    )


async def test_faulty_forms(client: httpx.AsyncClient) -> None:
    files = [("image", ("a.png", PNG))]
    for data, detail in (
        ({}, "request: must be the request as a JSON object"),
        ({"request": "{"}, "request: is not valid JSON"),
        ({"request": "[]"}, "request: must be the request as a JSON object"),
        ({"request": '{"input": 3}'}, "'input' must be an object"),
        ({"other": "{}"}, "other: must be a file"),
        ({"other": "{}", "more": "{}"}, "other: must be a file"),
        ({"request": json.dumps(body_with("x"))}, "image: is given twice"),
    ):
        answer = problem(await client.post("/v1/jobs", data=data, files=files))
        assert (answer.status, answer.code) == (400, "malformed_form")
        assert detail in answer.detail
    twice = [("request", ("a", json.dumps(BODY))), ("request", ("b", json.dumps(BODY)))]
    answer = problem(await client.post("/v1/jobs", files=[*twice, *files]))
    assert (answer.status, answer.detail) == (400, "request: is given twice")
    unknown = [("nothing", ("a.png", PNG))]
    answer = problem(
        await client.post("/v1/jobs", data={"request": json.dumps(BODY)}, files=unknown)
    )
    assert answer.status == 422
    assert "input.nothing" in answer.fields
    broken = await client.post(
        "/v1/jobs", content=b"--x", headers={"content-type": "multipart/form-data"}
    )
    assert problem(broken).status == 400


async def test_the_body_limit_holds_for_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from omniq_api.app import create_app

    monkeypatch.setenv("OMNIQ_MAX_BODY_BYTES", "1000")
    get_settings.cache_clear()
    app = create_app()
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://api") as client,
    ):
        files = [("image", ("a.png", b"x" * 5000))]
        answer = await client.post("/v1/jobs", data={"request": json.dumps(BODY)}, files=files)
        assert problem(answer).status == 413


async def test_routes_without_files_take_no_forms(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", files=[("image", ("a.png", PNG))])
    assert answer.status_code == 415


async def test_the_openapi_document_shows_forms(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    for path in ("/v1/jobs", "/v1/generate"):
        content = paths[path]["post"]["requestBody"]["content"]
        assert set(content) == {"application/json", "multipart/form-data"}


async def test_pipelines_describe_their_files(client: httpx.AsyncClient) -> None:
    view = (await client.get("/v1/pipelines/edit")).json()
    assert view["inputs"]["image"]["max_items"] == 2
    assert view["inputs"]["image"]["max_pixels"] == 5000
    assert view["parameters"]["scheduler"]["choices"] == ["euler", "heun", "unipc", "dpmpp"]

"""Health, readiness, workers, pipelines, the docs page, and faults inside the server."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from typing import Any

import httpx
import pytest
from api_support import BODY, problem
from fastapi import FastAPI
from omniq_api.app import create_app
from omniq_api.describe import pipeline_view
from omniq_api.openapi import EXAMPLES
from omniq_api.schemas import JobRequest
from redis.asyncio import Redis

import omniq
from omniq import keys
from omniq.blobs.choice import BlobUse
from omniq.config import PipelineConfig
from omniq.jobs.workers import WorkerInfo, WorkerRegistry, WorkerState
from omniq.settings import get_settings

STAGES = ("ar", "dit", "decode")


def worker(stage: str, state: WorkerState = WorkerState.READY, **more: Any) -> WorkerInfo:
    now = time.time()
    fields = {"id": f"w-{stage}", "pipeline": "tiny-omni", "host": "h", "hostname": "box", "pid": 1}
    return WorkerInfo(**{**fields, **more}, stage=stage, state=state, since=now, seen=now)


async def test_health_needs_nothing(client: httpx.AsyncClient) -> None:
    response = await client.get("/health")
    assert response.json() == {"status": "ok", "version": omniq.__version__}


async def test_a_worker_of_another_version_hides_no_others(
    client: httpx.AsyncClient, aredis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    registry = WorkerRegistry(aredis)
    for stage in STAGES:
        await registry.beat(worker(stage))
    newer = worker("dit", id="w-newer").model_dump(mode="json")
    await registry.beat(worker("dit", id="w-newer"))
    await aredis.set(keys.worker("w-newer"), json.dumps({**newer, "state": "dreaming"}))
    for _ in range(2):
        assert (await client.get("/ready")).status_code == 200
    listed = (await client.get("/v1/workers")).json()["workers"]
    assert sorted(w["id"] for w in listed) == ["w-ar", "w-decode", "w-dit"]
    assert "of another version of omniq, is left out" in caplog.text


async def test_ready_is_503_until_every_stage_has_a_ready_worker(
    client: httpx.AsyncClient, aredis: Redis
) -> None:
    registry = WorkerRegistry(aredis)
    response = await client.get("/ready")
    assert response.status_code == 503
    stages = response.json()["pipelines"]["tiny-omni"]["stages"]
    assert {s["state"] for s in stages.values()} == {"missing"}
    assert stages["ar"]["reason"] == "no worker has reported"

    for stage in STAGES[:2]:
        await registry.beat(worker(stage))
    await registry.beat(worker("decode", WorkerState.LOADING, reason="loading weights"))
    response = await client.get("/ready")
    stages = response.json()["pipelines"]["tiny-omni"]["stages"]
    assert response.status_code == 503
    assert (stages["ar"]["state"], stages["ar"]["reason"]) == ("ready", None)
    assert (stages["decode"]["state"], stages["decode"]["reason"]) == ("loading", "loading weights")

    await registry.beat(worker("decode"))
    response = await client.get("/ready")
    assert (response.status_code, response.json()["ready"]) == (200, True)


async def test_one_ready_worker_of_several_is_enough(
    client: httpx.AsyncClient, aredis: Redis
) -> None:
    registry = WorkerRegistry(aredis)
    for stage in STAGES:
        await registry.beat(worker(stage))
    await registry.beat(worker("dit", WorkerState.FAILED, id="w-2", reason="out of memory"))
    response = await client.get("/ready")
    dit = response.json()["pipelines"]["tiny-omni"]["stages"]["dit"]
    assert response.status_code == 200
    assert (dit["state"], dit["workers"], dit["ready_workers"]) == ("ready", 2, 1)


async def test_ready_counts_waiting_tasks_of_all_priorities(client: httpx.AsyncClient) -> None:
    for priority in (0, 5, 5, 9):
        await client.post("/v1/jobs", json={**BODY, "priority": priority})
    pipeline = (await client.get("/ready")).json()["pipelines"]["tiny-omni"]
    assert [s["queue_length"] for s in pipeline["stages"].values()] == [4, 0, 0]
    assert pipeline["open_jobs"] == 4


async def test_workers_are_listed(client: httpx.AsyncClient, aredis: Redis) -> None:
    await WorkerRegistry(aredis).beat(worker("dit", devices=["cuda:0"], last_log=["loaded"]))
    (found,) = (await client.get("/v1/workers")).json()["workers"]
    assert (found["id"], found["devices"], found["last_log"]) == ("w-dit", ["cuda:0"], ["loaded"])
    nobody = (await client.get("/v1/workers?pipeline=other")).json()
    assert nobody == {"workers": [], "edges": []}


async def test_workers_are_listed_with_the_store_of_each_edge(
    client: httpx.AsyncClient, aredis: Redis
) -> None:
    registry = WorkerRegistry(aredis)
    use = BlobUse(mode="auto", shared_memory=True, slabs=2, slab_bytes=2 << 20, used_bytes=4096)
    await registry.beat(worker("ar", blobs=use))
    await registry.beat(worker("dit", blobs=use))
    await registry.beat(worker("decode", blobs=use, host="far"))
    found = (await client.get("/v1/workers")).json()
    assert found["workers"][0]["blobs"]["slabs"] == 2
    stores = {e["target"].split(".")[0]: (e["host"], e["store"], e["reason"])
              for e in found["edges"]}  # fmt: skip
    assert stores == {
        "dit": ("h", "shm", "all consumers are on this host"),
        "decode": ("h", "redis", "consumers on other hosts"),
    }


async def test_a_pipeline_is_described_with_its_limits(client: httpx.AsyncClient) -> None:
    (found,) = (await client.get("/v1/pipelines")).json()["pipelines"]
    kinds = {n: found["parameters"][n]["type"] for n in ("stop", "structured_outputs", "n")}
    assert kinds == {"stop": "string or array", "structured_outputs": "object", "n": "integer"}
    assert found == (await client.get("/v1/pipelines/tiny-omni")).json()
    assert found["inputs"]["prompt"]["max_length"] == 400
    assert found["outputs"]["image"]["type"] == "image"
    assert [s["id"] for s in found["stages"]] == list(STAGES)
    assert found["stages"][1]["after"] == ["ar"]
    steps = found["parameters"]["num_inference_steps"]
    assert (steps["type"], steps["default"], steps["minimum"], steps["maximum"]) == (
        "integer", 20, 1, 100,
    )  # fmt: skip
    assert found["parameters"]["width"]["multiple_of"] == 16
    assert found["parameters"]["seed"]["stages"] == ["ar", "dit"]


async def test_an_unknown_pipeline_is_404_where_it_is_the_resource(
    client: httpx.AsyncClient,
) -> None:
    found = problem(await client.get("/v1/pipelines/nope"))
    assert (found.status, found.code) == (404, "unknown_pipeline")
    assert "tiny-omni" in found.detail


def test_a_parameter_of_two_stages_shows_what_both_allow() -> None:
    def stage(name: str, **more: Any) -> dict[str, Any]:
        return {"stage_id": name, "engine_type": "DiT", "model": "m", **more}

    pipeline = PipelineConfig.model_validate(
        {
            "name": "two",
            "inputs": {"prompt": {}},
            "stages": [
                stage(
                    "a",
                    defaults={"width": 64, "height": 64},
                    limits={
                        "width": {"min": 32, "max": 512, "multiple_of": 16},
                        "num_inference_steps": {"choices": [4, 8, 20]},
                    },
                ),
                stage(
                    "b",
                    defaults={"width": 96, "height": 64},
                    limits={
                        "width": {"min": 64, "multiple_of": 24},
                        "num_inference_steps": {"choices": [8, 20, 50]},
                    },
                ),
            ],
            "edges": [{"from": "input.prompt", "to": "a.prompt"}, {"from": "a.x", "to": "b.x"}],
            "outputs": {"image": {"from": "b.image", "type": "image"}},
        }
    )
    found = pipeline_view(pipeline, 100).parameters
    width = found["width"]
    assert (width.minimum, width.maximum, width.multiple_of) == (64, 512, 48)
    assert (width.default, width.stages) == (None, ["a", "b"])
    assert found["height"].default == 64
    assert found["num_inference_steps"].choices == [8, 20]
    assert pipeline_view(pipeline, 100).inputs["prompt"].max_length == 100


async def test_the_root_leads_to_the_docs(client: httpx.AsyncClient) -> None:
    response = await client.get("/", follow_redirects=True)
    assert response.url.path == "/docs"
    assert "swagger-ui" in response.text


async def test_the_docs_page_needs_no_other_host(client: httpx.AsyncClient) -> None:
    page = (await client.get("/docs")).text
    assets = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(assets) >= 3
    for url in assets:
        assert url.startswith("/"), url
        assert (await client.get(url)).status_code == 200, url


OPENAI = {
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "POST /v1/images/generations",
    "POST /v1/audio/speech",
    "POST /v1/images/edits",
}


def operations(app: FastAPI) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in app.openapi()["paths"].items()
        for method, operation in methods.items()
    }


async def test_every_route_is_documented_with_its_errors(app: FastAPI) -> None:
    found = operations(app)
    assert set(found) == {
        "POST /v1/generate",
        "POST /v1/jobs",
        "GET /v1/jobs",
        "GET /v1/jobs/{job_id}",
        "GET /v1/jobs/{job_id}/events",
        "GET /v1/jobs/{job_id}/artifacts/{name}",
        "POST /v1/jobs/{job_id}/cancel",
        "GET /v1/pipelines",
        "GET /v1/pipelines/{name}",
        "GET /health",
        "GET /ready",
        "GET /v1/workers",
        "GET /v1/dlq",
        "GET /v1/dlq/{letter_id}",
        "POST /v1/dlq/{letter_id}/retry",
        "DELETE /v1/dlq/{letter_id}",
        *OPENAI,
    }
    for name, operation in found.items():
        assert operation["summary"] and operation["description"], name
        errors = {s: r for s, r in operation["responses"].items() if int(s) >= 400}
        assert "500" in errors, name
        for status, response in errors.items():
            kinds = {"application/json" if name in OPENAI else "application/problem+json"}
            if (name, status) == ("GET /ready", "503"):
                kinds.add("application/json")
            if status in ("401", "413", "500", "503"):  # also from before the route
                kinds.add("application/problem+json")
            if name in OPENAI and status == "401":
                kinds.discard("application/json")
            if (name, status) in (("GET /v1/models", "503"), ("GET /v1/models/{name}", "503")):
                kinds.discard("application/json")
            assert set(response["content"]) == kinds, (name, status)


@pytest.mark.parametrize("keys", [True, False])
async def test_keys_are_documented(keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for in any case, or only if there are tenants."""
    if keys:
        monkeypatch.setenv("OMNIQ_API_KEYS", '["secret"]')
    get_settings.cache_clear()
    for name, operation in operations(create_app()).items():
        below = name.partition(" ")[2].startswith("/v1")
        wanted = [{"apiKey": []}] if keys else [{"apiKey": []}, {}]
        assert operation.get("security") == (wanted if below else None), name
        assert ("401" in operation["responses"]) == below, name
    get_settings.cache_clear()


async def test_the_document_holds_no_dangling_reference(app: FastAPI) -> None:
    document = app.openapi()
    references = set(re.findall(r"'#/components/schemas/([^']+)'", str(document)))
    assert references <= set(document["components"]["schemas"])
    assert "HTTPValidationError" not in document["components"]["schemas"]


async def test_the_documents_request_examples_are_accepted(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    # Not on the loop, where a connection that is being made would wait for it.
    documented = await asyncio.to_thread(operations, app)
    body = documented["POST /v1/jobs"]["requestBody"]["content"]["application/json"]
    examples = [e["value"] for e in body["examples"].values()]
    examples += JobRequest.model_json_schema()["examples"]
    for example in examples:
        assert (await client.post("/v1/jobs", json=example)).status_code == 202


async def test_documented_error_codes_are_the_real_ones(client: httpx.AsyncClient) -> None:
    real = [
        await client.post("/v1/jobs", content=b"{", headers={"content-type": "application/json"}),
        await client.get("/v1/jobs/x"),
        await client.post("/v1/jobs", content=b"{}", headers={"content-type": "text/plain"}),
        await client.post("/v1/jobs", json={}),
        await client.post("/v1/generate?wait=0.01", json=BODY),
    ]
    for response in real:
        assert problem(response).code == EXAMPLES[response.status_code][1]


async def test_an_unexpected_fault_is_a_500_that_shows_nothing_but_an_id_found_in_the_log(
    app: FastAPI, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("the secret of 10.0.0.7")

    with caplog.at_level(logging.ERROR):
        response = await client.get("/broken")
    found = problem(response)
    assert (found.status, found.code) == (500, "internal_error")
    assert "secret" not in response.text
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert found.body["instance"] in record.getMessage()
    assert record.exc_info is not None
    assert "the secret" in str(record.exc_info[1])


async def test_omniqs_own_internal_errors_are_500s_too(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    @app.get("/broken")
    async def broken() -> None:
        raise omniq.errors.BlobCorrupt("the secret of blob 7")

    response = await client.get("/broken")
    assert problem(response).status == 500
    assert "secret" not in response.text

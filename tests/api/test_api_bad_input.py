"""Whatever a client sends, the answer is a problem document that names the field; never a 500."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
from api_support import BODY, PROMPT, problem
from fastapi import FastAPI

from omniq.settings import get_settings

JSON = {"content-type": "application/json"}


def body(**changes: Any) -> dict[str, Any]:
    return {**BODY, **changes}


# ruff: noqa: E501 - one fault a line
FAULTY: list[tuple[str, dict[str, Any], str]] = [
    ("unknown pipeline", body(pipeline="nope"), "pipeline"),
    ("no pipeline", {"input": {"prompt": PROMPT}}, "pipeline"),
    ("pipeline of wrong type", body(pipeline=7), "pipeline"),
    ("no input", {"pipeline": "tiny-omni"}, "input.prompt"),
    ("missing prompt", body(input={}), "input.prompt"),
    ("empty prompt", body(input={"prompt": ""}), "input.prompt"),
    ("blank prompt", body(input={"prompt": "  \n"}), "input.prompt"),
    ("prompt of wrong type", body(input={"prompt": 5}), "input.prompt"),
    ("prompt null", body(input={"prompt": None}), "input.prompt"),
    ("10 MB prompt", body(input={"prompt": "x" * 10_000_000}), "input.prompt"),
    ("unknown input", body(input={"prompt": PROMPT, "image": "x"}), "input.image"),
    ("input of wrong type", body(input="a red circle"), "input"),
    ("width 0", body(parameters={"width": 0}), "parameters.width"),
    ("width negative", body(parameters={"width": -64}), "parameters.width"),
    ("width too large", body(parameters={"width": 65536}), "parameters.width"),
    ("width not a multiple", body(parameters={"width": 65}), "parameters.width"),
    ("width a string", body(parameters={"width": "64"}), "parameters.width"),
    ("width a bool", body(parameters={"width": True}), "parameters.width"),
    ("width a float", body(parameters={"width": 64.5}), "parameters.width"),
    ("width a list", body(parameters={"width": [64]}), "parameters.width"),
    ("steps too many", body(parameters={"num_inference_steps": 101}), "parameters.num_inference_steps"),
    ("seed beyond 64 bits", body(parameters={"seed": 2**70}), "parameters.seed"),
    ("unknown parameter", body(parameters={"widht": 64}), "parameters.widht"),
    ("stage not an object", body(parameters={"dit": 3}), "parameters.dit"),
    ("unknown stage parameter", body(parameters={"ar": {"x": 1}}), "parameters.ar.x"),
    ("stage parameter too large", body(parameters={"dit": {"width": 4096}}), "parameters.dit.width"),
    ("parameters a list", body(parameters=[]), "parameters"),
    ("parameters null", body(parameters=None), "parameters"),
    ("too many parameters", body(parameters={f"p{i}": 1 for i in range(100)}), "parameters"),
    ("too many stage keys", body(parameters={"ar": {f"p{i}": 1 for i in range(100)}}), "parameters"),
    ("unknown field", body(promt="x"), "promt"),
    ("priority too high", body(priority=10), "priority"),
    ("priority negative", body(priority=-1), "priority"),
    ("priority a bool", body(priority=True), "priority"),
    ("priority a string", body(priority="5"), "priority"),
    ("timeout 0", body(timeout=0), "timeout"),
    ("timeout negative", body(timeout=-1), "timeout"),
    ("timeout huge", body(timeout=1e300), "timeout"),
    ("timeout a string", body(timeout="10"), "timeout"),
    ("metadata value a number", body(metadata={"a": 1}), "metadata.a"),
    ("metadata value too long", body(metadata={"a": "x" * 513}), "metadata.a"),
    ("metadata key too long", body(metadata={"k" * 65: "x"}), f"metadata.{'k' * 65}"),
    ("metadata key empty", body(metadata={"": "x"}), "metadata."),
    ("too much metadata", body(metadata={str(i): "x" for i in range(17)}), "metadata"),
]  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/generate"])
@pytest.mark.parametrize(
    ("sent", "field"), [f[1:] for f in FAULTY], ids=[f[0].replace(" ", "-") for f in FAULTY]
)
async def test_a_faulty_field_is_named(
    client: httpx.AsyncClient, path: str, sent: dict[str, Any], field: str
) -> None:
    response = await client.post(path, json=sent)
    found = problem(response)
    assert found.status == 422
    assert field in found.fields
    assert field in found.detail
    assert len(response.content) < 8192
    assert (await client.get("/v1/jobs")).json()["jobs"] == []


async def test_an_unknown_pipeline_has_a_code_of_its_own_and_lists_those_there_are(
    client: httpx.AsyncClient,
) -> None:
    found = problem(await client.post("/v1/jobs", json=body(pipeline="nope")))
    assert found.code == "unknown_pipeline"
    assert "tiny-omni" in found.detail


async def test_every_faulty_field_is_named_at_once(client: httpx.AsyncClient) -> None:
    sent = body(input={"prompt": ""}, parameters={"width": 0, "seed": "x"})
    found = problem(await client.post("/v1/jobs", json=sent))
    assert {"input.prompt", "parameters.width", "parameters.seed"} <= set(found.fields)


MALFORMED: dict[str, bytes] = {
    "not-json": b"prompt=x",
    "cut-short": b'{"pipeline": "tiny',
    "trailing": json.dumps(BODY).encode() + b"}",
    "NaN": b'{"pipeline": "tiny-omni", "input": {"prompt": "x"}, "timeout": NaN}',
    "Infinity": b'{"pipeline": "tiny-omni", "input": {"prompt": "x"}, "timeout": Infinity}',
    "overflow": b'{"pipeline": "tiny-omni", "input": {"prompt": "x"}, "timeout": 1e999}',
    "lone-surrogate": b'{"pipeline": "tiny-omni", "input": {"prompt": "\\ud800"}}',
    "surrogate-key": b'{"pipeline": "tiny-omni", "input": {"\\udfff": "x"}}',
    "not-utf-8": b'{"pipeline": "tiny-omni", "input": {"prompt": "\xff"}}',
    "utf-16": json.dumps(BODY).encode("utf-16"),
    "deep": b"[" * 100_000,
    "deep-objects": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/generate"])
@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
async def test_what_is_not_strict_json_is_400(
    client: httpx.AsyncClient, path: str, raw: bytes
) -> None:
    found = problem(await client.post(path, content=raw, headers=JSON))
    assert (found.status, found.code, found.fields) == (400, "malformed_json", ["body"])


@pytest.mark.parametrize("depth", [100, 250, 500, 1000])
@pytest.mark.parametrize("where", ["input", "parameters", "metadata", "pipeline", "priority"])
async def test_values_nested_just_below_the_parsers_limit_are_422(
    client: httpx.AsyncClient, where: str, depth: int
) -> None:
    nested = b'{"ar":{"stop":' + b"[" * depth + b"]" * depth + b"}}"
    raw = b'{"pipeline":"tiny-omni","input":{"prompt":"x"},"%b":%b}' % (where.encode(), nested)
    found = problem(await client.post("/v1/jobs", content=raw, headers=JSON))
    assert found.status == 422
    assert found.fields[0].startswith(where)


async def test_the_last_of_duplicate_keys_counts(client: httpx.AsyncClient) -> None:
    raw = b'{"pipeline":"nope","pipeline":"tiny-omni","input":{"prompt":"x"}}'
    assert (await client.post("/v1/jobs", content=raw, headers=JSON)).status_code == 202


@pytest.mark.parametrize("raw", [b"null", b"[]", b'"x"', b"7", b"true"])
async def test_json_that_is_no_object_is_422(client: httpx.AsyncClient, raw: bytes) -> None:
    found = problem(await client.post("/v1/jobs", content=raw, headers=JSON))
    assert (found.status, found.fields) == (422, ["body"])


@pytest.mark.parametrize("headers", [JSON, {}], ids=["json", "no-type"])
async def test_an_empty_body_is_422(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    found = problem(await client.post("/v1/jobs", headers=headers))
    assert (found.status, found.fields) == (422, ["body"])


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "", "x"],
)
async def test_a_body_that_is_not_declared_as_json_is_415(
    client: httpx.AsyncClient, content_type: str
) -> None:
    response = await client.post(
        "/v1/jobs", content=json.dumps(BODY), headers={"content-type": content_type}
    )
    found = problem(response)
    assert (found.status, found.fields) == (415, ["Content-Type"])


async def test_a_body_without_a_content_type_is_415(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/jobs", content=json.dumps(BODY).encode())
    assert problem(response).status == 415


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/x+json"]
)
async def test_json_types_are_taken(client: httpx.AsyncClient, content_type: str) -> None:
    response = await client.post(
        "/v1/jobs", content=json.dumps(BODY), headers={"content-type": content_type}
    )
    assert response.status_code == 202


@pytest.mark.parametrize("wait", ["-1", "61", "NaN", "inf", "soon", "1e400", ""])
async def test_a_wrong_wait_is_422(client: httpx.AsyncClient, wait: str) -> None:
    found = problem(await client.get("/v1/jobs/x", params={"wait": wait}))
    assert (found.status, found.fields) == (422, ["wait"])


@pytest.mark.parametrize(
    "last", ["x", "-", "1-2-3", "-1", "9" * 20, "1-" + "9" * 20, "1" * 5000, "$", "+", "1 1"]
)
async def test_a_wrong_last_event_id_is_422(client: httpx.AsyncClient, last: str) -> None:
    job_id = (await client.post("/v1/jobs", json=BODY)).json()["id"]
    response = await client.get(f"/v1/jobs/{job_id}/events", headers={"last-event-id": last})
    found = problem(response)
    assert (found.status, found.fields) == (422, ["Last-Event-Id"])


@pytest.fixture
def small_bodies(monkeypatch: pytest.MonkeyPatch) -> int:
    """Cap bodies at 1000 bytes; to be requested before the app."""
    monkeypatch.setenv("OMNIQ_MAX_BODY_BYTES", "1000")
    get_settings.cache_clear()
    return 1000


async def test_a_body_above_the_cap_is_413(
    broker: object, small_bodies: int, app: FastAPI, client: httpx.AsyncClient
) -> None:
    """Announced or chunked; a body at the cap is taken."""
    raw = json.dumps(BODY).encode()

    async def chunked(total: int) -> Any:
        yield raw
        yield b" " * (total - len(raw))

    announced = await client.post("/v1/jobs", content=raw.ljust(1001), headers=JSON)
    streamed = await client.post("/v1/jobs", content=chunked(1001), headers=JSON)
    for response in (announced, streamed):
        found = problem(response)
        assert (found.status, found.code, found.fields) == (413, "body_too_large", ["body"])
    taken = await client.post("/v1/jobs", content=chunked(1000), headers=JSON)
    assert taken.status_code == 202
    for content in (raw.ljust(1001), chunked(1001)):
        told = await client.post("/v1/completions", content=content, headers=JSON)
        assert told.status_code == 413
        assert told.json()["error"]["code"] == "body_too_large"


async def test_an_unknown_route_is_a_404_problem(client: httpx.AsyncClient) -> None:
    found = problem(await client.get("/v2/nothing"))
    assert (found.status, found.code) == (404, "not_found")
    assert found.body["instance"] == "/v2/nothing"


@pytest.mark.parametrize("path", ["/v1/jobs/", "/%00", "/\u2603", "/" + "x" * 5000, "//v1/jobs"])
async def test_odd_paths_are_404(client: httpx.AsyncClient, path: str) -> None:
    found = problem(await client.get(f"http://api{path}"))
    assert found.status == 404
    assert found.body["instance"].isascii()


async def test_a_name_with_a_line_break_is_an_unknown_name(client: httpx.AsyncClient) -> None:
    """Not an unknown route, whose answer is not the one that is documented there."""
    model = await client.get("/v1/models/a%0Ab%0A")
    assert (model.status_code, model.json()["error"]["code"]) == (404, "model_not_found")
    artifact = problem(await client.get("/v1/jobs/x/artifacts/a%0Ab%0A"))
    assert (artifact.status, artifact.code) == (404, "job_not_found")


@pytest.mark.parametrize("host", ["[", "a b", "x" * 5000, "", "evil.example"])
async def test_an_odd_host_header_changes_nothing(client: httpx.AsyncClient, host: str) -> None:
    headers = {"host": host}
    assert problem(await client.get("/v1/jobs/x", headers=headers)).status == 404
    response = await client.post("/v1/jobs", json=BODY, headers=headers)
    assert response.status_code == 202
    assert response.headers["location"].startswith("/v1/jobs/")


async def test_a_wrong_method_is_a_405_problem_that_says_what_is_allowed(
    client: httpx.AsyncClient,
) -> None:
    response = await client.delete("/v1/generate")
    found = problem(response)
    assert (found.status, found.code) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/jobs", "GET, HEAD, POST"),
        ("/health", "GET, HEAD"),
        ("/v1/jobs/x/cancel", "POST"),
        ("/v1/dlq/x", "DELETE, GET, HEAD"),
        ("/v1/models/a/b", "GET, HEAD"),
    ],
)
async def test_all_methods_of_a_path_are_named(
    client: httpx.AsyncClient, path: str, allowed: str
) -> None:
    """Also where a path has several routes."""
    response = await client.request("QUERY", path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert problem(response).detail.endswith(f"allowed: {allowed}")


@pytest.mark.parametrize("path", ["/health", "/docs", "/v1/jobs", "/v1/jobs/x", "/v1/nothing"])
async def test_head_is_get_without_the_body(client: httpx.AsyncClient, path: str) -> None:
    whole, head = await client.get(path), await client.head(path)
    assert head.content == b""
    assert head.status_code == whole.status_code
    assert head.headers == whole.headers


async def test_head_of_a_stream_ends_at_once(client: httpx.AsyncClient) -> None:
    job_id = (await client.post("/v1/jobs", json=BODY)).json()["id"]
    head = await client.head(f"/v1/jobs/{job_id}/events")
    assert head.headers["content-type"].startswith("text/event-stream")


async def test_a_compressed_body_is_415(client: httpx.AsyncClient) -> None:
    packed = {**JSON, "content-encoding": "gzip"}
    for path in ("/v1/jobs", "/v1/chat/completions"):
        response = await client.post(path, content=gzip.compress(b"{}"), headers=packed)
        found = problem(response)
        assert (found.status, found.code) == (415, "unsupported_content_encoding")
        assert response.headers["accept-encoding"] == "identity"


@pytest.mark.usefixtures("broker", "small_bodies")
@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("POST", "/v1/responses", "not_found"),
        ("DELETE", "/v1/models/x", "method_not_allowed"),
        ("POST", "/v1/chat/completions", "body_too_large"),
    ],
)
async def test_openais_clients_understand_what_no_route_answers(
    client: httpx.AsyncClient, method: str, path: str, code: str
) -> None:
    content = b" " * 1001 if code == "body_too_large" else b""
    response = await client.request(method, path, content=content, headers=JSON)
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert error["message"] == problem(response).detail

"""What the OpenAI-compatible routes do when jobs go wrong, or are run again: a played worker."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from api_support import begin, only_job, state_is

from omniq.config import available_pipelines
from omniq.jobs.admission import Share
from omniq.jobs.model import JobState, StageResult
from omniq.jobs.store import JobStore
from omniq.serve.flags import ServeFlags
from omniq.serve.pipeline_file import pipeline_yaml
from omniq.serve.target import resolve_model
from omniq.settings import get_settings
from omniq.tenants import TenantKeys

BODY = {"model": "lm", "messages": [{"role": "user", "content": "hello"}]}
EMBEDDER = """
name: embedder
inputs: {prompt: {type: text}}
stages: [{stage_id: ar, engine_type: AR, model: none, output_modalities: [pooling]}]
edges: [{from: input.prompt, to: ar.prompt}]
outputs: {vector: {from: ar.pooling, type: pooling}}
"""


@pytest.fixture(autouse=True)
def _pipelines(broker: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A language model `lm`, and an embedding model."""
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "config.json").write_text('{"architectures": ["Some"]}')
    pipeline = resolve_model(ServeFlags(str(tmp_path / "lm"), engine="transformers"))
    (tmp_path / "lm.yaml").write_text(pipeline_yaml(pipeline))
    (tmp_path / "embedder.yaml").write_text(EMBEDDER)
    files = [str(tmp_path / name) for name in ("lm.yaml", "embedder.yaml")]
    monkeypatch.setenv("OMNIQ_PIPELINES", json.dumps(files))
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()
    yield
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()


def result(text: str, **more: Any) -> StageResult:
    choice = {"index": 0, "text": text, "finish_reason": "stop", **more}
    return StageResult(
        values={"text": text, "finish_reason": "stop", "choices": [choice]},
        metrics={"prompt_tokens": 2, "completion_tokens": 3},
    )


async def streamed(client: httpx.AsyncClient, **more: Any) -> asyncio.Task[httpx.Response]:
    body = {**BODY, "stream": True, **more}
    return asyncio.create_task(client.post("/v1/chat/completions", json=body))


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(response: httpx.Response) -> str:
    deltas = [c["choices"][0]["delta"] for c in chunks(response) if c.get("choices")]
    return "".join(d.get("content", "") for d in deltas)


async def test_a_run_that_is_begun_anew_is_not_said_twice(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    asking = await streamed(client)
    job = await only_job(store)
    fence = await begin(store, job, "ar")
    await store.delta(job, "ar", fence, "text", {"text": "one two"})
    await store.release_stage(job, "ar", fence)
    fence = await begin(store, job, "ar")
    for piece in ("one", " two thr", "ee"):
        await store.delta(job, "ar", fence, "text", {"text": piece})
    assert await store.finish_stage(job, "ar", fence, result("one two three four"))
    response = await asking
    assert text_of(response) == "one two three four"
    assert chunks(response)[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_second_run_that_goes_differently_ends_the_stream_with_an_error(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    asking = await streamed(client)
    job = await only_job(store)
    fence = await begin(store, job, "ar")
    await store.delta(job, "ar", fence, "text", {"text": "one"})
    await store.release_stage(job, "ar", fence)
    fence = await begin(store, job, "ar")
    assert await store.finish_stage(job, "ar", fence, result("other"))
    last = chunks(await asking)[-1]
    assert "went differently" in last["error"]["message"]


@pytest.mark.parametrize(
    "case",
    [
        ({"code": "engine_error", "message": "no luck"}, 500, None),
        (
            {
                "code": "invalid_request",
                "message": "no luck",
                "details": {"fields": [{"field": "parameters.max_tokens", "message": "no luck"}]},
            },
            400,
            "max_completion_tokens",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_job_that_fails_before_the_first_token_has_its_status(
    client: httpx.AsyncClient,
    store: JobStore,
    case: tuple[dict[str, Any], int, str | None],
    stream: bool,
) -> None:
    error, status, param = case
    body = {**BODY, "stream": stream, "max_completion_tokens": 9}
    asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
    job = await only_job(store)
    fence = await begin(store, job, "ar")
    await store.fail_stage(job, "ar", fence, error)
    response = await asking
    assert response.status_code == status
    found = response.json()["error"]
    assert "no luck" in found["message"]
    assert found["param"] == param


async def test_a_stream_whose_key_is_revoked_ends_with_an_error(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    key, entry = await TenantKeys(store.redis).create(Share(tenant="ada"))
    client.headers["authorization"] = f"Bearer {key}"
    asking = await streamed(client)
    job_id = await only_job(store)
    fence = await begin(store, job_id, "ar")
    await store.delta(job_id, "ar", fence, "text", {"text": "so far", "index": 0})
    await asyncio.sleep(0.2)
    assert await TenantKeys(store.redis).revoke(entry.id)
    async with asyncio.timeout(20):
        *_, last = chunks(await asking)
    assert last["error"]["code"] == "invalid_api_key"
    await state_is(store, job_id, JobState.CANCELLING)


async def test_a_job_that_fails_later_ends_its_stream_with_the_error(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    asking = await streamed(client)
    job = await only_job(store)
    fence = await begin(store, job, "ar")
    await store.delta(job, "ar", fence, "text", {"text": "one"})
    await store.fail_stage(job, "ar", fence, {"code": "engine_error", "message": "no luck"})
    found = chunks(await asking)
    assert found[-1]["error"]["message"] == "no luck"


async def test_reasoning_and_tool_calls_go_through(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    asking = asyncio.create_task(client.post("/v1/chat/completions", json={**BODY, "tools": tools}))
    job = await only_job(store)
    assert (await store.get(job)).spec.parameters["ar"]["tools"] == tools
    fence = await begin(store, job, "ar")
    made = result("", tool_calls=[call], reasoning="hm")
    assert await store.finish_stage(job, "ar", fence, made)
    message = (await asking).json()["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [call],
    }


async def test_a_whole_text_that_is_written_otherwise_adds_nothing(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    """Parsers strip what stands between reasoning and answer only where they see both."""
    asking = await streamed(client)
    job = await only_job(store)
    fence = await begin(store, job, "ar")
    await store.delta(job, "ar", fence, "reasoning", {"text": "hm\n"})
    await store.delta(job, "ar", fence, "text", {"text": "\n\nyes"})
    assert await store.finish_stage(job, "ar", fence, result("yes", reasoning="hm"))
    found = [c["choices"][0] for c in chunks(await asking)]
    assert "".join(c["delta"].get("content", "") for c in found) == "\n\nyes"
    assert "".join(c["delta"].get("reasoning", "") for c in found) == "hm\n"
    assert found[-1]["finish_reason"] == "stop"


def call_piece(arguments: str, **head: Any) -> dict[str, Any]:
    """A piece of the first call, as vLLM's parsers give it."""
    function = {**({"name": "f"} if head else {}), "arguments": arguments}
    return {"tool_calls": [{"index": 0, **head, "function": function}]}


async def test_calls_of_a_run_that_is_begun_anew_are_not_said_twice(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    """The id is the first run's; arguments go on where the client is."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    asking = await streamed(client, tools=tools)
    job = await only_job(store)
    for number, pieces in enumerate((['{"a"'], ["{", '"a": ', "1"])):
        fence = await begin(store, job, "ar")
        head: dict[str, Any] = {"id": f"c{number}", "type": "function"}
        for piece in pieces:
            await store.delta(job, "ar", fence, "tool_calls", call_piece(piece, **head))
            head = {}
        if number == 0:
            await store.release_stage(job, "ar", fence)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert await store.finish_stage(job, "ar", fence, result("", tool_calls=[call]))
    found = [c["choices"][0] for c in chunks(await asking)]
    calls = [call for c in found for call in c["delta"].get("tool_calls", ())]
    assert "".join(c["function"]["arguments"] for c in calls) == '{"a": 1}'
    assert [c["id"] for c in calls if "id" in c] == ["c0"]
    assert [c["function"]["name"] for c in calls if "name" in c["function"]] == ["f"]
    assert found[-1]["finish_reason"] == "tool_calls"


def token(text: str) -> dict[str, Any]:
    """A token's log probability, as engines give it."""
    one = {"token_id": 5, "token": text, "logprob": -0.5, "rank": 1}
    return {**one, "top_logprobs": [one]}


@pytest.mark.parametrize("chat", [True, False])
async def test_log_probabilities_come_with_their_pieces(
    client: httpx.AsyncClient, store: JobStore, chat: bool
) -> None:
    """Each once, over a run that is begun anew, tokens without text, and what only the end says."""
    path, body = "/v1/chat/completions", {**BODY, "logprobs": True, "top_logprobs": 1}
    if not chat:
        path, body = "/v1/completions", {"model": "lm", "prompt": "hello", "logprobs": 1}
    asking = asyncio.create_task(client.post(path, json={**body, "stream": True}))
    job = await only_job(store)
    for number, pieces in enumerate(([["a"]], [["a", "b"], ["c"]])):
        fence = await begin(store, job, "ar")
        for piece in pieces:
            said = "" if piece == ["c"] else "".join(piece)  # may begin a stop string
            value = {"text": said, "logprobs": [token(t) for t in piece]}
            await store.delta(job, "ar", fence, "text", value)
        if number == 0:
            await store.release_stage(job, "ar", fence)
    made = result("abcd", logprobs=[token(t) for t in "abcd"])
    assert await store.finish_stage(job, "ar", fence, made)
    found = [c["choices"][0] for c in chunks(await asking)]
    pairs = []
    for choice in found[:-1]:
        logprobs = choice["logprobs"]
        if chat:
            pairs.append((choice["delta"].get("content", ""), logprobs["content"]))
        else:
            pairs.append((choice["text"], logprobs["tokens"]))
    texts = [(t, [x["token"] if chat else x for x in tokens]) for t, tokens in pairs]
    assert texts == [("a", ["a"]), ("b", ["b"]), ("", ["c"]), ("cd", ["d"])]
    assert found[-1]["logprobs"] is None
    if not chat:
        assert [c["logprobs"]["text_offset"] for c in found[:-1]] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("sometimes", "must be one of none, auto, required"),
        ({"type": "function", "function": {"name": "g"}}, 'must be one of .*"name": "f"'),
        ({"type": "custom"}, "must be one of"),
    ],
)
async def test_a_tool_choice_that_there_is_not(
    client: httpx.AsyncClient, choice: Any, message: str
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {**BODY, "tools": tools, "tool_choice": choice}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tool_choice"
    assert re.search(message, error["message"])


async def test_openais_fields_become_the_stages_parameters(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    schema = {"type": "object"}
    body = {
        **BODY,
        "max_completion_tokens": 7,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "logprobs": True,
        "top_logprobs": 3,
        "logit_bias": {"5": 1.5},
        "stop": "end",
        "user": "ada",
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
    spec = (await store.get(await only_job(store))).spec
    given = {k: v for k, v in spec.parameters["ar"].items() if k != "seed"}
    assert given == {
        "max_tokens": 7,
        "structured_outputs": {"json": schema},
        "logprobs": 3,
        "logit_bias": {"5": 1.5},
        "stop": "end",
        **{name: body[name] for name in ("tools", "tool_choice", "parallel_tool_calls")},
    }
    assert spec.inputs == {"messages": BODY["messages"]}
    assert spec.metadata == {"user": "ada"}
    asking.cancel()


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_embeddings(client: httpx.AsyncClient, store: JobStore, form: str) -> None:
    body = {"model": "embedder", "input": "hello", "encoding_format": form}
    asking = asyncio.create_task(client.post("/v1/embeddings", json=body))
    job = await only_job(store)
    fence = await begin(store, job, "ar")
    made = StageResult(values={"vector": [0.5, -1.0]}, metrics={"prompt_tokens": 2})
    assert await store.finish_stage(job, "ar", fence, made)
    found = (await asking).json()
    vector = found["data"][0]["embedding"]
    if form == "base64":
        vector = np.frombuffer(base64.b64decode(vector), "<f4").tolist()
    assert vector == [0.5, -1.0]
    assert found["usage"] == {"prompt_tokens": 2, "total_tokens": 2}


async def test_an_embedding_model_answers_no_chats(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={**BODY, "model": "embedder"})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "the model 'embedder' makes no text"


async def test_a_body_that_is_no_json_is_an_openai_error(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"}
    response = await client.post("/v1/completions", content=b"{", headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "malformed_json"


async def test_pipelines_of_several_stages_are_no_language_models(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that makes pictures is a model for these; the built-in one only where it is served."""
    body = {"model": "tiny-omni", "prompt": "x"}
    found = [m["id"] for m in (await client.get("/v1/models")).json()["data"]]
    assert found == ["tiny-omni", "lm", "embedder"]
    response = await client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    monkeypatch.setenv("OMNIQ_DEFAULT_PIPELINE", "lm")
    get_settings.cache_clear()
    found = [m["id"] for m in (await client.get("/v1/models")).json()["data"]]
    assert found == ["lm", "embedder"]
    assert (await client.post("/v1/completions", json=body)).status_code == 404


@pytest.mark.parametrize(
    ("path", "sent", "param", "message"),
    [
        ("completions", {"prompt": ["a"] * 257}, "prompt", "at most 256 items"),
        ("completions", {"prompt": 5}, "prompt", "valid string"),
        ("completions", {"prompt": "a", "stop": ["a", 5]}, "stop", "valid string"),
        ("completions", {"prompt": "a", "temperature": 3}, "temperature", "less than or equal"),
        ("chat/completions", {**BODY, "metadata": {"a": "x" * 513}}, "metadata.a", "at most 512"),
        ("chat/completions", {**BODY, "metadata": {"k" * 65: "x"}}, None, "at most 64"),
        ("chat/completions", {**BODY, "unheard_of": 1}, "unheard_of", "unknown field"),
        ("images/generations", {"prompt": "a", "size": "6\uff14x64"}, "size", "match pattern"),
    ],
)
async def test_errors_name_the_clients_own_field(
    client: httpx.AsyncClient, path: str, sent: dict[str, Any], param: str | None, message: str
) -> None:
    response = await client.post(f"/v1/{path}", json={"model": "lm", **sent})
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
    assert message in error["message"]
    assert param is None or error["param"] == param

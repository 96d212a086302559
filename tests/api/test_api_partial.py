"""Results without what a failed stage would have made, by every route; played workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from api_support import BODY, begin, only_job, problem

from omniq.config import available_pipelines
from omniq.jobs.model import StageResult
from omniq.jobs.store import JobStore
from omniq.outputs.sound import pcm16_message
from omniq.settings import get_settings
from omniq.streams import ChunkStreams

ERROR = {"code": "engine_error", "message": "the engine is broken"}
TEXT = "A red circle."
SPEAKER = """
name: speaker
inputs: {messages: {type: messages}}
stages:
  - {stage_id: think, engine_type: AR, model: none}
  - {stage_id: say, engine_type: AR, model: none}
edges:
  - {from: input.messages, to: think.messages}
  - {from: EDGE, to: say.text}
outputs:
  text: {from: think.text, type: text}
  voice: {from: say.audio, type: audio, sample_rate: 8000, format: wav}
"""
SAMPLES = np.linspace(-1, 1, 400, dtype=np.float32)


async def play_text(store: JobStore, job_id: str, stage: str) -> None:
    fence = await begin(store, job_id, stage)
    assert await store.finish_stage(job_id, stage, fence, StageResult(values={"text": TEXT}))


async def fail(store: JobStore, job_id: str, stage: str) -> None:
    fence = await begin(store, job_id, stage)
    assert await store.fail_stage(job_id, stage, fence, ERROR, "Traceback")


async def test_a_job_says_what_it_lacks_and_why(client: httpx.AsyncClient, store: JobStore) -> None:
    job = (await client.post("/v1/jobs", json={**BODY, "allow_partial": True})).json()
    assert job["partial"] is False and job["missing"] == {}
    await play_text(store, job["id"], "ar")
    await fail(store, job["id"], "dit")
    job = (await client.get(f"/v1/jobs/{job['id']}")).json()
    missing = {"image": {"stage": "dit", "error": ERROR}}
    assert (job["state"], job["partial"], job["missing"]) == ("succeeded", True, missing)
    assert job["values"] == {"text": TEXT} and job["error"] is None and job["artifacts"] == []
    (listed,) = (await client.get("/v1/jobs")).json()["jobs"]
    assert listed["partial"] is True
    events = (await client.get(f"/v1/jobs/{job['id']}/events")).text.strip().split("\n\n")
    last = json.loads(events[-1].split("data: ")[1])
    assert last["type"] == "job.succeeded"
    assert last["data"] == {"partial": True, "missing": missing}
    (letter,) = (await client.get("/v1/dlq")).json()["dead_letters"]
    assert (letter["id"], letter["stage"]) == (job["id"], "dit")


async def test_generate_answers_with_what_there_is(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    asking = asyncio.create_task(client.post("/v1/generate", json={**BODY, "allow_partial": True}))
    job_id = await only_job(store)
    await play_text(store, job_id, "ar")
    await fail(store, job_id, "dit")
    answer = await asking
    assert answer.status_code == 200 and answer.headers["x-omniq-missing"] == "image"
    assert answer.json()["values"] == {"text": TEXT} and answer.json()["partial"] is True


async def test_by_default_and_without_any_output_the_failure_is_the_answer(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    for body, done in ((BODY, ["ar"]), ({**BODY, "allow_partial": True}, [])):
        job = (await client.post("/v1/jobs", json=body)).json()
        for stage in done:
            await play_text(store, job["id"], stage)
        await fail(store, job["id"], "dit" if done else "ar")
        job = (await client.get(f"/v1/jobs/{job['id']}")).json()
        assert (job["state"], job["error"], job["partial"]) == ("failed", ERROR, False)
        assert job["missing"] == {}


async def test_an_idempotency_key_tells_a_part_from_the_whole(client: httpx.AsyncClient) -> None:
    headers = {"idempotency-key": "k"}
    first = await client.post("/v1/jobs", json={**BODY, "allow_partial": True}, headers=headers)
    again = await client.post("/v1/jobs", json={**BODY, "allow_partial": True}, headers=headers)
    assert first.json()["id"] == again.json()["id"]
    assert (await client.post("/v1/jobs", json=BODY, headers=headers)).status_code == 409


@pytest.mark.parametrize("value", ["yes", 1, None])
async def test_allow_partial_is_true_or_false(client: httpx.AsyncClient, value: Any) -> None:
    answer = await client.post("/v1/jobs", json={**BODY, "allow_partial": value})
    assert problem(answer).fields == ["allow_partial"]


@pytest.fixture(params=["think.text"])
def speaker(
    request: pytest.FixtureRequest, broker: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A pipeline that answers in text, and speaks what it answers."""
    (tmp_path / "speaker.yaml").write_text(SPEAKER.replace("EDGE", request.param))
    monkeypatch.setenv("OMNIQ_PIPELINES", json.dumps([str(tmp_path)]))
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()
    yield
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()


CHAT = {
    "model": "speaker",
    "messages": [{"role": "user", "content": "draw"}],
    "modalities": ["text", "audio"],
}


@pytest.mark.usefixtures("speaker")
async def test_a_chat_that_cannot_be_spoken_is_its_text(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    for allowed in (True, False):
        body = {**CHAT, "allow_partial": allowed, "metadata": {"allowed": str(allowed)}}
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        job_id = await _newest(store, str(allowed))
        await play_text(store, job_id, "think")
        await fail(store, job_id, "say")
        answer = await asking
        if not allowed:
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == ERROR["message"]
            continue
        done = answer.json()
        assert done["choices"][0]["message"]["content"] == TEXT
        assert done["choices"][0]["message"]["audio"] is None
        assert done["partial"] is True
        assert done["missing"] == {"voice": {"stage": "say", "error": ERROR}}


@pytest.mark.usefixtures("speaker")
async def test_a_stream_ends_with_what_it_lacks(client: httpx.AsyncClient, store: JobStore) -> None:
    """The sound breaks off in the middle; what has been heard of it stays heard."""
    body = {**CHAT, "allow_partial": True, "stream": True, "audio": {"format": "pcm16"}}
    asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
    job_id = await only_job(store)
    await play_text(store, job_id, "think")
    fence = await begin(store, job_id, "say")
    delta = {"output": "audio", "sequence": 0, "value": pcm16_message(SAMPLES, 8000)}
    await ChunkStreams(store.redis).piece((job_id, "say", fence), delta, None)
    assert await store.fail_stage(job_id, "say", fence, ERROR)
    answer = await asking
    assert answer.status_code == 200
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert "".join(d.get("content", "") for d in deltas) == TEXT
    assert len([d for d in deltas if "audio" in d]) == 1, "no transcript of a whole sound"
    assert [c for c in chunks if "partial" in c] == [chunks[-1]]
    assert chunks[-1]["partial"] is True
    assert chunks[-1]["missing"] == {"voice": {"stage": "say", "error": ERROR}}


@pytest.mark.usefixtures("speaker")
@pytest.mark.parametrize("speaker", ["input.messages"], indirect=True)
async def test_a_sound_made_apart_from_the_text_has_no_part(client: httpx.AsyncClient) -> None:
    """The text could be what is missing, and an answer without text is none."""
    answer = await client.post("/v1/chat/completions", json={**CHAT, "allow_partial": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "allow_partial"


async def _newest(store: JobStore, allowed: str) -> str:
    while True:
        for record in (await store.list(limit=1))[0]:
            if record.spec.metadata["allowed"] == allowed:
                return record.id
        await asyncio.sleep(0.01)

"""Speech whose chunks come twice, late or not at all; a played worker."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from api_support import begin, only_job

from omniq.config import available_pipelines
from omniq.jobs.model import ArtifactInfo, StageResult
from omniq.jobs.store import JobStore
from omniq.outputs import OutputContext
from omniq.outputs.sound import pcm16_message, to_int16
from omniq.outputs.sound_files import encoded
from omniq.settings import get_settings
from omniq.streams import ChunkStreams

YAML = """
name: talk
inputs: {prompt: {type: text}}
stages: [{stage_id: say, engine_type: AR, model: none}]
edges: [{from: input.prompt, to: say.prompt}]
outputs: {voice: {from: say.audio, type: audio, sample_rate: 8000, format: FORM}}
"""
SAMPLES = np.linspace(-1, 1, 400, dtype=np.float32)
WHOLE = to_int16(SAMPLES).astype("<i2").tobytes()


@pytest.fixture(params=["wav", "mp3"])
def form(
    request: pytest.FixtureRequest, broker: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Of the pipeline's file."""
    (tmp_path / "talk.yaml").write_text(YAML.replace("FORM", request.param))
    monkeypatch.setenv("OMNIQ_PIPELINES", json.dumps([str(tmp_path)]))
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()
    yield request.param
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()


class Speaker:
    """The worker: one job's stage, its chunks and its file."""

    def __init__(self, store: JobStore, job_id: str, form: str) -> None:
        self.store, self.job_id, self.form = store, job_id, form
        self.streams = ChunkStreams(store.redis)
        self.fence = 0

    async def begin(self) -> None:
        if self.fence:
            assert await self.store.release_stage(self.job_id, "say", self.fence)
        self.fence = await begin(self.store, self.job_id, "say")

    async def say(self, sequence: int, samples: Any) -> None:
        value = pcm16_message(samples, 8000)
        delta = {"output": "audio", "sequence": sequence, "value": value}
        await self.streams.piece((self.job_id, "say", self.fence), delta, None)

    async def finish(self) -> None:
        data = encoded(to_int16(SAMPLES), 8000, self.form, OutputContext(self.job_id))
        key = await self.store.put_artifact(self.job_id, "voice", self.fence, data)
        meta = {"format": self.form, "sample_rate": 8000, "channels": 1, "samples": 400}
        info = ArtifactInfo(
            name="voice", content_type="audio/x", nbytes=len(data), key=key, meta=meta
        )
        result = StageResult(artifacts={"voice": info})
        assert await self.store.finish_stage(self.job_id, "say", self.fence, result)


@pytest.fixture
async def asked(
    client: httpx.AsyncClient, store: JobStore, form: str
) -> AsyncIterator[tuple[Speaker, asyncio.Task[httpx.Response]]]:
    body = {"model": "talk", "voice": "any", "input": "x", "response_format": "pcm"}
    asking = asyncio.create_task(
        client.post("/v1/audio/speech", json={**body, "stream_format": "sse"})
    )
    yield Speaker(store, await only_job(store), form), asking
    asking.cancel()


def heard(response: httpx.Response) -> tuple[bytes, dict[str, Any]]:
    """The sound, and the last event."""
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line[6:]) for line in lines]
    return b"".join(base64.b64decode(e["audio"]) for e in events if "audio" in e), events[-1]


Asked = tuple[Speaker, asyncio.Task[httpx.Response]]


async def test_a_run_that_is_repeated_is_heard_once(asked: Asked) -> None:
    """Cut into other chunks, too."""
    speaker, asking = asked
    await speaker.begin()
    await speaker.say(0, SAMPLES[:100])
    await speaker.say(1, SAMPLES[100:200])
    await speaker.begin()
    await speaker.say(0, SAMPLES[:150])
    await speaker.say(1, SAMPLES[150:300])
    await speaker.say(2, SAMPLES[300:])
    await speaker.finish()
    sound, last = heard(await asking)
    assert sound == WHOLE and last["type"] == "speech.audio.done"


async def test_a_run_that_says_something_else_is_an_error(asked: Asked) -> None:
    speaker, asking = asked
    await speaker.begin()
    await speaker.say(0, SAMPLES[:100])
    await speaker.begin()
    await speaker.say(0, SAMPLES[100:200])
    sound, last = heard(await asking)
    assert sound == WHOLE[:200] and "went differently" in last["error"]["message"]


async def test_what_the_chunks_lack_comes_from_the_file_if_it_is_lossless(asked: Asked) -> None:
    """Chunk 1 is lost; what follows it does not stand in its place."""
    speaker, asking = asked
    await speaker.begin()
    await speaker.say(0, SAMPLES[:100])
    await speaker.say(2, SAMPLES[200:300])
    await speaker.finish()
    sound, last = heard(await asking)
    if speaker.form == "wav":
        assert sound == WHOLE and last["type"] == "speech.audio.done"
    else:
        assert sound == WHOLE[:200] and "lost on their way" in last["error"]["message"]


async def test_chunks_alone_do_when_they_are_all_there(asked: Asked) -> None:
    speaker, asking = asked
    await speaker.begin()
    for i in range(4):
        await speaker.say(i, SAMPLES[100 * i : 100 * i + 100])
    await speaker.finish()
    assert heard(await asking)[0] == WHOLE


@pytest.mark.parametrize("form", ["wav"], indirect=True)
@pytest.mark.parametrize("wanted", ["flac", "pcm"])
async def test_formats_that_need_what_is_not_there(
    client: httpx.AsyncClient,
    store: JobStore,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
) -> None:
    """Without PyAV: refused before a job is made, with the formats that this server writes."""
    monkeypatch.setattr("omniq_api.openai_compat.sound_stream.find_spec", lambda name: None)
    body = {"model": "talk", "voice": "any", "input": "x", "response_format": wanted}
    asking = asyncio.create_task(client.post("/v1/audio/speech", json=body))
    if wanted == "pcm":
        speaker = Speaker(store, await only_job(store), form)
        await speaker.begin()
        await speaker.say(0, SAMPLES)
        await speaker.finish()
    answer = await asking
    if wanted == "pcm":
        assert answer.content == WHOLE
        assert answer.headers["content-type"] == "audio/pcm; rate=8000"
    else:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "response_format"
        assert "wav and pcm only" in answer.json()["error"]["message"]

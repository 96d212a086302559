"""OpenAI's client and `/v1/audio/speech`: a real server, a real worker, an engine of tones."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from omniq_process import omniq_processes
from sounds import av_samples, tags_of
from stand_in_engines import tone_of
from support import Valkey, free_port, wait_until

from omniq.outputs.sound import to_int16

RATE = 24_000
YAML = """
name: {name}
inputs:
  script: {{type: text, max_length: 200}}
{inputs}
stages:
  - {{stage_id: say, engine_type: AR, engine: "stand_in_engines:Tones", model: none,
     max_in_flight: 8, engine_args: {{gate: "{gate}"}}, retry: {{max_retries: 0}}}}
edges:
  - {{from: input.script, to: say.text}}
{edges}
outputs:
  voice: {{from: say.audio, type: audio, sample_rate: 24000, format: {form}}}
"""


@dataclass
class System:
    url: str
    gate: Path
    client: openai.OpenAI

    def speak(self, text: str, **more: Any) -> bytes:
        asked = {"model": "talk", "voice": "low", "response_format": "wav", **more}
        return self.client.audio.speech.create(input=text, **asked).read()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Pipelines ``talk`` with voices, ``plain`` without and with MP3 files."""
    folder = tmp_path_factory.mktemp("speech")
    gate, port = folder / "gate", free_port()
    with_voice = {
        "inputs": "  voice: {type: text, required: false, max_length: 20}",
        "edges": "  - {from: input.voice, to: say.voice}",
    }
    for name, form, more in (("talk", "wav", with_voice), ("plain", "mp3", {})):
        filled = {"inputs": "", "edges": "", **more}
        text = YAML.format(name=name, form=form, gate=gate, **filled)
        (folder / f"{name}.yaml").write_text(text)
    valkey = Valkey(folder)
    valkey.start()
    env = {
        "OMNIQ_BROKER_URL": valkey.url,
        "OMNIQ_PIPELINES": json.dumps([str(folder)]),
        "OMNIQ_DEFAULT_PIPELINE": "talk",
        "OMNIQ_HEARTBEAT": "0.3",
        "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
    }
    url = f"http://127.0.0.1:{port}"
    with omniq_processes(folder) as start:
        for name in ("talk", "plain"):
            start("worker", "--pipeline", name, "--stage", "say", **env)
        server = start("api", "--port", str(port), **env)

        def up() -> bool:
            assert server.process.poll() is None, server.output()
            try:
                return len(httpx.get(f"{url}/v1/workers").json()["workers"]) == 2
            except (httpx.TransportError, KeyError):
                return False

        wait_until(up, 60, "the API answers and the workers are there")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            yield System(url, gate, client)
    valkey.stop()


def expected(words: int, *, low: bool = True) -> Any:
    return to_int16(np.concatenate([tone_of(i, low=low) for i in range(words)]))


@pytest.mark.parametrize("text", ["one two three", "quiet and whole"])
def test_lossless_speech_is_the_very_sound(system: System, text: str) -> None:
    """By chunks and whole."""
    for form in ("wav", "flac"):
        samples, rate = av_samples(system.speak(text, response_format=form))
        assert rate == RATE and np.array_equal(samples, expected(3)), form
    pcm = system.speak(text, response_format="pcm")
    assert pcm == expected(3).astype("<i2").tobytes()


@pytest.mark.parametrize("form", ["mp3", "opus", "aac"])
def test_lossy_speech_can_be_played(system: System, form: str) -> None:
    data = system.speak("one two three four five", response_format=form)
    samples, rate = av_samples(data)
    assert samples.shape[-1] / rate == pytest.approx(0.5, abs=0.12)
    if form == "mp3":
        assert json.loads(tags_of(data)["comment"])["prompt"] == "one two three four five"


def test_voices_where_there_are_any(system: System) -> None:
    assert system.speak("x", response_format="pcm", voice="high") == (
        expected(1, low=False).astype("<i2").tobytes()
    )
    own = {"id": "high"}
    assert system.speak("x", response_format="pcm", voice=own) == (
        expected(1, low=False).astype("<i2").tobytes()
    )
    plain = system.speak("x", model="plain", voice="alloy", response_format="pcm")
    assert plain == expected(1).astype("<i2").tobytes(), "its one voice, whatever is asked for"


def test_a_file_of_another_format_is_read_when_there_were_no_chunks(system: System) -> None:
    data = system.speak("quiet and whole", model="plain", response_format="wav")
    samples, rate = av_samples(data)
    assert rate == RATE and samples.shape[-1] / rate == pytest.approx(0.3, abs=0.1)


@pytest.mark.parametrize("form", ["pcm", "wav", "mp3", "opus"])
def test_speech_is_heard_while_it_is_made(system: System, form: str) -> None:
    system.gate.unlink(missing_ok=True)
    with system.client.audio.speech.with_streaming_response.create(
        model="talk", voice="low", input="a b c d e gate f g", response_format=form
    ) as response:
        pieces = response.iter_bytes(256)
        first = next(pieces)
        assert not system.gate.exists() and first
        system.gate.touch()
        data = first + b"".join(pieces)
    kind = response.headers["content-type"]
    if form == "pcm":
        assert kind == "audio/pcm; rate=24000"
        assert data == expected(8).astype("<i2").tobytes()
    elif form == "wav":
        assert np.array_equal(av_samples(data)[0], expected(8))
    else:
        samples, rate = av_samples(data)
        assert samples.shape[-1] / rate == pytest.approx(0.8, abs=0.12)


def test_events_hold_the_same_bytes(system: System) -> None:
    body = {"model": "talk", "voice": "low", "input": "a b c", "response_format": "pcm"}
    with httpx.stream(
        "POST", f"{system.url}/v1/audio/speech", json={**body, "stream_format": "sse"}
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line[6:]) for line in lines]
    assert [e["type"] for e in events] == [*["speech.audio.delta"] * 3, "speech.audio.done"]
    audio = b"".join(base64.b64decode(e["audio"]) for e in events[:-1])
    assert audio == expected(3).astype("<i2").tobytes()
    assert events[-1]["usage"] == {"input_tokens": 3, "output_tokens": 30, "total_tokens": 33}


def test_a_failure_before_the_first_sound_has_its_status(system: System) -> None:
    with pytest.raises(openai.InternalServerError, match="told to fail"):
        system.speak("fail")


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_a_failure_in_the_middle_breaks_the_answer_off(system: System, stream_format: str) -> None:
    """A part is never taken for the whole; events say why."""
    system.gate.unlink(missing_ok=True)
    body = {"model": "talk", "voice": "low", "input": "a b gate fail", "response_format": "pcm"}
    asked = {**body, "stream_format": stream_format}
    with httpx.stream("POST", f"{system.url}/v1/audio/speech", json=asked) as response:
        assert response.status_code == 200
        pieces = response.iter_bytes()
        heard = next(pieces)
        system.gate.touch()
        if stream_format == "audio":
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
                list(pieces)
            return
        text = (heard + b"".join(pieces)).decode()
    last = [line for line in text.splitlines() if line.startswith("data: ")][-1]
    assert json.loads(last[6:])["error"]["message"] == "told to fail"


def test_a_client_that_goes_cancels_its_job(system: System) -> None:
    system.gate.unlink(missing_ok=True)
    with system.client.audio.speech.with_streaming_response.create(
        model="talk",
        voice="low",
        input="a b gate c",
        response_format="pcm",
        extra_body={"user": "gone"},
    ) as response:
        next(response.iter_bytes(64))

    def cancelled() -> bool:
        jobs = httpx.get(f"{system.url}/v1/jobs").json()["jobs"]
        return any(j["metadata"] == {"user": "gone"} and j["state"] == "cancelled" for j in jobs)

    wait_until(cancelled, 20, "the job is cancelled")


@pytest.mark.parametrize(
    ("more", "param", "text"),
    [
        ({"speed": 1.5}, "speed", "speaks at speed 1 only"),
        ({"speed": 5}, "speed", "less than or equal to 4"),
        ({"instructions": "whisper"}, "instructions", "takes no instructions"),
        ({"ref_text": "a"}, "ref_text", "takes no recording of a voice"),
        ({"ref_audio": "data:,a"}, "ref_audio", "takes no recording of a voice"),
        ({"input": "x" * 201}, "input", "must have 1 to 200 characters"),
        ({"input": ""}, "input", "must have 1 to 200 characters"),
        ({"voice": "x" * 21}, "voice", "must have 1 to 20 characters"),
        ({"voice": {}}, "voice", "valid string"),
        ({"response_format": "ogg"}, "response_format", "'mp3', 'opus'"),
        ({"temperatur": 1}, "temperatur", "unknown parameter"),
    ],
)
def test_what_cannot_be_done_is_named(
    system: System, more: dict[str, Any], param: str, text: str
) -> None:
    body = {"model": "talk", "voice": "low", "input": "a", **more}
    answer = httpx.post(f"{system.url}/v1/audio/speech", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert str(error["param"]).startswith(param) and text in error["message"]


def test_generate_answers_with_the_sound(system: System) -> None:
    body = {"pipeline": "talk", "input": {"script": "a b", "voice": "low"}}
    answer = httpx.post(f"{system.url}/v1/generate", json=body)
    assert answer.headers["content-type"] == "audio/wav"
    assert np.array_equal(av_samples(answer.content)[0], expected(2))


def test_a_job_says_the_format_of_its_sound(system: System) -> None:
    body = {"pipeline": "plain", "input": {"script": "a b"}}
    flac = httpx.post(f"{system.url}/v1/generate", json={**body, "formats": {"voice": "flac"}})
    assert flac.headers["content-type"] == "audio/flac"
    assert np.array_equal(av_samples(flac.content)[0], expected(2))
    as_declared = httpx.post(f"{system.url}/v1/generate", json=body)
    assert as_declared.headers["content-type"] == "audio/mpeg"
    for formats, fault in (
        ({"voice": "midi"}, "must be one of wav, flac, mp3, opus, aac; got 'midi'"),
        ({"song": "wav"}, "no such output is made; made are: voice"),
    ):
        answer = httpx.post(f"{system.url}/v1/jobs", json={**body, "formats": formats})
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error == {"field": f"formats.{next(iter(formats))}", "message": fault}


def test_speed_one_is_no_wish(system: System) -> None:
    assert system.speak("a", speed=1.0)


def test_models_that_do_not_speak_say_so(system: System) -> None:
    chat = {"model": "talk", "messages": [{"role": "user", "content": "x"}]}
    error = httpx.post(f"{system.url}/v1/chat/completions", json=chat).json()["error"]
    assert error["param"] == "model" and "/v1/audio/speech" in error["message"]
    body = {"model": "nobody", "voice": "low", "input": "a"}
    answer = httpx.post(f"{system.url}/v1/audio/speech", json=body)
    assert answer.status_code == 404 and "talk" in answer.json()["error"]["message"]

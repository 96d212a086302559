"""`vllm serve FOLDER --omni` of Qwen2.5-Omni: text and speech to the OpenAI client."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from clips import clip
from omni_chat import most_apart, streamed
from qwen_omni_reference import SEED, Reference, turn, wav
from served import Served, serve_omni, served
from tiny_qwen_omni import SAMPLE_RATE, SAMPLES_A_CODE, make_qwen_omni, picture, sound

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NAME = "tiny-omni-25"
TOKENS, CODES = 24, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen_omni(tmp_path_factory.mktemp("models") / NAME)


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def system(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    """With the thinker on either engine."""
    if request.param == "vllm":
        pytest.importorskip("vllm")
        pytest.importorskip("torchvision")
    flags = ["--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "4096"]
    command = serve_omni(folder, *flags, "--engine", request.param)
    with served(tmp_path_factory.mktemp("serve"), *command, timeout=240) as running:
        yield running


@pytest.fixture
def on_vllm(request: pytest.FixtureRequest) -> bool:
    """Whether the thinker is vLLM's.

    It takes no sound of videos. And it hands on at once all that has been made since it was last
    asked: on a busy machine a tiny model has ended by then.
    """
    return bool(request.node.callspec.params["system"] == "vllm")


@pytest.fixture
def client(system: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def job_of(system: Served, completion: str) -> dict[str, Any]:
    answer = httpx.get(f"{system.url}/v1/jobs/{completion.removeprefix('chatcmpl-')}")
    return dict(answer.raise_for_status().json())


def test_whole_answer_equals_generate(system: Served, client: openai.OpenAI, folder: Path) -> None:
    """A picture and a sound in, text and a WAV file out: those of transformers."""
    messages: Any = turn(picture(1), "and", sound(2), "?")
    done = client.chat.completions.create(
        model=NAME,
        messages=messages,
        modalities=["text", "audio"],
        audio={"voice": "Chelsie", "format": "wav"},
        max_completion_tokens=TOKENS,
        seed=SEED,
        extra_body={"talker": {"max_tokens": CODES}},
    )
    reference = Reference(folder)
    tokens, codes, waveform = reference.answer(reference.inputs(messages), TOKENS, CODES)
    said = done.choices[0].message
    # vLLM leaves out a character that the answer's end cuts.
    text = reference.text(tokens).rstrip("\ufffd")
    assert said.content is not None
    assert said.content.rstrip("\ufffd") == text
    assert said.audio is not None
    assert said.audio.transcript == said.content
    with wave.open(io.BytesIO(base64.b64decode(said.audio.data))) as file:
        assert (file.getframerate(), file.getnchannels()) == (SAMPLE_RATE, 1)
        heard = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert len(heard) == len(codes) * SAMPLES_A_CODE
    expected = waveform.numpy() * 32_767
    assert np.abs(heard - expected).max() < 10
    metrics = {n: s["metrics"] for n, s in job_of(system, done.id)["stages"].items()}
    assert metrics["token2wav"]["audio_seconds"] == pytest.approx(len(heard) / SAMPLE_RATE)
    assert metrics["token2wav"]["real_time_factor"] > 0


def test_text_alone_runs_no_talker(system: Served, client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=NAME, messages=turn("a red circle"), max_completion_tokens=4
    )
    assert done.choices[0].message.content
    assert done.choices[0].message.audio is None
    assert list(job_of(system, done.id)["stages"]) == ["thinker"]


def test_sound_comes_before_the_text_has_ended(
    system: Served, client: openai.OpenAI, on_vllm: bool
) -> None:
    """One stream of text and sound; the talker speaks while the thinker goes on."""
    parts: list[tuple[str, Any]] = []
    tokens = 300 if on_vllm else 3000  # for longer than the first sound takes anywhere
    stream = client.chat.completions.create(
        model=NAME,
        messages=turn("a red circle above a blue square"),
        modalities=["text", "audio"],
        audio={"voice": "Ethan", "format": "pcm16"},
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=tokens,
        seed=SEED,
        extra_body={"ignore_eos": True, "talker": {"min_tokens": 200, "max_tokens": 200}},
    )
    job, usage, finish = "", None, None
    for chunk in stream:
        job, usage = chunk.id, chunk.usage or usage
        for choice in chunk.choices:
            delta: Any = choice.delta
            finish = choice.finish_reason or finish
            if delta.content:
                parts.append(("text", delta.content))
            if getattr(delta, "audio", None):
                parts.append(("audio", delta.audio))
    kinds = [kind for kind, _ in parts]
    assert kinds.index("text") < kinds.index("audio")
    assert on_vllm or kinds.index("audio") < len(kinds) - 1 - kinds[::-1].index("text")
    audio = [value for kind, value in parts if kind == "audio"]
    data = b"".join(base64.b64decode(a.data) for a in audio[:-1])
    assert len(data) == 2 * 200 * SAMPLES_A_CODE
    assert len(audio) > 3
    text = "".join(value for kind, value in parts if kind == "text")
    assert audio[-1].transcript == text
    assert {a.id for a in audio} == {audio[0].id}
    assert finish == "length"
    assert usage is not None
    assert usage.completion_tokens == tokens
    stages = job_of(system, job)["stages"]
    first = {n: s["metrics"].get("first_output_seconds") for n, s in stages.items()}
    assert 0 < first["thinker"] < first["token2wav"]
    file = httpx.get(f"{system.url}/v1/jobs/{job.removeprefix('chatcmpl-')}/artifacts/audio")
    with wave.open(io.BytesIO(file.raise_for_status().content)) as whole:
        assert whole.readframes(whole.getnframes()) == data


def test_streamed_answer_equals_generate(client: openai.OpenAI, folder: Path) -> None:
    """Of an utterance of one window: the pieces together are transformers' text and sound.

    How many pieces so short a text has is up to who is quicker, the model or who hands them on.
    """
    messages: Any = turn("a red circle above a blue square")
    heard = streamed(
        client, "Ethan", model=NAME, messages=messages, max_completion_tokens=TOKENS, seed=SEED,
        extra_body={"talker": {"max_tokens": CODES}},
    )  # fmt: skip
    reference = Reference(folder)
    tokens, codes, waveform = reference.answer(
        reference.inputs(messages), TOKENS, CODES, speaker="Ethan"
    )
    assert heard.text == heard.audios[-1].transcript
    # vLLM leaves out a character that the answer's end cuts.
    assert heard.text.rstrip("\ufffd") == reference.text(tokens).rstrip("\ufffd")
    assert len(heard.samples) == len(codes) * SAMPLES_A_CODE
    assert most_apart(heard.samples, waveform) < 10


def test_jobs_stream_text_and_sound(system: Served) -> None:
    """The same as events of a job; `outputs` leaves the sound out."""
    body = {
        "pipeline": NAME,
        "input": {"prompt": "a red circle"},
        "parameters": {"seed": SEED, "max_tokens": 8, "talker": {"max_tokens": 20}},
    }
    job = httpx.post(f"{system.url}/v1/jobs?wait=60", json=body, timeout=90).json()
    assert job["state"] == "succeeded", job
    events = httpx.get(f"{system.url}/v1/jobs/{job['id']}/events", timeout=30).text
    assert '"output":"text"' in events
    assert '"output":"audio"' in events
    alone = httpx.post(
        f"{system.url}/v1/jobs?wait=60", json={**body, "outputs": ["text"]}, timeout=90
    ).json()
    assert list(alone["stages"]) == ["thinker"]
    refused = httpx.post(f"{system.url}/v1/jobs", json={**body, "outputs": ["song"]})
    assert refused.status_code == 422
    assert "must be some of text" in refused.text


def test_a_video_is_seen_and_heard(
    system: Served, client: openai.OpenAI, tmp_path: Path, on_vllm: bool
) -> None:
    """In a chat, as an upload and by the command line: the same answer."""
    data = clip(2, frames=13, fps=5, sound=sound(5, 2.6))
    options: dict[str, Any] = {"fps": 4.0} if on_vllm else {"use_audio_in_video": True}
    part = {
        "type": "video_url",
        "video_url": {"url": f"data:;base64,{base64.b64encode(data).decode()}"},
    }
    asked: Any = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]

    def chat(messages: Any, **more: Any) -> Any:
        done = client.chat.completions.create(
            model=NAME, messages=messages, max_completion_tokens=12, extra_body=more
        )
        return done.usage.prompt_tokens, done.choices[0].message.content

    tokens, text = chat(asked, mm_processor_kwargs=options)
    assert tokens > chat(asked)[0], "its sound, or more of its frames, take tokens"
    if on_vllm:
        with pytest.raises(openai.BadRequestError, match="use_audio_in_video"):
            chat(asked, mm_processor_kwargs={"use_audio_in_video": True})
    spec = {
        "pipeline": NAME,
        "input": {"prompt": "What is it?"},
        "parameters": {"max_tokens": 12, "mm_processor_kwargs": options},
        "outputs": ["text"],
    }
    job = httpx.post(
        f"{system.url}/v1/jobs?wait=60",
        data={"request": json.dumps(spec)},
        files={"video": ("clip.mkv", data)},
        timeout=90,
    ).json()
    assert job["state"] == "succeeded", job
    assert job["input"]["video"] == [{"width": 64, "height": 48, "bytes": len(data)}]
    assert job["values"]["text"] == text
    (tmp_path / "clip.mkv").write_bytes(data)
    served_pipeline = Path(system.env["OMNIQ_DATA_DIR"]) / "serve" / f"{NAME}.yaml"
    command = [sys.executable, "-m", "omniq", "generate", "What is it?", "--pipeline", NAME]
    given = ["--input", "video=clip.mkv", "--param", "max_tokens=12", "--json"]
    given += ["--param", f"mm_processor_kwargs={json.dumps(options)}"]
    done = subprocess.run(
        [*command, *given],
        cwd=tmp_path,
        env={**system.env, "OMNIQ_PIPELINES": json.dumps([str(served_pipeline)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["values"]["text"] == text
    again = {"job": job["id"], "artifact": "text"}
    refused = httpx.post(
        f"{system.url}/v1/jobs", json={**spec, "input": {"prompt": "x", "video": again}}
    )
    assert refused.status_code == 422
    assert "input.video" in refused.text


def test_the_example_runs(system: Served, tmp_path: Path, on_vllm: bool) -> None:
    """`examples/qwen_omni.py` with a picture, a sound and a video that is heard."""
    picture(4).save(tmp_path / "seen.png")
    (tmp_path / "heard.wav").write_bytes(base64.b64decode(wav(sound(4))))
    (tmp_path / "clip.mp4").write_bytes(clip(6, frames=4, sound=sound(6, 1.0), form="mp4"))
    script = Path(__file__).parents[2] / "examples" / "qwen_omni.py"
    command = [sys.executable, str(script), "What is it?", "--url", system.url, "--model", NAME]
    files = ["--image", "seen.png", "--sound", "heard.wav", "--max-tokens", "40"]
    files += ["--video", "clip.mp4", *([] if on_vllm else ["--hear"])]
    done = subprocess.run(
        [*command, *files], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "s of speech" in done.stdout
    with wave.open(str(tmp_path / "answer.wav")) as file:
        assert file.getframerate() == SAMPLE_RATE
        assert file.getnframes() > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"audio": {"format": "wav"}}, "with modalities"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "Bob"}}, "no speaker 'Bob'"),
        (
            {"modalities": ["text", "audio"], "audio": {"format": "mp3"}, "stream": True},
            "must be pcm16",
        ),
        ({"modalities": ["smell"]}, "modalities"),
        ({"modalities": ["text", "audio"], "n": 2, "temperature": 1}, "n must be 1"),
        ({"guidance": 3}, "unknown field"),
        ({"mm_processor_kwargs": {"fps": 0}}, "mm_processor_kwargs: fps: "),
        ({"mm_processor_kwargs": {"zoom": 2}}, "mm_processor_kwargs: zoom: "),
    ],
)
def test_what_is_wrong_is_said(system: Served, more: dict[str, Any], message: str) -> None:
    body = {"model": NAME, "messages": turn("hello"), "max_tokens": 4, **more}
    answer = httpx.post(f"{system.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert message in answer.text


def test_reference_is_not_silent(folder: Path) -> None:
    """The tiny model's sound depends on what is said, so that comparing it means something."""
    reference = Reference(folder)
    waves = [
        reference.answer(reference.inputs(turn(text)), 8, 20)[2] for text in ("one", "twenty two")
    ]
    assert all(w.std() > 0.01 for w in waves)
    shortest = min(map(len, waves))
    assert not torch.allclose(waves[0][:shortest], waves[1][:shortest], atol=1e-2)

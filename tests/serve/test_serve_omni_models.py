"""`omniq serve FOLDER` of GLM-Image and CSM, asked by OpenAI's client."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from diffusion_helpers import picture
from PIL import Image
from served import Served, served
from sounds import av_samples, tone
from tiny_csm import FRAME, SAMPLE_RATE, make_csm
from tiny_glm_image import make_glm_image, whole_glm_image

from omniq import OmniLLM
from omniq.config import available_pipelines
from omniq.errors import InvalidRequest
from omniq.outputs.sound import to_int16, wav_file
from omniq.settings import get_settings

TEXT = "a red circle above a blue square"
SIGN = "a sign that says 'HELLO'"
FRAMES = 150


def omniq(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "omniq", "serve", str(folder), "--dtype", "float32", *flags]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@contextmanager
def fresh_settings() -> Iterator[None]:
    """Read from the environment as it is now, and not after."""
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()
    yield
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()


def wav_url(samples: Any) -> str:
    """Of 16-bit samples at CSM's rate."""
    data = base64.b64encode(wav_file(samples, SAMPLE_RATE, {})).decode()
    return f"data:audio/wav;base64,{data}"


def spoken(folder: Path, text: str, seed: int, frames: int, *, ref: Any = None) -> Any:
    """Samples of ``generate``, int16; ``ref``: float32 samples of a recording, and its words."""
    from transformers import AutoProcessor, CsmForConditionalGeneration

    model = CsmForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder)
    messages = [{"role": "1", "content": [{"type": "text", "text": text}]}]
    if ref is not None:
        said = [{"type": "text", "text": ref[1]}, {"type": "audio", "path": ref[0]}]
        messages.insert(0, {"role": "1", "content": said})
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )
    torch.manual_seed(seed)
    (audio,) = model.generate(**inputs, max_new_tokens=frames, output_audio=True)
    return to_int16(audio.numpy())


@dataclass
class Csm:
    folder: Path
    running: Served
    client: openai.OpenAI

    def speak(self, text: str = TEXT, voice: str = "1", **more: Any) -> bytes:
        """16-bit samples."""
        asked: dict[str, Any] = {"model": str(self.folder), "response_format": "pcm"}
        made = self.client.audio.speech.create(input=text, voice=voice, extra_body=more, **asked)
        return made.read()


@pytest.fixture(scope="module")
def csm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Csm]:
    """Served; nothing is left of it in the end."""
    tmp_path = tmp_path_factory.mktemp("csm")
    folder = make_csm(tmp_path / "Tiny-CSM")
    with served(tmp_path, *omniq(folder)) as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            yield Csm(folder, running, client)
        assert running.stop() == []


@pytest.mark.timeout(240)
def test_a_csm_folder_speaks_while_it_still_makes_sound(csm: Csm) -> None:
    """The samples of transformers, by OpenAI's route; sound goes out before the model is done."""
    parameters = {"seed": 3, "max_tokens": FRAMES}
    samples = np.frombuffer(csm.speak(**parameters), "<i2")
    inputs = {"prompt": TEXT, "voice": "1"}
    body = {"pipeline": "tiny-csm", "input": inputs, "parameters": parameters}
    job = httpx.post(f"{csm.running.url}/v1/jobs", json=body).json()
    events: list[tuple[str, dict[str, Any]]] = []
    url = f"{csm.running.url}/v1/jobs/{job['id']}/events"
    with httpx.stream("GET", url, timeout=60) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                events.append((data["type"], data))
    with pytest.raises(openai.BadRequestError, match="must be a speaker's number"):
        csm.speak(voice="alloy")
    expected = spoken(csm.folder, TEXT, 3, FRAMES)
    assert samples.shape == expected.shape == (FRAMES * FRAME,)
    assert np.abs(samples.astype(int) - expected).max() <= 1
    kinds = [(kind, data.get("stage")) for kind, data in events]
    assert kinds.index(("stage.delta", "codec")) < kinds.index(("stage.succeeded", "ar"))
    assert kinds[-1][0] == "job.succeeded"


@pytest.mark.timeout(240)
def test_csm_speaks_in_the_voice_of_a_recording(
    csm: Csm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers with the recording and its words as context: by OpenAI's route, as a job with
    a data URL and with an upload, from Python and from the shell.
    """
    frames = 8
    recorded = to_int16(tone(SAMPLE_RATE, 3 * FRAME / SAMPLE_RATE))
    samples = recorded.astype(np.float32) / 32_768
    file = tmp_path / "voice.wav"
    file.write_bytes(wav_file(recorded, SAMPLE_RATE, {}))
    words = "a red circle"
    ref = {"ref_audio": wav_url(recorded), "ref_text": words}
    parameters = {"seed": 3, "max_tokens": frames}
    made: dict[str, Any] = {"speech": csm.speak(**parameters, **ref)}

    url, texts = f"{csm.running.url}/v1/generate", {"prompt": TEXT, "voice": "1", "ref_text": words}
    body: dict[str, Any] = {"pipeline": "tiny-csm", "parameters": parameters}
    answer = httpx.post(url, json={**body, "input": {**texts, **ref}}, timeout=60)
    made["data URL"] = answer.raise_for_status().content
    form = {"request": json.dumps({**body, "input": texts})}
    answer = httpx.post(url, data=form, files={"ref_audio": file.read_bytes()}, timeout=60)
    made["upload"] = answer.raise_for_status().content

    for name, value in csm.running.client_settings.items():
        monkeypatch.setenv(name, value)
    with fresh_settings(), OmniLLM("tiny-csm") as llm:
        for sound in (file, samples):
            (output,) = llm.generate({**texts, "ref_audio": sound}, parameters)
            made[f"Python, {type(sound).__name__}"] = output.audios[0].data
        with pytest.raises(InvalidRequest, match=r"input\.ref_text: required with ref_audio"):
            llm.generate({"prompt": TEXT, "ref_audio": file})
    inputs = [f"ref_audio={file}", f"ref_text={words}", "voice=1"]
    more = [word for pair in inputs for word in ("--input", pair)]
    more += ["--pipeline", "tiny-csm", "--seed", "3", "--param", f"max_tokens={frames}"]
    command = [sys.executable, "-m", "omniq", "generate", TEXT, *more]
    subprocess.run([*command, "-o", str(tmp_path / "said.wav")], check=True, timeout=60)
    made["shell"] = (tmp_path / "said.wav").read_bytes()

    expected = spoken(csm.folder, TEXT, 3, frames, ref=(samples, words))
    assert np.abs(expected.astype(int) - spoken(csm.folder, TEXT, 3, frames)).max() > 100
    for how, data in made.items():
        got = np.frombuffer(data, "<i2") if how == "speech" else av_samples(data)[0]
        assert got.shape == expected.shape, how
        assert np.abs(got.astype(int) - expected).max() <= 1, how


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ({"ref_audio": "data:,text"}, "ref_text: required with ref_audio"),
        ({"ref_text": "text"}, "ref_audio: required with ref_text"),
        ({"ref_audio": "data:,text", "ref_text": "text"}, "ref_audio: must be WAV"),
        ({"ref_audio": "voice.wav", "ref_text": "text"}, "ref_audio: must be a data: URL"),
        ({"ref_audio": 30.0, "ref_text": "text"}, "ref_audio: .* leave room in 256 positions"),
    ],
)
@pytest.mark.timeout(240)
def test_wrong_recordings_are_named(csm: Csm, ref: dict[str, Any], message: str) -> None:
    """``ref_audio`` that is a number: so many seconds."""
    if isinstance(ref.get("ref_audio"), float):
        ref = {**ref, "ref_audio": wav_url(to_int16(tone(SAMPLE_RATE, ref["ref_audio"])))}
    with pytest.raises(openai.BadRequestError, match=message):
        csm.speak(**ref)


@pytest.mark.timeout(240)
def test_a_glm_image_folder_draws_and_edits(tmp_path: Path) -> None:
    """With the pixels of diffusers' own pipeline, from text and from a picture."""
    folder = make_glm_image(tmp_path / "Tiny-GLM-Image")
    size = {"height": 64, "width": 64}
    overrides = {"ar": {"defaults": size}, "dit": {"defaults": size}}
    shown = Image.fromarray(picture(1, 64, 64).numpy())
    asked: dict[str, Any] = {
        "model": str(folder),
        "prompt": SIGN,
        "size": "96x64",
        "extra_body": {"seed": 5, "num_inference_steps": 3},
    }
    flags = ["--stage-overrides", json.dumps(overrides)]
    with served(tmp_path, *omniq(folder, *flags)) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        drawn = client.images.generate(**asked)
        edited = client.images.edit(**asked, image=("a.png", png(shown)))
        body = {
            "pipeline": "tiny-glm-image",
            "input": {"prompt": SIGN},
            "parameters": {"height": 72},
        }
        refused = httpx.post(f"{running.url}/v1/jobs", json=body)
        assert running.stop() == []
    assert refused.status_code == 422
    assert refused.json()["errors"] == [
        {"field": "parameters.height", "message": "must be a multiple of 32; got 72"}
    ]
    pipeline = whole_glm_image(folder)
    for made, more in ((drawn, {}), (edited, {"image": [shown]})):
        expected = pipeline(
            SIGN, height=64, width=96, num_inference_steps=3, output_type="np",
            generator=torch.Generator().manual_seed(5), **more,
        ).images[0]  # fmt: skip
        assert made.data is not None
        file = io.BytesIO(base64.b64decode(made.data[0].b64_json or ""))
        pixels = np.asarray(Image.open(file).convert("RGB")).astype(int)
        assert np.abs(pixels - (expected * 255).round().astype(int)).max() <= 1

"""`omniq serve FOLDER` of GLM-Image and CSM, asked by OpenAI's client."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from diffusion_helpers import picture
from PIL import Image
from served import served
from tiny_csm import FRAME, make_csm
from tiny_glm_image import make_glm_image, whole_glm_image

from omniq.outputs.sound import to_int16

TEXT = "a red circle above a blue square"
SIGN = "a sign that says 'HELLO'"
FRAMES = 150


def omniq(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "omniq", "serve", str(folder), "--dtype", "float32", *flags]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def spoken(folder: Path, text: str, seed: int, frames: int) -> Any:
    """Samples of ``generate``, int16."""
    from transformers import AutoProcessor, CsmForConditionalGeneration

    model = CsmForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder)
    messages = [{"role": "1", "content": [{"type": "text", "text": text}]}]
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )
    torch.manual_seed(seed)
    (audio,) = model.generate(**inputs, max_new_tokens=frames, output_audio=True)
    return to_int16(audio.numpy())


@pytest.mark.timeout(240)
def test_a_csm_folder_speaks_while_it_still_makes_sound(tmp_path: Path) -> None:
    """The samples of transformers, by OpenAI's route; sound goes out before the model is done."""
    folder = make_csm(tmp_path / "Tiny-CSM")
    with served(tmp_path, *omniq(folder)) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        sound = client.audio.speech.create(
            model=str(folder),
            voice="1",
            input=TEXT,
            response_format="pcm",
            extra_body={"seed": 3, "max_tokens": FRAMES},
        ).read()
        body = {
            "pipeline": "tiny-csm",
            "input": {"prompt": TEXT, "voice": "1"},
            "parameters": {"seed": 3, "max_tokens": FRAMES},
        }
        job = httpx.post(f"{running.url}/v1/jobs", json=body).json()
        events: list[tuple[str, dict[str, Any]]] = []
        url = f"{running.url}/v1/jobs/{job['id']}/events"
        with httpx.stream("GET", url, timeout=60) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    data = json.loads(line.removeprefix("data: "))
                    events.append((data["type"], data))
        with pytest.raises(openai.BadRequestError, match="must be a speaker's number"):
            client.audio.speech.create(model=str(folder), voice="alloy", input=TEXT)
        assert running.stop() == []
    expected = spoken(folder, TEXT, 3, FRAMES)
    samples = np.frombuffer(sound, "<i2")
    assert samples.shape == expected.shape == (FRAMES * FRAME,)
    assert np.abs(samples.astype(int) - expected).max() <= 1
    kinds = [(kind, data.get("stage")) for kind, data in events]
    assert kinds.index(("stage.delta", "codec")) < kinds.index(("stage.succeeded", "ar"))
    assert kinds[-1][0] == "job.succeeded"


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

"""`omniq serve FOLDER` of GLM-Image and CSM, asked by the scripts in `examples/`."""

from __future__ import annotations

import json
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from diffusion_helpers import picture, whole
from PIL import Image
from served import served
from tiny_csm import FRAME, SAMPLE_RATE, make_csm
from tiny_glm_image import WIDTH, make_glm_image

from omniq.outputs.sound import to_int16

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEXT = "a red circle above a blue square"
SIGN = "a sign that says 'HELLO'"
FRAMES = 150


def omniq(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "omniq", "serve", str(folder), "--dtype", "float32", *flags]


def example(name: str, url: str, *arguments: object) -> str:
    """What the script prints."""
    command = [sys.executable, EXAMPLES / name, *map(str, arguments), "--url", f"{url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    file = tmp_path / "said.wav"
    with served(tmp_path, *omniq(folder)) as running:
        printed = example(
            "speak.py", running.url, TEXT, file, "--voice", 1, "--seed", 3, "--max-tokens", FRAMES
        )
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
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="must be a speaker's number"):
            client.audio.speech.create(model=str(folder), voice="alloy", input=TEXT)
        assert running.stop() == []
    assert "first sound after" in printed
    expected = spoken(folder, TEXT, 3, FRAMES)
    with wave.open(str(file)) as sound:
        assert (sound.getframerate(), sound.getnchannels()) == (SAMPLE_RATE, 1)
        samples = np.frombuffer(sound.readframes(FRAMES * FRAME + 1), "<i2")
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
    drawn, shown, edited = (tmp_path / f"{n}.png" for n in ("drawn", "shown", "edited"))
    Image.fromarray(picture(1, 64, 64).numpy()).save(shown)
    ask = ("--size", "96x64", "--steps", 3, "--seed", 5)
    with served(tmp_path, *omniq(folder, "--stage-overrides", json.dumps(overrides))) as running:
        example("glm_image.py", running.url, SIGN, drawn, *ask)
        example("glm_image.py", running.url, SIGN, edited, *ask, "--image", shown)
        body = {
            "pipeline": "tiny-glm-image",
            "input": {"prompt": SIGN},
            "parameters": {"height": 72},
        }
        refused = httpx.post(f"{running.url}/v1/jobs", json=body)
        assert running.stop() == []
    assert refused.status_code == 422
    assert refused.json()["fields"] == [
        {"field": "parameters.height", "message": "must be a multiple of 32; got 72"}
    ]
    pipeline = whole(folder)
    own = pipeline.vision_language_encoder.get_image_tokens
    # See tests/engines/test_glm_image.py.
    pipeline.vision_language_encoder.get_image_tokens = lambda states, grids: own(
        list(states.split(WIDTH)), grids
    )
    for file, more in ((drawn, {}), (edited, {"image": [Image.open(shown).convert("RGB")]})):
        expected = pipeline(
            SIGN, height=64, width=96, num_inference_steps=3, output_type="np",
            generator=torch.Generator().manual_seed(5), **more,
        ).images[0]  # fmt: skip
        pixels = np.asarray(Image.open(file).convert("RGB")).astype(int)
        assert np.abs(pixels - (expected * 255).round().astype(int)).max() <= 1

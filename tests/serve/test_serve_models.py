"""`omniq serve FOLDER` of models that are no language models: pictures, videos, vectors."""

from __future__ import annotations

import base64
import importlib.util
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
from diffusion_helpers import picture, whole
from PIL import Image
from served import make_model, run_example, served
from tiny_families import make

PROMPT = "a red circle above a blue square"


def omniq(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "omniq", "serve", str(folder), *flags]


def small(**defaults: Any) -> str:
    """Overrides: warming up at the model's own size is too much for a test on a CPU."""
    size = {"height": 32, "width": 32, "num_inference_steps": 3, **defaults}
    return json.dumps({"dit": {"defaults": size}})


@pytest.mark.timeout(240)
def test_a_flux_folder_answers_openais_images_routes_and_jobs(tmp_path: Path) -> None:
    """With the pixels of diffusers' own pipeline, from text and from a picture."""
    folder = make("flux", tmp_path / "Tiny-FLUX")
    flags = ["--dtype", "float32", "--stage-overrides", small()]
    with served(tmp_path, *omniq(folder, *flags)) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        assert [m.id for m in client.models.list().data][:2] == [str(folder), "tiny-flux"]
        drawn = client.images.generate(
            model=str(folder), prompt=PROMPT, size="48x32", extra_body={"seed": 3}
        )
        job = {"pipeline": "tiny-flux", "input": {"prompt": PROMPT}}
        body = {**job, "parameters": {"seed": 3, "width": 48}}
        again = httpx.post(f"{running.url}/v1/generate", json=body, timeout=60)
        too_large = {**job, "parameters": {"width": 4096, "height": 34}}
        refused = httpx.post(f"{running.url}/v1/jobs", json=too_large)
        file = io.BytesIO()
        Image.fromarray(picture(1).numpy()).save(file, "PNG")
        file.seek(0)
        edited = client.images.edit(
            model="tiny-flux", image=("a.png", file), prompt=PROMPT, extra_body={"strength": 0.5}
        )
        files = [tmp_path / "a.png", tmp_path / "b.png"]
        for more in (["--size", "48x32", "-o", files[0]], ["--image", *files[:1], "-o", files[1]]):
            asked = [PROMPT, "--url", running.url, "--seed", "3", *more]
            run_example("openai_images.py", *asked)
        assert running.stop() == []
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(drawn.data[0].b64_json or ""))))
    generator = torch.Generator().manual_seed(3)
    expected = whole(folder)(
        PROMPT, height=32, width=48, num_inference_steps=3, generator=generator, output_type="np"
    ).images[0]
    assert np.abs(pixels.astype(int) - (expected * 255).round().astype(int)).max() <= 1
    for same in (io.BytesIO(again.content), files[0]):
        assert np.array_equal(np.asarray(Image.open(same)), pixels)
    assert Image.open(files[1]).size == (32, 32)
    assert refused.status_code == 422
    faults = {f["field"]: f["message"] for f in refused.json()["errors"]}
    assert faults == {
        "parameters.width": "must be at most 2048; got 4096",
        "parameters.height": "must be a multiple of 4; got 34",
    }
    shown = Image.open(io.BytesIO(base64.b64decode(edited.data[0].b64_json or "")))
    assert shown.size == (32, 32)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_wan_folder_makes_a_video_file_of_a_first_frame(tmp_path: Path) -> None:
    import av

    folder = make("wan22_i2v", tmp_path / "wan")
    flags = ["--dtype", "float32", "--stage-overrides", small(num_frames=5)]
    file = io.BytesIO()
    Image.fromarray(picture(1).numpy()).save(file, "PNG")
    with served(tmp_path, *omniq(folder, *flags)) as running:
        request = {"pipeline": "wan", "input": {"prompt": PROMPT}, "parameters": {"seed": 1}}
        answer = httpx.post(
            f"{running.url}/v1/generate",
            data={"request": json.dumps(request)},
            files={"image": file.getvalue()},
            timeout=60,
        )
        missing = httpx.post(f"{running.url}/v1/jobs", json=request)
        assert running.stop() == []
    assert answer.headers["content-type"] == "video/mp4"
    with av.open(io.BytesIO(answer.content)) as video:
        (stream,) = video.streams.video
        assert stream.average_rate == 16
        assert len(list(video.decode(stream))) == 5
    assert missing.json()["errors"] == [
        {"field": "input.image", "message": "required, but missing"}
    ]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")
def test_an_embedding_model_answers_the_embeddings_route(tmp_path: Path) -> None:
    """A folder as sentence-transformers writes it: the last token's state, normalised."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_model(tmp_path / "embedder")
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    (folder / "modules.json").write_text(json.dumps([module]))
    flags = ["--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "4"]
    with served(tmp_path, *omniq(folder, *flags), timeout=200) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        made = client.embeddings.create(model=str(folder), input=[PROMPT, "a star"])
        with pytest.raises(openai.BadRequestError, match="makes no text"):
            client.chat.completions.create(
                model=str(folder), messages=[{"role": "user", "content": "a"}]
            )
        assert running.stop() == []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for text, item in zip([PROMPT, "a star"], made.data, strict=True):
        with torch.no_grad():
            out = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        expected = torch.nn.functional.normalize(out.hidden_states[-1][0, -1], dim=0)
        torch.testing.assert_close(torch.tensor(item.embedding), expected, atol=2e-3, rtol=2e-3)

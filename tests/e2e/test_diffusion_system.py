"""Pictures in and out of a real system: Python and HTTP, against the stock pipelines."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from diffusion_helpers import picture, whole
from omniq_api.app import create_app
from openai_api import openai_client
from PIL import Image
from tiny_families import make

from omniq import AsyncOmniLLM
from omniq.config.loader import available_pipelines
from omniq.errors import InvalidRequest, JobFailed
from omniq.settings import get_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

PIPELINE = """
name: pictures
inputs:
  prompt: {{type: text}}
  image: {{type: image, required: false}}
  mask_image: {{type: image, required: false}}
  latents: {{type: latents, required: false}}
stages:
  - {{stage_id: encode, engine_type: encode, model: {model}, dtype: float32}}
  - stage_id: dit
    engine_type: DiT
    model: {model}
    dtype: float32
    max_in_flight: 8
    input_modalities: [image]
    defaults: {{height: 32, width: 32, num_inference_steps: 4, guidance_scale: 1.0}}
  - {{stage_id: decode, engine_type: decode, model: {model}, dtype: float32}}
edges:
  - {{from: input.prompt, to: encode.prompt}}
  - {{from: encode.condition, to: dit.condition}}
  - {{from: input.image, to: dit.image}}
  - {{from: input.mask_image, to: dit.mask_image}}
  - {{from: input.latents, to: dit.latents}}
  - {{from: dit.latents, to: decode.latents}}
outputs:
  image: {{from: decode.image, type: image}}
  latents: {{from: dit.latents, type: latents}}
"""
PROMPT = "a red circle above a blue square"
SIZE = {"height": 32, "width": 32, "num_inference_steps": 4, "guidance_scale": 1.0}
SHOWN = picture(3)
MASK = torch.zeros(32, 32, 3, dtype=torch.uint8)
MASK[:, 16:] = 255


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("flux", tmp_path_factory.mktemp("pictures") / "flux")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(model: Path) -> AsyncIterator[AsyncOmniLLM]:
    """A system of its own, shared by the tests of this module."""
    file = model.parent / "pictures.yaml"
    file.write_text(PIPELINE.format(model=model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIQ_PIPELINES", json.dumps([str(file)]))
        get_settings.cache_clear()
        available_pipelines.cache_clear()
        async with AsyncOmniLLM("pictures") as llm:
            yield llm
    get_settings.cache_clear()
    available_pipelines.cache_clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(llm: AsyncOmniLLM) -> AsyncIterator[httpx.AsyncClient]:
    """The API on the same system."""
    app = create_app()
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://api", timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def stock(model: Path) -> dict[str, Any]:
    """The stock pipelines by task."""
    from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting

    pipeline = whole(model)
    made = {
        "text": pipeline,
        "image": AutoPipelineForImage2Image.from_pipe(pipeline),
        "inpaint": AutoPipelineForInpainting.from_pipe(pipeline),
    }
    for each in made.values():
        each.set_progress_bar_config(disable=True)
    return made


def pil(pixels: torch.Tensor) -> Image.Image:
    return Image.fromarray(pixels.numpy())


def png(pixels: torch.Tensor) -> bytes:
    file = io.BytesIO()
    pil(pixels).save(file, "PNG")
    return file.getvalue()


def assert_same(found: Image.Image, pipeline: Any, seed: int, **arguments: Any) -> None:
    generator = torch.Generator().manual_seed(seed)
    made = pipeline(
        prompt=PROMPT, **{**SIZE, **arguments}, generator=generator, output_type="np"
    ).images[0]
    expected = (made * 255).round().astype(int)
    assert np.abs(np.asarray(found).astype(int) - expected).max() <= 1


async def test_a_picture_from_python(llm: AsyncOmniLLM, stock: dict[str, Any]) -> None:
    out = await llm.generate({"prompt": PROMPT, "image": pil(SHOWN)}, seed=5, strength=0.75)
    assert_same(out.images[0], stock["image"], 5, image=pil(SHOWN), strength=0.75)
    with pytest.raises(InvalidRequest, match=r"input\.image: no file that can be read"):
        await llm.generate({"prompt": PROMPT, "image": "nowhere.png"})


async def test_a_mask_over_http(http: httpx.AsyncClient, stock: dict[str, Any]) -> None:
    """By upload, answered with the picture; the result serves as the next request's picture."""
    request = {
        "pipeline": "pictures",
        "input": {"prompt": PROMPT},
        "parameters": {"seed": 6, "strength": 1.0},
    }
    files = {"image": ("a.png", png(SHOWN)), "mask_image": ("m.png", png(MASK))}
    answer = await http.post("/v1/generate", data={"request": json.dumps(request)}, files=files)
    assert answer.headers["content-type"] == "image/png", answer.text
    made = Image.open(io.BytesIO(answer.content))
    more = {"image": pil(SHOWN), "mask_image": pil(MASK), "strength": 1.0}
    assert_same(made, stock["inpaint"], 6, **more)
    url = answer.headers["content-location"]
    request["input"] = {"prompt": PROMPT, "image": url}
    request["parameters"] = {"seed": 7, "strength": 0.5}
    answer = await http.post("/v1/generate", json=request)
    assert_same(Image.open(io.BytesIO(answer.content)), stock["image"], 7, image=made, strength=0.5)


async def test_several_pictures_of_one_request(
    llm: AsyncOmniLLM, http: httpx.AsyncClient, stock: dict[str, Any]
) -> None:
    out = await llm.generate(PROMPT, seed=8, num_images_per_prompt=2)
    assert len(out.images) == 2
    for i, image in enumerate(out.images):
        assert_same(image, stock["text"], 8 + i)
        image.load()
        assert image.text["seed"] == str(8 + i)
    assert out.latents["latents"].shape[0] == 2
    job = (await http.get(f"/v1/jobs/{out.job_id}")).json()
    assert {a["name"] for a in job["artifacts"]} == {"image", "image-1", "latents"}
    answer = await http.get(f"/v1/jobs/{out.job_id}/artifacts/image-1")
    assert answer.content == out.artifacts["image-1"].data


async def test_previews_reach_clients(llm: AsyncOmniLLM, http: httpx.AsyncClient) -> None:
    """As they come, off by default, and the same in the event stream of the API."""
    steps = set()
    async for out in llm.stream(PROMPT, seed=1, num_inference_steps=6, preview_every=2):
        if 0 in out.previews:
            steps.add(out.previews[0].step)
            assert out.previews[0].image.size == (16, 16)
    assert out.finished
    # Those that are overtaken before they are written are dropped; the last one is not.
    assert 6 in steps and steps <= {2, 4, 6}
    events = (await http.get(f"/v1/jobs/{out.job_id}/events")).text
    assert events.count("event: stage.preview") == len(steps)
    assert "data:image/webp;base64," in events
    plain = await llm.generate(PROMPT, seed=1, num_inference_steps=6)
    assert "stage.preview" not in (await http.get(f"/v1/jobs/{plain.job_id}/events")).text
    assert plain.artifacts["image"].data.count(b"IDAT") == 1


async def test_latents_in_and_out(llm: AsyncOmniLLM, http: httpx.AsyncClient) -> None:
    """The seed's own noise gives the seed's result; a wrong shape names the right one."""
    expected = await llm.generate(PROMPT, seed=3)
    noise = torch.randn((1, 4, 16, 16), generator=torch.Generator().manual_seed(3))
    out = await llm.generate({"prompt": PROMPT, "latents": noise}, seed=99)
    assert np.allclose(out.latents["latents"], expected.latents["latents"], atol=1e-5)
    with pytest.raises(JobFailed, match=r"must be \[n, 4, 16, 16\] for 32 x 32 pixels"):
        await llm.generate({"prompt": PROMPT, "latents": noise[..., :8]})
    files = {"latents": ("l.safetensors", expected.artifacts["latents"].data)}
    request = {"pipeline": "pictures", "input": {"prompt": PROMPT}}
    answer = await http.post("/v1/jobs", data={"request": json.dumps(request)}, files=files)
    assert answer.json()["input"]["latents"] == {"dtype": "F32", "shape": [1, 4, 16, 16]}


async def test_schedulers_and_sigmas(
    llm: AsyncOmniLLM, http: httpx.AsyncClient, stock: dict[str, Any]
) -> None:
    """Reach the engine; what does not fit is refused with what does."""
    sigmas = [1.0, 0.7, 0.2]
    out = await llm.generate(PROMPT, seed=2, sigmas=sigmas, num_inference_steps=3)
    assert_same(out.images[0], stock["text"], 2, sigmas=sigmas, num_inference_steps=3)
    own = await llm.generate(PROMPT, seed=2)
    euler = await llm.generate(PROMPT, seed=2, scheduler="euler")
    assert np.array_equal(own.latents["latents"], euler.latents["latents"])
    for parameters, field, allowed in (
        ({"scheduler": "ddim"}, "parameters.scheduler", "'euler', 'heun', 'unipc' or 'dpmpp'"),
        ({"sigmas": [1.0, 0.5]}, "parameters.sigmas", "as many entries as num_inference_steps (4)"),
        ({"strength": 0.5}, "parameters.strength", "needs an input picture"),
        ({"height": 33}, "parameters.height", "multiple of 4"),
    ):
        body = {"pipeline": "pictures", "input": {"prompt": PROMPT}, "parameters": parameters}
        answer = await http.post("/v1/generate", json=body)
        assert answer.status_code == 422
        assert field in answer.json()["detail"] and allowed in answer.json()["detail"]


async def test_a_deadline_ends_a_long_run(llm: AsyncOmniLLM) -> None:
    with pytest.raises(JobFailed, match="deadline") as caught:
        await llm.generate(PROMPT, num_inference_steps=1000, timeout=1.0)
    assert caught.value.details["state"] == "expired"
    assert (await llm.generate(PROMPT, seed=1)).finished


async def test_openai_clients_edit_pictures(
    llm: AsyncOmniLLM, stock: dict[str, Any], tmp_path: Path
) -> None:
    """By the official client, each as the stock pipeline: a picture, a mask, faults of the engine.

    What is transparent in OpenAI's mask is white in diffusers'.
    """
    hole = pil(SHOWN).convert("RGBA")
    hole.putalpha(Image.fromarray(255 - MASK[..., 0].numpy()))
    file = io.BytesIO()
    hole.save(file, "PNG")

    def read(answer: openai.types.ImagesResponse) -> list[Image.Image]:
        return [Image.open(io.BytesIO(base64.b64decode(d.b64_json))) for d in answer.data]

    async with openai_client(tmp_path) as client:
        ask = partial(client.images.edit, model="pictures", prompt=PROMPT)
        answer = await ask(
            image=[png(SHOWN)], n=2, size="32x32", extra_body={"seed": 5, "strength": 0.75}
        )
        for i, found in enumerate(read(answer)):
            assert_same(found, stock["image"], 5 + i, image=pil(SHOWN), strength=0.75)
        answer = await ask(
            image=png(SHOWN), mask=file.getvalue(), extra_body={"seed": 6, "strength": 1.0}
        )
        more = {"image": pil(SHOWN), "mask_image": pil(MASK), "strength": 1.0}
        assert_same(read(answer)[0], stock["inpaint"], 6, **more)
        answer = await ask(image=png(SHOWN), output_format="jpeg", extra_body={"seed": 5})
        assert (read(answer)[0].format, answer.output_format) == ("JPEG", "jpeg")
        with pytest.raises(openai.BadRequestError, match="multiple of 4") as caught:
            await ask(image=png(SHOWN), size="33x33")
        assert caught.value.param == "size"

"""OpenAI's images routes: fields, formats, forms, errors; a played worker."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from api_support import PNG, PROMPT, begin, eventually, only_job, play, state_is, stored
from PIL import Image

from omniq.config import available_pipelines
from omniq.jobs.model import JobRecord, JobState
from omniq.jobs.store import JobStore
from omniq.settings import get_settings

PIPELINES = """
name: edit
inputs:
  prompt: {type: text}
  image: {type: image, max_items: 2, max_pixels: 5000}
  hole: {type: image, required: false}
stages:
  - stage_id: dit
    engine_type: DiT
    model: none
    limits: {num_images_per_prompt: {max: 2}, width: {max: 64}}
edges:
  - {from: input.prompt, to: dit.prompt}
  - {from: input.image, to: dit.image}
  - {from: input.hole, to: dit.mask_image}
outputs:
  latents: {from: dit.latents, type: latents}
  picture: {from: dit.image, type: image, format: webp}
"""
TEXT = """
name: lm
inputs: {prompt: {type: text}}
stages: [{stage_id: ar, engine_type: AR, model: none}]
edges: [{from: input.prompt, to: ar.prompt}]
outputs: {text: {from: ar.text, type: text}}
"""
GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
BODY = {"model": "tiny-omni", "prompt": PROMPT}
EDIT = {"model": "edit", "prompt": "make it red"}
FILE = ("image", ("a.png", PNG))


def png(mode: str, *, size: int = 64, alpha: tuple[int, ...] = (255,)) -> bytes:
    """A picture whose columns have these alphas, repeated."""
    image = Image.new(mode, (size, size))
    if mode == "RGBA":
        row = np.resize(np.array(alpha, np.uint8), size)
        image.putalpha(Image.fromarray(np.tile(row, (size, 1))))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(autouse=True)
def _pipelines(broker: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "edit.yaml").write_text(PIPELINES)
    (tmp_path / "lm.yaml").write_text(TEXT)
    monkeypatch.setenv("OMNIQ_PIPELINES", json.dumps([str(tmp_path)]))
    get_settings.cache_clear()
    available_pipelines.cache_clear()
    yield
    get_settings.cache_clear()
    available_pipelines.cache_clear()


def fault(response: httpx.Response) -> tuple[int, str | None, str]:
    """Status, param and message of an error in OpenAI's form."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["param"], error["message"]


async def played(client: httpx.AsyncClient, store: JobStore, **more: Any) -> dict[str, Any]:
    asking = asyncio.create_task(client.post(GENERATIONS, json={**BODY, **more}))
    await play(store, await only_job(store))
    response = await asking
    assert response.status_code == 200, response.text
    return dict(response.json())


@contextlib.asynccontextmanager
async def submitted(
    client: httpx.AsyncClient, store: JobStore, path: str, n: int = 1, **request: Any
) -> AsyncIterator[list[JobRecord]]:
    """The jobs that a request makes, oldest first; its client goes at the end."""
    asking = asyncio.create_task(client.post(path, **request))

    async def all_there() -> list[JobRecord] | None:
        assert not asking.done(), asking.result().text
        jobs, _ = await store.list()
        return jobs if len(jobs) == n else None

    jobs = await eventually(all_there, what=f"{n} jobs")
    yield [await store.get(job.id) for job in reversed(jobs)]
    asking.cancel()
    for job in jobs:
        await state_is(store, job.id, JobState.CANCELLED)


async def test_models_that_make_pictures_are_listed(client: httpx.AsyncClient) -> None:
    found = (await client.get("/v1/models")).json()["data"]
    assert [m["id"] for m in found] == ["tiny-omni", "edit", "lm"]
    answer = await client.post(GENERATIONS, json={**BODY, "model": "lm"})
    assert fault(answer) == (400, "model", "the model 'lm' makes no pictures")
    status, param, message = fault(await client.post(GENERATIONS, json={**BODY, "model": "x"}))
    assert (status, param) == (404, "model") and "available: tiny-omni, edit, lm" in message
    chat = {"model": "edit", "messages": [{"role": "user", "content": "x"}]}
    status, param, message = fault(await client.post("/v1/chat/completions", json=chat))
    assert (status, param) == (400, "model") and "/v1/images/generations" in message


async def test_the_answer_holds_the_picture(client: httpx.AsyncClient, store: JobStore) -> None:
    answer = await played(
        client, store, model=None, size="64x64", seed=3, user="me", quality="high", style=None
    )
    assert base64.b64decode(answer["data"][0].pop("b64_json")) == PNG
    job = await store.get(await only_job(store))
    assert answer == {
        "created": int(job.spec.created),
        "data": [{}],
        "background": "opaque",
        "output_format": "png",
        "size": "64x64",
    }
    assert job.spec.parameters["dit"]["seed"] == 3
    assert (job.spec.metadata, job.spec.inputs) == ({"user": "me"}, {"prompt": PROMPT})


async def test_an_address_instead_of_the_picture(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    answer = await played(client, store, response_format="url", output_format="png")
    url = answer["data"][0]["url"]
    assert url == f"http://api/v1/jobs/{await only_job(store)}/artifacts/image"
    assert (await client.get(url)).content == PNG


async def test_another_format_is_made_of_the_file(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    """With the same facts in it, and the quality asked for."""
    answer = await played(client, store, output_format="webp", output_compression=40, seed=7)
    data = base64.b64decode(answer["data"][0]["b64_json"])
    assert answer["output_format"] == "webp"
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "WEBP"
        exif = image.getexif().get_ifd(0x8769)[0x9286]
        assert json.loads(bytes(exif)[8:])["seed"] == 7
        close = np.abs(np.asarray(image.convert("RGB")).astype(int) - [200, 30, 30])
    assert close.max() < 8


async def test_more_pictures_than_one_job_may_make_are_jobs(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    """Which use the seeds that one job would use."""
    form = {**EDIT, "n": "3", "seed": "5"}
    async with submitted(client, store, EDITS, 3, data=form, files=[FILE]) as jobs:
        pass
    assert [j.spec.parameters["dit"]["seed"] for j in jobs] == [5, 6, 7]
    assert {j.spec.parameters["dit"]["num_images_per_prompt"] for j in jobs} == {1}


async def test_pictures_that_one_job_can_make_are_one_job(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    async with submitted(client, store, GENERATIONS, json={**BODY, "n": 4}) as (job,):
        pass
    assert job.spec.parameters["dit"]["num_images_per_prompt"] == 4


async def test_a_client_that_goes_cancels_a_running_job(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    asking = asyncio.create_task(client.post(GENERATIONS, json=BODY))
    job = await only_job(store)
    await begin(store, job, "ar")
    asking.cancel()
    await state_is(store, job, JobState.CANCELLING)


async def test_values_of_a_form_get_their_types(client: httpx.AsyncClient, store: JobStore) -> None:
    """As OpenAI's client writes numbers, lists and objects; texts stay texts."""
    form = {
        **EDIT,
        "prompt": "123",
        "size": "48x32",
        "num_inference_steps": "3",
        "sigmas[]": ["1.0", "0.5", "0.2"],
        "lora[one]": "0.5",
        "use_cache": "false",
        "scheduler": "euler",
        "dit[guidance_scale]": "2.5",
    }
    async with submitted(client, store, EDITS, data=form, files=[FILE]) as (job,):
        pass
    found = job.spec.parameters["dit"]
    found.pop("seed")
    assert found == {
        "height": 32,
        "width": 48,
        "num_inference_steps": 3,
        "sigmas": [1.0, 0.5, 0.2],
        "lora": {"one": 0.5},
        "use_cache": False,
        "scheduler": "euler",
        "guidance_scale": 2.5,
    }
    assert job.spec.inputs == {"prompt": "123", "image": [{"width": 64, "height": 64}]}


@pytest.mark.parametrize("name", ["image[]", "image"])
async def test_several_pictures(client: httpx.AsyncClient, store: JobStore, name: str) -> None:
    files = [(name, ("a.png", PNG)), (name, ("b.png", png("RGB", size=32)))]
    async with submitted(client, store, EDITS, data=EDIT, files=files) as (job,):
        found = await stored(store, job.id)
    assert [p.shape for p in found.values()] == [(64, 64, 3), (32, 32, 3)]


async def test_what_is_transparent_in_the_mask_is_white_for_the_stages(
    client: httpx.AsyncClient, store: JobStore
) -> None:
    mask = ("mask", ("m.png", png("RGBA", alpha=(0, 1, 255, 0))))
    async with submitted(client, store, EDITS, data=EDIT, files=[FILE, mask]) as (job,):
        (found,) = (await stored(store, job.id, "hole")).values()
    assert found.shape == (64, 64, 3)
    assert found[5, :5, 0].tolist() == [255, 0, 0, 255, 255]
    assert np.isin(found, (0, 255)).all()


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"prompt": 3}, "prompt", "valid string"),
        ({"prompt": " "}, "prompt", "must not be blank"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 11}, "n", "less than or equal to 10"),
        ({"n": "2"}, "n", "valid integer"),
        ({"n": 2, "num_images_per_prompt": 2}, "n", "is given twice"),
        ({"size": "large"}, "size", "should match pattern"),
        ({"size": "1024x1024"}, "size", "must be at most 64"),
        ({"size": "64x64", "width": 64}, "size", "is given twice, also as width"),
        ({"response_format": "file"}, "response_format", "'b64_json' or 'url'"),
        ({"output_format": "gif"}, "output_format", "'png', 'jpeg' or 'webp'"),
        ({"output_format": "jpeg", "response_format": "url"}, "output_format", "must be png"),
        ({"output_compression": 50}, "output_compression", "jpeg or webp only"),
        ({"background": "transparent"}, "background", "'auto' or 'opaque'"),
        ({"quality": "best"}, "quality", "'auto'"),
        ({"stream": True}, "stream", "should be False"),
        ({"partial_images": 2}, "partial_images", "should be 0"),
        ({"num_inference_steps": 1000}, "num_inference_steps", "must be at most 100"),
        ({"complexity": "high"}, "complexity", "unknown parameter"),
        ({"dit": {"seed": -1}}, "dit.seed", "greater than or equal to 0"),
    ],
)
async def test_faulty_fields_are_named(
    client: httpx.AsyncClient, store: JobStore, more: dict[str, Any], param: str, message: str
) -> None:
    status, named, text = fault(await client.post(GENERATIONS, json={**BODY, **more}))
    assert (status, named) == (400, param)
    assert text.count(message) == 1
    assert (await store.list())[0] == []


MASK = ("mask", ("m.png", png("RGBA", alpha=(0,))))


@pytest.mark.parametrize(
    ("more", "files", "fault_of"),
    [
        ({}, [("other", ("a.png", PNG))], ("other", "files are image and mask")),
        ({"image": "a.png"}, [MASK], ("image", "must be a file")),
        ({}, [MASK], ("image", "required, but missing")),
        ({"model": "tiny-omni"}, [FILE], ("image", "takes no pictures")),
        ({"n": "two"}, [FILE], ("n", "valid integer")),
        ({"seed": "x"}, [FILE], ("seed", "valid integer")),
        ({"size": "65x32"}, [FILE], ("size", "must be at most 64")),
        ({"prompt[a]": "x"}, [FILE], ("prompt[a]", "is given twice")),
        ({}, [FILE] * 3, ("image", "must have 1 to 2 pictures, has 3")),
        ({}, [FILE, ("image", ("b.png", b"x"))], ("image.1", "PNG, JPEG, WEBP")),
        ({}, [("image", ("a.png", png("RGB", size=99)))], ("image", "at most 5000 pixels")),
        ({}, [FILE, ("mask", ("m.png", b"x"))], ("mask", "PNG, JPEG, WEBP")),
        ({}, [FILE, ("mask", ("m.png", png("RGB")))], ("mask", "alpha channel")),
        ({}, [FILE, ("mask", ("m.png", png("RGBA", size=32)))], ("mask", "size, 64x64; has 32x32")),
        ({}, [FILE, MASK, MASK], ("mask", "is given twice")),
    ],
)
async def test_faulty_forms_are_named(
    client: httpx.AsyncClient,
    store: JobStore,
    more: dict[str, str],
    files: list[Any],
    fault_of: tuple[str, str],
) -> None:
    answer = await client.post(EDITS, data={**EDIT, **more}, files=files)
    status, named, text = fault(answer)
    assert (status, named) == (400, fault_of[0]), text
    assert fault_of[1] in text
    assert (await store.list())[0] == []
    assert await store.redis.keys("omniq:blob:*") == []


async def test_edits_are_forms_only(client: httpx.AsyncClient) -> None:
    status, param, message = fault(await client.post(EDITS, json=EDIT))
    assert (status, param) == (415, "Content-Type")
    assert "multipart/form-data" in message
    broken = {"content": b"--x", "headers": {"content-type": "multipart/form-data"}}
    assert fault(await client.post(EDITS, **broken))[0] == 400
    document = (await client.get("/openapi.json")).json()["paths"][EDITS]["post"]
    assert set(document["requestBody"]["content"]) == {"multipart/form-data"}


async def test_a_picture_that_generations_lack_is_named(client: httpx.AsyncClient) -> None:
    answer = await client.post(GENERATIONS, json={**BODY, "model": "edit"})
    assert fault(answer) == (400, "image", "image: required, but missing")

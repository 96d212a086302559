"""Jobs through the real pipeline: right pictures, equal to the monolith, and safe from a kill."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from flower_process import flower
from openai_api import openai_client
from PIL import Image
from tiny_omni.captioner import write_caption
from tiny_omni.evaluate import load_pipeline, paint
from tiny_omni.score import Tally, score_picture
from tiny_omni.shapes import fill, held_out_cases, parse, parse_caption

from omniq.jobs.model import JobRecord, JobState, StageState
from omniq.jobs.store import JobStore
from omniq.submit import submit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MODEL = Path(__file__).resolve().parents[2] / "omniq" / "models" / "tiny_omni"


async def send(store: JobStore, prompt: str, **parameters: Any) -> JobRecord:
    return await submit(
        store, pipeline="tiny-omni", inputs={"prompt": prompt}, parameters=parameters
    )


async def result(store: JobStore, job: JobRecord) -> tuple[JobRecord, Image.Image]:
    record = await store.wait(job.id, 120)
    assert record.state is JobState.SUCCEEDED, record
    data, info = await store.get_artifact(job.id, "image")
    assert info.content_type == "image/png"
    return record, Image.open(io.BytesIO(data))


async def test_32_jobs_at_once_all_become_the_right_pictures(jobs: JobStore) -> None:
    cases = held_out_cases(32, seed=3)
    sent = await asyncio.gather(
        *(send(jobs, prompt, seed=i) for i, (prompt, _) in enumerate(cases))
    )
    tally = Tally()
    for (prompt, _), job in zip(cases, sent, strict=True):
        record, image = await result(jobs, job)
        asked, written = parse(prompt), parse_caption(record.values["text"])
        assert asked is not None and written is not None, record.values["text"]
        tally.add(score_picture(image, fill(asked, written)))
    accuracy = tally.accuracy()
    assert accuracy["overall"] >= 0.95, accuracy


async def test_stages_work_on_different_jobs_at_the_same_time(jobs: JobStore) -> None:
    """While the DiT denoises one job, the AR stage works on another one."""
    first = await send(jobs, "a red circle above a blue square", num_inference_steps=100)
    async for event in jobs.events(first.id):
        if event is not None and event.type == "stage.progress" and event.stage == "dit":
            break
    second = await send(jobs, "a blue square")
    ahead, behind = [(await result(jobs, job))[0].stages for job in (first, second)]
    dit, ar = ahead["dit"], behind["ar"]
    assert dit.started and dit.finished and ar.started and ar.finished
    assert dit.started < ar.started < ar.finished < dit.finished


async def test_the_staged_picture_equals_the_monolithic_one(jobs: JobStore) -> None:
    """Same weights, same seed: stock transformers and diffusers in one process, pixel for pixel."""
    pipeline = await asyncio.to_thread(load_pipeline, MODEL)
    for prompt, seed, guidance in (
        ("a red circle above a blue square", 11, 1.0),
        ("two pink triangles", 12, 0.0),
    ):
        job = await send(jobs, prompt, seed=seed, guidance_scale=guidance, temperature=0.0)
        record, image = await result(jobs, job)
        written = write_caption(pipeline.text_encoder, pipeline.tokenizer, prompt)
        assert record.values["text"] == written.text
        with torch.no_grad():
            (expected,) = paint(pipeline, [written.rows], [seed], guidance, 20)
        assert (np.asarray(image) == np.asarray(expected)).all()


async def test_a_seed_gives_one_picture_whatever_else_is_in_flight(jobs: JobStore) -> None:
    """The same words, and pixels within one rounding step: batches add up in another order."""
    record, picture = await result(jobs, await send(jobs, "a purple ring", seed=5))
    alone = np.asarray(picture, np.int16)
    sent = [await send(jobs, "a purple ring", seed=s) for s in (4, 5, 6, 5)]
    found = [await result(jobs, job) for job in sent]
    images = [np.asarray(image, np.int16) for _, image in found]
    assert found[1][0].values["text"] == found[3][0].values["text"] == record.values["text"]
    assert abs(images[1] - alone).max() <= 1
    assert abs(images[3] - alone).max() <= 1
    assert abs(images[0] - images[1]).max() > 50


async def test_a_killed_dit_worker_loses_no_job(jobs: JobStore, tiny_omni: Any) -> None:
    sent = [await send(jobs, "a green star", num_inference_steps=100, seed=i) for i in range(3)]

    async def denoising() -> bool:
        stage = (await jobs.get(sent[0].id)).stages["dit"]
        return stage.state is StageState.RUNNING and (stage.step or 0) > 3

    while not await denoising():
        await asyncio.sleep(0.02)
    await asyncio.to_thread(tiny_omni.kill, "dit")
    assert not (await jobs.get(sent[0].id)).state.final
    began = time.monotonic()
    await asyncio.to_thread(tiny_omni.start, "dit")
    records = [(await result(jobs, job))[0] for job in sent]
    print(f"all done {time.monotonic() - began:.1f} s after the restart began")
    assert records[0].stages["dit"].attempts == 2
    assert [r.stages["ar"].attempts for r in records] == [1, 1, 1]


async def test_cancelling_stops_the_denoising(jobs: JobStore) -> None:
    job = await send(jobs, "a green star", num_inference_steps=100)
    async for event in jobs.events(job.id):
        if event is not None and event.type == "stage.progress" and event.stage == "dit":
            break
    await jobs.cancel(job.id)
    record = await jobs.wait(job.id, 10)
    assert record.state is JobState.CANCELLED
    assert (record.stages["dit"].step or 0) < 90
    assert record.stages["decode"].attempts == 0


async def test_flower_shows_workers_queues_and_readable_tasks(
    jobs: JobStore, tiny_omni: Any, tmp_path: Path
) -> None:
    with flower(tmp_path, tiny_omni.url) as (url, auth):
        async with httpx.AsyncClient(base_url=url, auth=auth, timeout=20) as client:
            names: set[str] = set()
            for _ in range(100):  # it learns of workers by their heartbeats
                names = set((await client.get("/api/workers?refresh=1")).json())
                if len(names) == 3:
                    break
                await asyncio.sleep(0.2)
            assert {n.rsplit(".", 1)[0] for n in names} == {
                "tiny-omni.ar", "tiny-omni.dit", "tiny-omni.decode",
            }  # fmt: skip
            job = await send(jobs, "a blue heart")
            await result(jobs, job)
            tasks: list[dict[str, Any]] = []
            for _ in range(100):
                tasks = list((await client.get("/api/tasks")).json().values())
                if sum(t["state"] == "SUCCESS" and job.id in t["uuid"] for t in tasks) == 3:
                    break
                await asyncio.sleep(0.1)
            mine = {t["uuid"].partition(".")[2]: t for t in tasks if job.id in t["uuid"]}
            assert set(mine) == {"ar", "dit", "decode"}
            for stage, task in mine.items():
                assert task["state"] == "SUCCESS"
                assert f"stage={stage}" in task["kwargs"] and "a blue heart" in task["kwargs"]
            page = (await client.get("/tasks")).text
            assert "omniq" in page.lower() or "flower" in page.lower()
            queues = (await client.get("/broker")).text
            assert "omniq.tiny-omni.dit" in queues


async def test_openai_clients_get_pictures(jobs: JobStore, tmp_path: Path) -> None:
    """Generations by the official client: what they ask for, and the same as a job of that seed."""
    prompt = "a red circle above a blue square"
    _, expected = await result(jobs, await send(jobs, prompt, seed=11, temperature=0.0))
    async with openai_client(tmp_path) as client:
        assert "tiny-omni" in [m.id async for m in client.models.list()]
        two = await client.images.generate(
            model="tiny-omni",
            prompt=prompt,
            n=2,
            size="64x64",
            quality="auto",
            extra_body={"seed": 11, "temperature": 0.0},
        )
        first, second = (Image.open(io.BytesIO(base64.b64decode(d.b64_json))) for d in two.data)
        assert np.array_equal(first, expected) and not np.array_equal(first, second)
        assert (two.size, two.output_format, first.text["seed"]) == ("64x64", "png", "11")
        one = await client.images.generate(
            prompt=prompt, response_format="url", extra_body={"seed": 11, "temperature": 0.0}
        )
        async with httpx.AsyncClient() as http:
            answer = await http.get(one.data[0].url)
        assert np.array_equal(Image.open(io.BytesIO(answer.content)), expected)
        with pytest.raises(openai.BadRequestError, match="at most 64") as caught:
            await client.images.generate(model="tiny-omni", prompt=prompt, size="1024x1024")
        assert (caught.value.param, caught.value.code) == ("size", "invalid_request")
        long = {"num_inference_steps": 100, "seed": 77}
        asking = asyncio.create_task(client.images.generate(prompt=prompt, n=10, extra_body=long))
        while (newest := (await jobs.list(limit=1))[0][0]).spec.parameters["dit"]["seed"] != 77:
            assert not asking.done(), asking.result()
            await asyncio.sleep(0.01)
        asking.cancel()
        assert (await jobs.wait(newest.id, 60)).state is JobState.CANCELLED

"""A batch of pictures takes the memory of a few of them, not of all."""

from __future__ import annotations

import asyncio
import gc
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from omniq import AsyncOmniLLM
from omniq.config import available_pipelines
from omniq.inputs import InputFile
from omniq.jobs.store import JobStore
from omniq.settings import get_settings

PIPELINE = """
name: edit
inputs: {image: {type: image}}
stages: [{stage_id: dit, engine_type: DiT, model: none, output_modalities: [image]}]
edges: [{from: input.image, to: dit.image}]
outputs: {image: {from: dit.image, type: image}}
"""


@pytest.fixture
async def edit(broker: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncOmniLLM:
    (tmp_path / "edit.yaml").write_text(PIPELINE)
    monkeypatch.setenv("OMNIQ_PIPELINES", json.dumps([str(tmp_path / "edit.yaml")]))
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()
    return AsyncOmniLLM("edit", broker_url=get_settings().url)


def picture(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (number, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


async def test_pictures_are_read_as_there_is_room_for_their_jobs(
    edit: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIQ_MAX_WAITING_INPUT_BYTES", str(3 * 64 * 64 * 3 + 4096))
    get_settings.cache_clear()
    store = JobStore.from_settings()
    async with edit:
        submits = [
            asyncio.create_task(edit.submit({"image": picture(i)}, patient=True)) for i in range(12)
        ]
        seen, most = 0, 0
        while not all(s.done() for s in submits):
            gc.collect()
            most = max(most, sum(type(o) is InputFile for o in gc.get_objects()))
            jobs, _ = await store.list(limit=200)
            waiting = [j for j in jobs if not j.state.final]
            seen = max(seen, len(waiting))
            for job in waiting:
                await store.cancel(job.id)
            await asyncio.sleep(0.05)
        assert len({await s for s in submits}) == 12
        assert 0 < seen <= 3
        assert most <= 4, "so many are in memory at most"
        for job in (await store.list(limit=200))[0]:
            await store.cancel(job.id)
    assert await store.redis.keys("omniq:blob:*") == []
    assert int(await store.redis.get("omniq:inputs:bytes")) == 0
    await store.close()

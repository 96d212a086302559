"""What omniq's API is measured against: a route that does nothing, and what most people write."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator

import redis.asyncio
from celery import Celery
from fastapi import FastAPI
from omniq_api.schemas import JobRequest
from starlette.responses import StreamingResponse

URL = os.environ["OMNIQ_BROKER_URL"]
app = FastAPI()
celery = Celery("front", broker=URL, backend=URL)
celery.conf.task_default_queue = "front"
client = redis.asyncio.Redis.from_url(URL, max_connections=10_000)


@celery.task(name="front.generate")
def generate(body: dict[str, object]) -> None:
    """Never run here."""


def _accepted(job_id: str) -> dict[str, object]:
    path = f"/v1/jobs/{job_id}"
    return {"id": job_id, "state": "queued", "urls": {"self": path, "events": f"{path}/events"}}


@app.post("/noop", status_code=202)
async def noop(body: JobRequest) -> dict[str, object]:
    """Take a job's JSON, check it, and forget it."""
    return _accepted(uuid.uuid4().hex)


@app.post("/celery", status_code=202)
def stock_celery(body: JobRequest) -> dict[str, object]:
    """Publish one task as Celery's documentation shows it."""
    return _accepted(generate.apply_async((body.model_dump(),)).id)


@app.get("/xread/{stream}")
async def xread(stream: str) -> StreamingResponse:
    """Follow a Redis stream by a blocking read of its own."""

    async def follow() -> AsyncIterator[bytes]:
        last = "0"
        while True:
            found = await client.xread({stream: last}, block=15_000)
            for _, entries in found.items() if isinstance(found, dict) else found:
                flat = entries[0] if entries and isinstance(entries[0], list) else entries
                for entry, fields in flat:
                    last = entry.decode()
                    yield b"id: %b\ndata: %b\n\n" % (entry, fields[b"data"])

    return StreamingResponse(follow(), media_type="text/event-stream")

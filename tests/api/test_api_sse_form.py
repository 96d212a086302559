"""The event stream's wire format, heartbeats and early end."""

from __future__ import annotations

import asyncio
import time

import pytest
from api_support import parse_sse
from omniq_api.sse import check_event_id, encode, stream

from omniq.config import get_pipeline
from omniq.job_request import checked_request
from omniq.jobs.model import JobEvent
from omniq.jobs.store import JobStore


async def queued_job(store: JobStore) -> str:
    pipeline = get_pipeline("tiny-omni")
    spec = checked_request(pipeline, {"prompt": "x"}, {}).job(await store.clock.now())
    await store.create(spec, {s: pipeline.upstream(s) for s in spec.stages})
    return spec.id


def test_line_breaks_and_any_unicode_survive_the_wire() -> None:
    value = "one\ntwo\r\nthree\n\nevent: fake\u2028 ☃"
    event = JobEvent(id="1-0", type="stage.delta", stage="ar", time=1.5, data={"value": value})
    (parsed,) = parse_sse(encode(event).decode())
    assert (parsed.id, parsed.type) == ("1-0", "stage.delta")
    assert parsed.data == {
        "type": "stage.delta",
        "stage": "ar",
        "time": 1.5,
        "data": {"value": value},
    }


async def test_silence_is_filled_with_heartbeat_comments(store: JobStore) -> None:
    events = store.events(await queued_job(store), block=0.05)
    body = stream(events)
    pieces = [await anext(body) for _ in range(4)]
    await body.aclose()
    assert pieces[0].startswith(b"retry: ")
    assert b"event: job.queued" in pieces[1]
    assert pieces[2:] == [b": heartbeat\n\n"] * 2


async def test_a_stream_ends_as_soon_as_the_server_stops(store: JobStore) -> None:
    body = stream(store.events(await queued_job(store), block=30))
    for _ in range(2):
        await anext(body)
    asyncio.get_running_loop().call_later(0.1, store.stop_watching)
    begun = time.monotonic()
    assert [piece async for piece in body] == []
    assert time.monotonic() - begun < 1


@pytest.mark.parametrize("value", ["0", "1-0", f"{2**64 - 1}-{2**64 - 1}"])
def test_ids_that_redis_takes_are_taken(value: str) -> None:
    assert check_event_id(value) == value

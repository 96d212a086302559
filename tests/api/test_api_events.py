"""Watching a job: server-sent events and long polls, over real connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import httpx
import pytest
from api_support import (
    BODY,
    ApiServer,
    Sse,
    begin,
    eventually,
    parse_sse,
    play,
    problem,
    serving,
    watching_connections,
)
from redis.asyncio import Redis

from omniq.jobs.store import JobStore

FULL_STORY = [
    "job.queued",
    "job.started",
    "stage.started",
    "stage.delta",
    "stage.succeeded",
    "stage.started",
    "stage.progress",
    "stage.progress",
    "stage.progress",
    "stage.succeeded",
    "stage.started",
    "stage.succeeded",
    "job.succeeded",
]


async def submit(http: httpx.AsyncClient) -> str:
    return str((await http.post("/v1/jobs", json=BODY)).json()["id"])


async def watch(http: httpx.AsyncClient, job_id: str, after: str | None = None) -> list[Sse]:
    """All events of a stream, up to its end."""
    headers = {"last-event-id": after} if after else {}
    response = await http.get(f"/v1/jobs/{job_id}/events", headers=headers)
    assert response.status_code in {200, 204}, response.text
    return parse_sse(response.text)


async def watch_noting(
    http: httpx.AsyncClient, job_id: str, number: int, begun: set[int]
) -> list[Sse]:
    """As ``watch``, adding ``number`` to ``begun`` with the first event."""
    text = ""
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        async for piece in response.aiter_text():
            text += piece
            if parse_sse(text):
                begun.add(number)
    return parse_sse(text)


async def read_some(http: httpx.AsyncClient, job_id: str, after: str | None, n: int) -> list[Sse]:
    """The first ``n`` events behind ``after``, then hang up."""
    headers = {"last-event-id": after} if after else {}
    text = ""
    async with http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
        async for piece in response.aiter_text():
            text += piece
            if len(events := parse_sse(text)) >= n:
                return events[:n]
    return parse_sse(text)


def watching(aredis: Redis, n: int) -> Callable[[], Awaitable[bool]]:
    """Whether so many servers watch anything: each does by one connection, while it must."""

    async def reached() -> bool:
        return await watching_connections(aredis) == n

    return reached


async def test_a_stream_tells_the_whole_story_and_ends(
    http: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(http)
    following = asyncio.create_task(watch(http, job_id))
    await play(store, job_id, pause=0.02)
    events = await asyncio.wait_for(following, 5)
    assert [e.type for e in events] == FULL_STORY
    assert [e.data["type"] for e in events] == FULL_STORY
    assert [e.data["data"]["step"] for e in events if e.type == "stage.progress"] == [1, 2, 3]
    assert events[3].data["stage"] == "ar"
    assert events[3].data["data"] == {"output": "text", "value": "A red"}
    assert len({e.id for e in events}) == len(events)


async def test_events_arrive_when_they_happen(http: httpx.AsyncClient, store: JobStore) -> None:
    job_id = await submit(http)
    await begin(store, job_id, "ar")
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-accel-buffering"] == "no"
        pieces = response.aiter_text()
        text = ""
        while len(parse_sse(text)) < 3:
            text += await anext(pieces)
        begun = time.monotonic()
        await store.cancel(job_id)
        while parse_sse(text)[-1].type != "job.cancelling":
            text += await anext(pieces)
        assert time.monotonic() - begun < 0.5


async def test_resuming_at_any_event_leaves_no_gap_and_no_repeat(
    http: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(http)
    await play(store, job_id)
    whole = await watch(http, job_id)
    for position in range(len(whole)):
        assert await watch(http, job_id, whole[position].id) == whole[position + 1 :]


async def test_a_client_that_hangs_up_after_every_event_sees_each_exactly_once(
    http: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(http)
    playing = asyncio.create_task(play(store, job_id, steps=20, pause=0.01))
    seen: list[Sse] = []
    while not seen or seen[-1].type != "job.succeeded":
        seen += await read_some(http, job_id, seen[-1].id if seen else None, 1)
    await playing
    assert seen == await watch(http, job_id)


async def test_resuming_behind_the_final_event_tells_browsers_to_stop(
    http: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(http)
    await play(store, job_id)
    last = (await watch(http, job_id))[-1]
    response = await http.get(f"/v1/jobs/{job_id}/events", headers={"last-event-id": last.id})
    assert response.status_code == 204


async def test_a_client_that_hangs_up_frees_what_it_held(
    http: httpx.AsyncClient, aredis: Redis
) -> None:
    job_id = await submit(http)
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        pieces = response.aiter_text()
        await anext(pieces)
        await eventually(watching(aredis, 1), what="one watcher")
    await eventually(watching(aredis, 0), 3, what="no watcher")


async def test_a_long_poll_that_hangs_up_frees_what_it_held(
    http: httpx.AsyncClient, aredis: Redis
) -> None:
    job_id = await submit(http)
    with pytest.raises(httpx.ReadTimeout):
        await http.get(f"/v1/jobs/{job_id}?wait=60", timeout=0.5)
    await eventually(watching(aredis, 0), 3, what="no watcher")


async def test_two_hundred_clients_watch_at_once(
    server: ApiServer, store: JobStore, aredis: Redis
) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
        job_id = await submit(http)
        begun: set[int] = set()
        clients = [asyncio.create_task(watch_noting(http, job_id, i, begun)) for i in range(200)]

        async def all_watch() -> bool:
            return len(begun) == 200

        await eventually(all_watch, 30, what="200 watchers")
        assert await watching_connections(aredis) == 1
        assert len(await aredis.client_list()) < 10
        assert (await http.get("/health")).status_code == 200
        await play(store, job_id)
        stories = await asyncio.gather(*clients)
    assert all([e.type for e in story] == FULL_STORY for story in stories)
    await eventually(watching(aredis, 0), what="no watcher")


async def test_a_long_poll_wakes_at_once(http: httpx.AsyncClient, store: JobStore) -> None:
    job_id = await submit(http)
    polling = asyncio.create_task(http.get(f"/v1/jobs/{job_id}?wait=30"))
    await asyncio.sleep(0.3)
    assert not polling.done()
    await play(store, job_id)
    finished = time.monotonic()
    response = await polling
    assert response.json()["state"] == "succeeded"
    assert time.monotonic() - finished < 0.5


async def test_a_long_poll_does_not_poll_the_broker(http: httpx.AsyncClient, aredis: Redis) -> None:
    job_id = await submit(http)
    before = (await aredis.info("stats"))["total_commands_processed"]
    response = await http.get(f"/v1/jobs/{job_id}?wait=1.5")
    commands = (await aredis.info("stats"))["total_commands_processed"] - before
    assert response.json()["state"] == "queued"
    assert commands < 30


async def test_a_long_poll_that_is_over_answers_with_the_present_state(
    http: httpx.AsyncClient, store: JobStore
) -> None:
    job_id = await submit(http)
    await begin(store, job_id, "ar")
    begun = time.monotonic()
    response = await http.get(f"/v1/jobs/{job_id}?wait=0.4")
    assert response.json()["state"] == "running"
    assert 0.35 < time.monotonic() - begun < 2


async def test_submitting_with_wait_answers_200_when_the_job_has_ended(
    http: httpx.AsyncClient, store: JobStore, aredis: Redis
) -> None:
    posting = asyncio.create_task(http.post("/v1/jobs?wait=30", json=BODY))
    await eventually(watching(aredis, 1))
    jobs, _ = await store.list()
    await play(store, jobs[0].id)
    response = await posting
    assert (response.status_code, response.json()["state"]) == (200, "succeeded")
    late = await http.post("/v1/jobs?wait=0.2", json=BODY)
    assert (late.status_code, late.json()["state"]) == (202, "queued")


@pytest.fixture
def replica(broker: object) -> Iterator[ApiServer]:
    with serving() as server:
        yield server


async def test_replicas_are_interchangeable(
    http: httpx.AsyncClient, replica: ApiServer, store: JobStore
) -> None:
    """A job submitted to one is watched, resumed, awaited, cancelled and read at the other."""
    async with httpx.AsyncClient(base_url=replica.url, timeout=30) as other:
        job_id = await submit(http)
        playing = asyncio.create_task(play(store, job_id, steps=10, pause=0.02))
        head = await read_some(http, job_id, None, 4)
        tail = await watch(other, job_id, head[-1].id)
        await playing
        assert head + tail == await watch(http, job_id)
        urls = [f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/artifacts/image", "/v1/jobs"]
        for url in urls:
            here, there = await http.get(url), await other.get(url)
            assert here.content == there.content
            assert here.headers.get("etag") == there.headers.get("etag")
        queued = await submit(http)
        assert (await other.post(f"/v1/jobs/{queued}/cancel")).json()["state"] == "cancelled"


async def test_a_stream_ends_when_the_broker_goes_and_is_resumed_when_it_is_back(
    own_valkey: object,
) -> None:
    """The server keeps its jobs in an append-only file, so what was missed is still there."""
    with serving() as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=10) as http:
            job_id = await submit(http)
            async with http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
                pieces = response.aiter_text()
                text = ""
                while not parse_sse(text):
                    text += await anext(pieces)
                own_valkey.stop()  # type: ignore[attr-defined]
                text += "".join([piece async for piece in pieces])
            head = parse_sse(text)
            assert [e.type for e in head] == ["job.queued"]
            gone = await http.get(f"/v1/jobs/{job_id}/events")
            assert problem(gone).code == "broker_unavailable"
            own_valkey.start()  # type: ignore[attr-defined]
            await http.post(f"/v1/jobs/{job_id}/cancel")
            tail = await watch(http, job_id, head[-1].id)
            assert [e.type for e in tail] == ["job.cancelled"]

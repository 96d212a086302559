"""Waits end when they must, at whatever moment they are broken off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from api_support import eventually, watching_connections
from omniq_api.services import Services, open_services
from omniq_api.waiting import ClientGone, unless_gone, wait_for_end
from redis.asyncio import Redis
from starlette.types import Message

from omniq.jobs.store import JobStore
from omniq.submit import submit


@pytest.fixture
async def services(broker: object) -> AsyncIterator[Services]:
    async with open_services(asyncio.Event()) as services:
        yield services


async def new_job(store: JobStore) -> str:
    return (await submit(store, pipeline="tiny-omni", inputs={"prompt": "x"})).id


async def nothing_is_left(aredis: Redis, before: set[asyncio.Task[object]]) -> None:
    """Wait until no task of the wait runs and nobody watches any more."""

    async def gone() -> bool:
        return asyncio.all_tasks() <= before and await watching_connections(aredis) == 0

    await eventually(gone, 3, "no task and no watcher")


@pytest.mark.parametrize("ticks", range(25))
async def test_a_client_that_goes_at_any_tick_leaves_no_read_behind(
    services: Services, aredis: Redis, ticks: int
) -> None:
    before = asyncio.all_tasks()

    async def receive() -> Message:
        for _ in range(ticks):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    job_id = await new_job(services.store)
    with pytest.raises(ClientGone):
        await wait_for_end(services, receive, job_id, 60)
    await nothing_is_left(aredis, before)


@pytest.mark.parametrize("ticks", range(25))
async def test_a_stream_cancelled_at_any_tick_leaves_no_read_behind(
    services: Services, aredis: Redis, ticks: int
) -> None:
    before = asyncio.all_tasks()
    events = services.store.events(await new_job(services.store), block=30)

    async def follow() -> None:
        async with aclosing(events):
            async for _ in events:
                pass

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    async def watch() -> None:
        await unless_gone(receive, follow())

    following = asyncio.create_task(watch())
    for _ in range(ticks):
        await asyncio.sleep(0)
    following.cancel()
    await asyncio.wait({following}, timeout=1)
    assert following.done()
    await nothing_is_left(aredis, before)


async def test_a_wait_ends_early_when_the_server_stops(services: Services) -> None:
    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    job_id = await new_job(services.store)
    asyncio.get_running_loop().call_later(0.1, services.stopping.set)
    record = await asyncio.wait_for(wait_for_end(services, receive, job_id, 60), 2)
    assert not record.state.final

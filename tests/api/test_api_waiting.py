"""Waits end when they must, at whatever moment they are broken off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from api_support import eventually
from omniq_api.services import Services, open_services
from omniq_api.waiting import ClientGone, until_set, wait_for_end
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


async def nobody_reads(aredis: Redis) -> None:
    """Wait until no connection waits on a stream; far below the reads' own time-out."""

    async def none() -> bool:
        return not any("b" in c["flags"] for c in await aredis.client_list())

    await eventually(none, 2, "no blocked connection")


@pytest.mark.parametrize("ticks", range(25))
async def test_a_client_that_goes_at_any_tick_leaves_no_read_behind(
    services: Services, aredis: Redis, ticks: int
) -> None:
    """redis-py drops a cancellation that meets the end of a write (CPython issue 86296)."""

    async def receive() -> Message:
        for _ in range(ticks):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    job_id = await new_job(services.store)
    with pytest.raises(ClientGone):
        await wait_for_end(services, receive, job_id, 60)
    await nobody_reads(aredis)


@pytest.mark.parametrize("ticks", range(25))
async def test_a_stream_cancelled_at_any_tick_leaves_no_read_behind(
    services: Services, aredis: Redis, ticks: int
) -> None:
    events = services.store.events(await new_job(services.store), block=30)

    async def follow() -> None:
        async for _ in until_set(events, asyncio.Event()):
            pass

    following = asyncio.create_task(follow())
    for _ in range(ticks):
        await asyncio.sleep(0)
    following.cancel()
    await asyncio.wait({following}, timeout=1)
    assert following.done()
    await nobody_reads(aredis)


async def test_a_wait_ends_early_when_the_server_stops(services: Services) -> None:
    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError

    job_id = await new_job(services.store)
    asyncio.get_running_loop().call_later(0.1, services.stopping.set)
    record = await asyncio.wait_for(wait_for_end(services, receive, job_id, 60), 2)
    assert not record.state.final

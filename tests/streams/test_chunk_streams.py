"""Chunk streams against a real Valkey: order, resuming, bounds, fences, leases, and their end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from omniq import keys
from omniq.blobs.base import BlobRef
from omniq.jobs.model import JobSpec, StageResult, Verdict, new_job_id
from omniq.jobs.store import JobStore
from omniq.publish import Post
from omniq.settings import get_settings
from omniq.streams import (
    ChunkReader,
    ChunkStreams,
    ChunkWriter,
    Entry,
    Follower,
    Refused,
    UpstreamLost,
)
from omniq.streams.store import RunKey, lease

LIMIT = 4
FOLLOWERS = [Follower("b", 2, LIMIT)]


class System:
    """A job of two stages, ``a`` streaming its output ``o`` to ``b``."""

    def __init__(self, store: JobStore) -> None:
        self.store, self.streams = store, ChunkStreams(store.redis)
        self.job = new_job_id(time.time())

    async def create(self) -> None:
        spec = JobSpec(
            id=self.job,
            pipeline="p",
            inputs={"prompt": "x"},
            parameters={},
            stages=["a", "b"],
            created=time.time(),
        )
        await self.store.create(spec, {"a": [], "b": ["a"]})

    async def begin(self, stage: str, *, again: bool = False) -> RunKey:
        grant = await self.store.begin_stage(self.job, stage, "w", redelivered=again)
        assert grant.verdict is Verdict.RUN
        return (self.job, stage, grant.fence)

    async def verdict(self, stage: str, *, again: bool = False) -> Verdict:
        grant = await self.store.begin_stage(self.job, stage, "w", redelivered=again)
        return grant.verdict

    async def producer(self, *, again: bool = False) -> tuple[RunKey, ChunkWriter]:
        run = await self.begin("a", again=again)
        await self.streams.open(run, {"o": ["b"]})
        return run, ChunkWriter(self.streams, run, "o", FOLLOWERS)

    async def reader(
        self, producer: RunKey, *, start: int = 0, again: bool = False
    ) -> tuple[RunKey, ChunkReader]:
        await self.streams.window_there(producer, "b", POST)
        run = await self.begin("b", again=again)
        return run, self.reads(run, producer, start)

    def reads(self, run: RunKey, producer: RunKey, start: int = 0) -> ChunkReader:
        return ChunkReader(self.streams, run, "a", "o", producer[2], start=start, limit=LIMIT)

    async def state(self, stage: str) -> str:
        return (await self.store.get(self.job)).stages[stage].state.value


POST = Post(
    stage="b", queue="queue-of-b", message=b"message", event=b"", tag="tag", name="queue-of-b"
)


async def new_system() -> System:
    system = System(JobStore.from_settings())
    await system.create()
    return system


async def close(system: System) -> None:
    system.streams.close()
    await system.store.close()


@pytest.fixture
async def system(broker: object) -> AsyncIterator[System]:
    system = await new_system()
    yield system
    await close(system)


@pytest.fixture
def short_lease(broker: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    monkeypatch.setenv("OMNIQ_VISIBILITY_TIMEOUT", "1.5")
    get_settings.cache_clear()
    yield lease()
    get_settings.cache_clear()


async def values(reader: ChunkReader) -> list[Any]:
    return [entry.value async for entry in reader]


@settings(
    max_examples=25,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking such a failure takes minutes
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    count=st.integers(0, 30),
    marked=st.booleans(),
    pauses=st.lists(st.booleans(), min_size=30, max_size=30),
    stops=st.lists(st.integers(0, 12), max_size=4),
)
def test_every_chunk_is_read_once_and_in_order_however_the_reader_is_interrupted(
    broker: object, count: int, marked: bool, pauses: list[bool], stops: list[int]
) -> None:
    """Also: the writer is never more than its bound ahead."""

    async def scenario() -> None:
        system = await new_system()
        producer, writer = await system.producer()
        run, reader = await system.reader(producer)
        got: list[int] = []
        furthest = 0

        async def write() -> None:
            nonlocal furthest
            for number in range(count):
                if pauses[number]:
                    await asyncio.sleep(0)
                await writer.write(number, last=marked and number == count - 1)
                furthest = max(furthest, writer.count - len(got))
            await writer.end()

        writing = asyncio.create_task(write())
        for stop in stops:  # goes away after so many chunks, and comes back behind them
            for _ in range(stop):
                entry = await reader.next()
                if entry is None:
                    break
                got.append(entry.value)
            reader = system.reads(run, producer, start=len(got))
        async for entry in reader:
            got.append(entry.value)
        await writing
        assert got == list(range(count))
        assert furthest <= LIMIT + 1  # the chunk in the reader's hand counts as not taken
        assert await values(system.reads(run, producer)) == got, "the stream can be read again"
        await close(system)

    asyncio.run(scenario())


async def test_a_writer_waits_for_its_slowest_reader(system: System) -> None:
    producer, writer = await system.producer()
    for number in range(LIMIT):
        await writer.write(number)
    waiting = asyncio.create_task(writer.write("one more"))
    _, pending = await asyncio.wait({waiting}, timeout=0.2)
    assert pending, "nobody has read anything"
    _, reader = await system.reader(producer)
    assert (await reader.next()) is not None
    assert not waiting.done(), "the first chunk is not done with"
    await reader.next()
    assert await asyncio.wait_for(waiting, 2) == LIMIT


async def test_a_reader_that_needs_no_more_holds_nobody_up(system: System) -> None:
    producer, writer = await system.producer()
    _, reader = await system.reader(producer)
    await reader.skip_rest()
    for number in range(3 * LIMIT):
        await asyncio.wait_for(writer.write(number), 2)
    assert await reader.next() is None


async def test_a_message_goes_out_with_the_first_window_once_for_each_run(system: System) -> None:
    async def sent() -> int:
        return int(await system.store.redis.llen("queue-of-b"))

    first, _ = await system.producer()
    assert await system.verdict("b") is Verdict.WAIT
    await system.streams.window_there(first, "b", POST)
    await system.streams.window_there(first, "b", POST)
    assert await sent() == 1
    second, _ = await system.producer(again=True)
    assert await system.verdict("b") is Verdict.WAIT, "the window was the first run's"
    await system.streams.window_there(first, "b", POST)
    assert await sent() == 1, "an old run sends nothing"
    await system.streams.window_there(second, "b", POST)
    assert await sent() == 2
    assert await system.verdict("b") is Verdict.RUN
    assert await system.verdict("b") is Verdict.DUPLICATE


async def test_a_new_run_starts_the_stream_anew_and_its_readers_too(system: System) -> None:
    blob = BlobRef(id=f"{system.job}.a.1.o.0", store="redis", nbytes=1)
    await system.store.redis.hset(keys.blob(blob.id), "x", "y")
    producer, writer = await system.producer()
    await writer.write(1, blob)
    await writer.write(2)
    old, reader = await system.reader(producer)
    assert (await reader.next()) == Entry(producer[2], 0, "chunk", 1, blob)
    again, rewriter = await system.producer(again=True)
    assert await system.state("b") == "queued"
    assert (await system.store.get(system.job)).stages["b"].attempts == 0
    assert not await system.store.redis.exists(keys.blob(blob.id)), "nobody may read it any more"
    with pytest.raises(Refused):
        await writer.write(3)
    with pytest.raises(Refused):
        await values(reader)
    assert not await system.store.finish_stage(*old, StageResult()), "what it made is refused"
    await rewriter.write("new", last=True)
    run, reader = await system.reader(again)
    assert await values(reader) == ["new"]
    assert await system.store.finish_stage(*run, StageResult())


async def test_a_reader_is_released_when_its_producer_is_dead(
    short_lease: float, system: System
) -> None:
    producer, writer = await system.producer()
    await writer.write(1)
    _, reader = await system.reader(producer)
    assert (await reader.next()) is not None
    began = time.monotonic()
    with pytest.raises(UpstreamLost):
        await reader.next()
    assert time.monotonic() - began < get_settings().visibility_timeout
    assert await system.state("b") == "queued"
    # It was only asleep: the reader is sent for once more.
    await writer.write(2)
    await system.streams.window_there(producer, "b", POST)
    assert await system.store.redis.llen("queue-of-b") == 2
    assert await system.verdict("b") is Verdict.RUN


async def test_a_producer_that_renews_its_lease_may_be_silent(
    short_lease: float, system: System
) -> None:
    producer, writer = await system.producer()
    await writer.write(1)
    _, reader = await system.reader(producer)
    reading = asyncio.create_task(values(reader))
    for _ in range(6):
        await asyncio.sleep(short_lease / 3)
        await system.streams.renew(producer)
    assert not reading.done()
    await writer.end()
    assert await asyncio.wait_for(reading, 2) == [1]


async def test_an_error_mark_releases_the_reader_at_once(system: System) -> None:
    producer, writer = await system.producer()
    await writer.write(1)
    _, reader = await system.reader(producer)
    reading = asyncio.create_task(values(reader))
    await asyncio.sleep(0.05)
    await writer.fail({"code": "engine_error", "message": "broken"})
    with pytest.raises(UpstreamLost):
        await asyncio.wait_for(reading, 2)
    assert await system.state("b") == "queued"
    assert await system.store.fail_stage(*producer, {"code": "engine_error", "message": "broken"})
    assert await system.state("b") == "cancelled"


async def test_a_redelivered_reader_starts_over_while_the_producer_runs(system: System) -> None:
    producer, writer = await system.producer()
    for number in range(3):
        await writer.write(number)
    _, first = await system.reader(producer)
    for _ in range(3):
        await first.next()
    _, second = await system.reader(producer, again=True)
    await writer.write(3, last=True)
    assert await values(second) == [0, 1, 2, 3]
    with pytest.raises(Refused):
        await first.next()
        await first.next()
        await first.skip_rest()


@pytest.mark.parametrize("how", ["succeed", "fail", "cancel"])
async def test_the_end_of_the_job_leaves_no_stream_and_wakes_its_readers(
    system: System, how: str
) -> None:
    producer, writer = await system.producer()
    await writer.write(1)
    await writer.write(2)
    run, reader = await system.reader(producer)
    assert (await reader.next()) is not None
    stream = keys.stream(system.job, "a", "o")
    assert 0 < await system.store.redis.pttl(stream) <= get_settings().job_ttl * 1000
    assert await system.store.redis.pttl(keys.job_streams(system.job)) > 0
    if how == "succeed":
        await writer.end()
        assert await values(reader) == [2]
        for which in (producer, run):
            assert await system.store.finish_stage(*which, StageResult())
    else:
        assert (await reader.next()) is not None
        reading = asyncio.create_task(reader.next())
        await asyncio.sleep(0.05)
        if how == "fail":
            await system.store.fail_stage(*producer, {"code": "x", "message": "y"})
        else:
            await system.store.cancel(system.job)
            for which in (producer, run):
                await system.store.stop_stage(*which)
        with pytest.raises(Refused):
            await asyncio.wait_for(reading, 2)
    with pytest.raises(Refused):
        await writer.write(3) if not writer.closed else await system.streams.renew(producer)
    left = {k.decode() for k in await system.store.redis.keys(f"*{system.job}*")}
    assert left == {keys.job(system.job), keys.job_events(system.job)}


async def test_a_repeated_write_whose_answer_was_lost_is_there_once(system: System) -> None:
    producer, writer = await system.producer()
    await writer.write("x")
    entry = Entry(producer[2], 0, "chunk", "x")
    assert await system.streams.append(producer, "o", entry, {"b": 1})
    _, reader = await system.reader(producer)
    await writer.end()
    assert await values(reader) == ["x"]

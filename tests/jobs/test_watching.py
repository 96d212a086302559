"""Watching jobs: all watchers of a store share one connection and each sees exactly its own job."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest
from redis.asyncio import Redis
from support import Valkey

from omniq import keys
from omniq.errors import BrokerUnavailable, InvalidRequest, JobNotFound
from omniq.jobs import watch
from omniq.jobs.model import JobEvent, JobRecord, JobSpec, JobState, StageResult, new_job_id
from omniq.jobs.store import JobStore
from omniq.jobs.watch import PAGE
from omniq.jobs.watcher import BUFFER, parse_id
from omniq.settings import get_settings


@pytest.fixture
async def store(broker: object) -> AsyncIterator[JobStore]:
    store = JobStore.from_settings()
    yield store
    await store.close()


async def eventually(predicate: Callable[[], Awaitable[bool]], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not await predicate():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        await asyncio.sleep(0.01)


async def running(store: JobStore, *, awaited: bool = False) -> tuple[JobRecord, int]:
    """A job whose only stage runs, and the run's fence."""
    now = time.time()
    spec = JobSpec(
        id=new_job_id(now), pipeline="p", inputs={}, parameters={}, stages=["a"], created=now
    )
    job = await store.create(spec, {"a": []}, awaited=awaited)
    grant = await store.begin_stage(job.id, "a", "w", redelivered=False)
    return job, grant.fence


async def say(store: JobStore, job: JobRecord, fence: int, n: int) -> None:
    for i in range(n):
        assert await store.delta(job.id, "a", fence, "text", {"n": i, "job": job.id})


async def finish(store: JobStore, job: JobRecord, fence: int) -> None:
    assert await store.finish_stage(job.id, "a", fence, StageResult())


async def seen(store: JobStore, job_id: str, after: str = "0") -> list[JobEvent]:
    """All events behind ``after`` up to the end, as a watcher gets them."""
    return [e async for e in store.events(job_id, after, block=30) if e is not None]


async def told(aredis: Redis, job_id: str) -> list[str]:
    """The ids of all events there are, in order, asked for apart from omniq."""
    return [i.decode() for i, _ in await aredis.xrange(keys.job_events(job_id))]


async def watching_connections(aredis: Redis) -> int:
    return int((await aredis.info("clients"))["tracking_clients"])


async def test_five_hundred_watchers_of_fifty_jobs_see_exactly_their_own_in_order(
    store: JobStore, aredis: Redis
) -> None:
    writer = JobStore.from_settings()
    jobs = [await running(writer) for _ in range(50)]
    watchers = [asyncio.create_task(seen(store, jobs[i % 50][0].id)) for i in range(500)]

    async def play(job: JobRecord, fence: int) -> None:
        for _ in range(5):
            await say(writer, job, fence, 4)
            await asyncio.sleep(random.random() / 20)
        await finish(writer, job, fence)

    await asyncio.gather(*(play(*job) for job in jobs))
    stories = await asyncio.wait_for(asyncio.gather(*watchers), 30)
    for i, story in enumerate(stories):
        job_id = jobs[i % 50][0].id
        assert [e.id for e in story] == await told(aredis, job_id)
        assert {e.data["value"]["job"] for e in story if e.type == "stage.delta"} == {job_id}
    await writer.close()


async def test_watchers_that_join_and_resume_at_random_miss_and_repeat_nothing(
    store: JobStore, aredis: Redis
) -> None:
    writer = JobStore.from_settings()
    job, fence = await running(writer)
    playing = asyncio.create_task(say(writer, job, fence, 400))
    rng = random.Random(7)

    async def follow() -> tuple[str, list[str]]:
        """Join at some moment behind some event, hanging up and resuming now and then."""
        await asyncio.sleep(rng.random() * 0.3)
        known = await told(aredis, job.id)
        first = after = rng.choice(["0", *known])
        ids: list[str] = []
        while True:
            pause = rng.randrange(1, 200)
            async with aclosing(store.events(job.id, after, block=30)) as events:
                async for event in events:
                    assert event is not None
                    ids.append(event.id)
                    after = event.id
                    if event.final:
                        return first, ids
                    pause -= 1
                    if not pause:
                        break

    following = [asyncio.create_task(follow()) for _ in range(100)]
    await playing
    await finish(writer, job, fence)
    everything = await told(aredis, job.id)
    for first, ids in await asyncio.wait_for(asyncio.gather(*following), 30):
        assert ids == everything[everything.index(first) + 1 if first != "0" else 0 :]
    await writer.close()


async def test_all_watchers_and_waiters_share_one_connection(
    store: JobStore, aredis: Redis
) -> None:
    # Other tests' clients in this process, such as Celery's pools, may still be connected.
    others = {client["id"] for client in await aredis.client_list()}
    jobs = [await running(store) for _ in range(20)]
    tasks = [asyncio.create_task(seen(store, job.id)) for job, _ in jobs]
    tasks += [asyncio.create_task(store.wait(job.id)) for job, _ in jobs]  # type: ignore[misc]
    await eventually(lambda: _is(watching_connections, aredis, 1))
    own = {client["id"] for client in await aredis.client_list()} - others
    assert len(own) == 2, "one to ask, one to be told"
    await asyncio.gather(*(finish(store, *job) for job in jobs))
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    await eventually(lambda: _is(watching_connections, aredis, 0))


async def _is(count: Callable[[Redis], Awaitable[int]], aredis: Redis, n: int) -> bool:
    return await count(aredis) == n


async def test_a_slow_watcher_stalls_nobody_holds_little_and_misses_nothing(
    store: JobStore, aredis: Redis
) -> None:
    job, fence = await running(store)
    slow = store.events(job.id, block=30)
    ids = [(await anext(slow)).id]  # type: ignore[union-attr]
    quick = asyncio.create_task(seen(store, job.id))
    total = 3 * (PAGE + BUFFER)
    await say(store, job, fence, total)
    await finish(store, job, fence)
    assert len(await asyncio.wait_for(quick, 10)) == total + 5
    (held,) = (w for feed in store._watching._feeds.values() for w in feed.watches)
    assert len(held._buffer) <= BUFFER
    async for event in slow:
        assert event is not None
        ids.append(event.id)
    assert ids == await told(aredis, job.id)


async def test_a_storm_of_cancellations_leaves_no_task_and_no_connection(
    store: JobStore, aredis: Redis
) -> None:
    job, fence = await running(store)
    before = asyncio.all_tasks()
    connections = len(await aredis.client_list())
    rng = random.Random(3)
    playing = asyncio.create_task(say(store, job, fence, 300))

    async def storm() -> None:
        work = seen(store, job.id) if rng.random() < 0.5 else store.wait(job.id)
        task = asyncio.create_task(work)  # type: ignore[arg-type]
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random() / 20)
        task.cancel()
        await asyncio.wait({task}, timeout=1)
        assert task.done()

    for _ in range(10):
        await asyncio.gather(*(storm() for _ in range(60)))
    await playing

    async def nothing_left() -> bool:
        return (
            asyncio.all_tasks() <= before
            and not store._watching._feeds
            and len(await aredis.client_list()) <= connections
        )

    await eventually(nothing_left)
    await finish(store, job, fence)
    assert (await store.wait(job.id, 5)).state is JobState.SUCCEEDED


async def test_watchers_end_when_the_broker_dies_and_go_on_from_their_last_event(
    own_valkey: Valkey,
) -> None:
    store = JobStore.from_settings()
    job, fence = await running(store)
    ids: list[str] = []

    async def follow(after: str) -> None:
        async for event in store.events(job.id, after, block=30):
            assert event is not None
            ids.append(event.id)

    following = [asyncio.create_task(follow("0")), asyncio.create_task(store.wait(job.id))]

    async def heard() -> bool:
        return len(ids) == 3

    await eventually(heard)
    own_valkey.stop()
    for result in await asyncio.gather(*following, return_exceptions=True):
        assert isinstance(result, BrokerUnavailable)
    with pytest.raises(BrokerUnavailable):
        await follow(ids[-1])
    own_valkey.start()
    again = asyncio.create_task(follow(ids[-1]))
    waiting = asyncio.create_task(store.wait(job.id))
    await say(store, job, fence, 5)
    await finish(store, job, fence)
    await asyncio.wait_for(asyncio.gather(again, waiting), 10)
    async with Redis(port=own_valkey.port) as aredis:
        assert ids == await told(aredis, job.id)
    await store.close()


async def test_a_frozen_broker_is_noticed_at_the_next_silence(own_valkey: Valkey) -> None:
    store = JobStore.from_settings()
    job, _ = await running(store)
    events = store.events(job.id, block=0.1)
    while await anext(events) is not None:
        pass
    assert own_valkey.process is not None
    os.kill(own_valkey.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(BrokerUnavailable):
            async with asyncio.timeout(5):
                while True:
                    await anext(events)
    finally:
        os.kill(own_valkey.process.pid, signal.SIGCONT)
    await store.close()


async def test_an_event_the_server_never_told_of_is_found_after_the_silence(
    store: JobStore, aredis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, fence = await running(store)
    monkeypatch.setattr(watch, "SILENCE", 0.2)
    events = store.events(job.id, block=0.2)
    for _ in range(3):
        await anext(events)
    waiting = asyncio.create_task(store.wait(job.id))
    await asyncio.sleep(0.05)
    store._watching._told = lambda message: None  # type: ignore[method-assign]
    store._watching._line._wire._on_push = None  # type: ignore[union-attr]
    await finish(store, job, fence)
    rest = [e.type async for e in events if e is not None]
    assert rest == ["stage.succeeded", "job.succeeded"]
    assert (await asyncio.wait_for(waiting, 2)).state is JobState.SUCCEEDED


async def test_a_job_that_vanishes_while_watched_is_not_found(
    store: JobStore, aredis: Redis
) -> None:
    job, _ = await running(store)
    events = store.events(job.id, block=0.1)
    for _ in range(3):
        await anext(events)
    await aredis.delete(keys.job(job.id), keys.job_events(job.id))
    with pytest.raises(JobNotFound):
        while True:
            await anext(events)


async def test_an_id_of_the_future_waits_for_the_end_and_disturbs_nobody(store: JobStore) -> None:
    job, fence = await running(store)
    future = f"{2**63}-7"
    ahead = asyncio.create_task(seen(store, job.id, future))
    await asyncio.sleep(0.05)
    beside = asyncio.create_task(seen(store, job.id))
    await say(store, job, fence, 2)
    await finish(store, job, fence)
    assert await asyncio.wait_for(ahead, 5) == []
    assert len(await asyncio.wait_for(beside, 5)) == 7


async def test_a_server_that_stops_ends_all_watches_now_and_later(store: JobStore) -> None:
    job, _ = await running(store)
    watchers = [asyncio.create_task(seen(store, job.id)) for _ in range(5)]
    waiting = asyncio.create_task(store.wait(job.id))
    await asyncio.sleep(0.1)
    store.stop_watching()
    async with asyncio.timeout(1):
        assert [len(s) for s in await asyncio.gather(*watchers)] == [3] * 5
        assert not (await waiting).state.final
        assert await seen(store, job.id) == []
        assert not (await store.wait(job.id)).state.final


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "1-2-3", "1 ", f"{2**64}", "١"])
def test_what_is_no_event_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_id(text)


@pytest.fixture
async def untold(
    broker: Valkey, aredis: Redis, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[JobStore]:
    """A store whose user may do everything but ask to be told of changes."""
    rules = ["on", ">x", "~*", "&*", "+@all", "-client|tracking"]
    await aredis.execute_command("ACL", "SETUSER", "untold", *rules)
    monkeypatch.setenv("OMNIQ_BROKER_URL", broker.url.replace("://", "://untold:x@"))
    get_settings.cache_clear()
    store = JobStore.from_settings()
    yield store
    await store.close()
    await aredis.execute_command("ACL", "DELUSER", "untold")


async def test_where_the_broker_does_not_tell_of_changes_jobs_are_polled(
    store: JobStore, untold: JobStore, caplog: pytest.LogCaptureFixture
) -> None:
    job, fence = await running(store)
    waiting = asyncio.create_task(untold.wait(job.id, 20))
    heard: list[str | None] = []

    async def watch() -> None:
        async for event in untold.events(job.id, block=0.6):
            heard.append(None if event is None else event.type)

    watching = asyncio.create_task(watch())
    while None not in heard:  # heartbeats go on
        await asyncio.sleep(0.05)
    assert not waiting.done()
    await finish(store, job, fence)
    assert (await waiting).state is JobState.SUCCEEDED
    await asyncio.wait_for(watching, 20)
    assert [h for h in heard if h] == [e.type for e in await seen(store, job.id)]
    assert caplog.text.count("does not tell of changes") == 1


async def test_where_nobody_may_listen_the_ends_of_jobs_are_polled(
    store: JobStore, untold: JobStore, aredis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await aredis.execute_command("ACL", "SETUSER", "untold", "resetchannels")
    job, fence = await running(store)
    waiting = [asyncio.create_task(untold.wait(job.id, 20)) for _ in range(3)]
    await asyncio.sleep(0.05)
    await finish(store, job, fence)
    for record in await asyncio.gather(*waiting):
        assert record.state is JobState.SUCCEEDED
    assert "lets nobody listen" in caplog.text


async def test_who_waits_is_sent_the_record_that_anybody_may_read(
    store: JobStore, aredis: Redis
) -> None:
    job, fence = await running(store)
    waiting = [asyncio.create_task(store.wait(job.id)) for _ in range(3)]
    while not any(f.startswith(b"w:") for f in await aredis.hkeys(keys.job(job.id))):
        await asyncio.sleep(0.01)
    await finish(store, job, fence)
    read = await store.get(job.id)
    assert await asyncio.gather(*waiting) == [read] * 3
    assert not any(f.startswith(b"w:") for f in await aredis.hkeys(keys.job(job.id)))


async def scripts(aredis: Redis) -> int:
    found = (await aredis.info("commandstats")).get("cmdstat_evalsha", {"calls": 0})
    return int(found["calls"])


async def test_who_said_so_when_it_was_recorded_waits_without_asking(
    store: JobStore, aredis: Redis
) -> None:
    await finish(store, *await running(store))  # the server knows the scripts
    before = await scripts(aredis)
    job, fence = await running(store, awaited=True)
    waiting = asyncio.create_task(store.wait(job.id))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await finish(store, job, fence)
    assert await waiting == await store.get(job.id)
    assert await scripts(aredis) - before == 3, "create, begin and finish"


async def test_an_end_before_anybody_waits_is_not_missed(store: JobStore) -> None:
    job, fence = await running(store, awaited=True)
    await finish(store, job, fence)
    await asyncio.sleep(0.05)
    first, second = await store.wait(job.id, 5), await store.wait(job.id, 5)
    assert first == second
    assert first.state is JobState.SUCCEEDED


async def test_who_was_expected_and_does_not_wait_keeps_no_connection(
    store: JobStore, aredis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "EXPECTED", 0.2)
    job, fence = await running(store, awaited=True)
    await eventually(lambda: _is(watching_connections, aredis, 1))
    await eventually(lambda: _is(watching_connections, aredis, 0))
    waiting = asyncio.create_task(store.wait(job.id, 20))
    await finish(store, job, fence)
    assert (await waiting).state is JobState.SUCCEEDED


async def test_a_lost_connection_does_not_lose_who_was_expected(own_valkey: Valkey) -> None:
    store = JobStore.from_settings()
    job, fence = await running(store, awaited=True)
    own_valkey.stop()
    with pytest.raises(BrokerUnavailable):
        await store.get(job.id)
    own_valkey.start()
    await finish(store, job, fence)
    assert (await store.wait(job.id, 20)).state is JobState.SUCCEEDED
    await store.close()


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_job_that_nobody_serves_expires_for_who_waits(
    store: JobStore, awaited: bool
) -> None:
    now = time.time()
    spec = JobSpec(
        id=new_job_id(now), pipeline="p", inputs={}, parameters={}, stages=["a"], created=now,
        deadline=now + 0.2,
    )  # fmt: skip
    job = await store.create(spec, {"a": []}, awaited=awaited)
    record = await store.wait(job.id, 10)
    assert record.state is JobState.EXPIRED
    assert time.time() >= now + 0.2


async def test_a_job_that_nobody_serves_expires_for_who_watches(store: JobStore) -> None:
    """At its deadline, not after a silence."""
    now = await store.clock.now()
    spec = JobSpec(
        id=new_job_id(now), pipeline="p", inputs={}, parameters={}, stages=["a"], created=now,
        deadline=now + 0.2,
    )  # fmt: skip
    job = await store.create(spec, {"a": []})
    async with asyncio.timeout(watch.SILENCE / 2):
        events = [e async for e in store.events(job.id) if e is not None]
    assert [e.type for e in events] == ["job.queued", "job.expired"]


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_host_whose_clock_is_behind_waits_no_longer(
    store: JobStore, awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody serves the job, so who waits has to look; at its deadline, not after a silence."""
    now = await store.clock.now()
    spec = JobSpec(
        id=new_job_id(now), pipeline="p", inputs={}, parameters={}, stages=["a"], created=now,
        deadline=now + 0.5,
    )  # fmt: skip
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    job = await store.create(spec, {"a": []}, awaited=awaited)
    record = await asyncio.wait_for(store.wait(job.id), watch.SILENCE / 2)
    assert record.state is JobState.EXPIRED

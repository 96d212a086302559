"""Jobs that end well without some of their outputs, against a real Valkey."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64decode
from typing import Any

import pytest
import redis.asyncio

from omniq import keys
from omniq.blobs.base import BlobRef
from omniq.celery import celery_priority, queue_keys
from omniq.jobs.dead import DeadLetters
from omniq.jobs.model import (
    ArtifactInfo,
    JobRecord,
    JobSpec,
    JobState,
    StageGrant,
    StageResult,
    Verdict,
    new_job_id,
)
from omniq.jobs.store import JobStore
from omniq.publish import Post
from omniq.streams import ChunkReader, ChunkStreams, ChunkWriter, Follower, Refused, Unread
from omniq.submit import submit

#: The thinker makes the text; what the talker and the vocoder make of it is the sound.
SPEAKS = {"thinker": [], "talker": ["thinker"], "vocoder": ["talker"]}
TEXT_AND_SOUND = {"text": "thinker", "audio": "vocoder"}
#: Two outputs side by side; `c` makes ready what only `d` reads.
FORK = {"a": [], "b": ["a"], "c": ["a"], "d": ["c"]}
QUEUE = queue_keys("omniq.small.ar")[celery_priority(5)]
ERROR = {"code": "engine_error", "message": "the engine is broken"}


async def create(
    store: JobStore,
    upstream: dict[str, list[str]] = SPEAKS,
    partial: dict[str, str] = TEXT_AND_SOUND,
    **more: Any,
) -> JobRecord:
    now = time.time()
    spec = JobSpec(
        id=new_job_id(now),
        pipeline="p",
        inputs={"prompt": "x"},
        parameters={},
        stages=list(upstream),
        partial=partial,
        created=now,
        **more,
    )
    return await store.create(spec, upstream)


async def begin(store: JobStore, job: JobRecord, stage: str, **more: Any) -> StageGrant:
    more = {"redelivered": False, **more}
    grant = await store.begin_stage(job.id, stage, "w", **more)
    assert grant.verdict is Verdict.RUN
    return grant


async def run(store: JobStore, job: JobRecord, stage: str, **made: Any) -> None:
    grant = await begin(store, job, stage)
    assert await store.finish_stage(job.id, stage, grant.fence, StageResult(**made))


async def fail(store: JobStore, job: JobRecord, stage: str, trace: str = "") -> None:
    grant = await begin(store, job, stage)
    assert await store.fail_stage(job.id, stage, grant.fence, ERROR, trace)


async def states(store: JobStore, job: JobRecord) -> dict[str, str]:
    return {n: s.state.value for n, s in (await store.get(job.id)).stages.items()}


async def last_event(store: JobStore, job: JobRecord) -> Any:
    return [e async for e in store.events(job.id) if e is not None][-1]


def blob(job: JobRecord, stage: str) -> BlobRef:
    return BlobRef(id=f"{job.id}.{stage}.1.o", store="redis", nbytes=3)


async def test_what_was_made_before_a_stage_failed_is_kept(store: JobStore) -> None:
    job = await create(store)
    await run(store, job, "thinker", values={"text": "hi"})
    await fail(store, job, "talker")
    record = await store.wait(job.id, 5)
    assert record.state is JobState.SUCCEEDED and record.partial and record.error is None
    assert record.values == {"text": "hi"}
    assert {n: w.model_dump() for n, w in record.missing.items()} == {
        "audio": {"stage": "talker", "error": ERROR}
    }
    assert await states(store, job) == {
        "thinker": "succeeded", "talker": "failed", "vocoder": "cancelled",
    }  # fmt: skip
    event = await last_event(store, job)
    assert event.type == "job.succeeded"
    assert event.data == {
        "partial": True,
        "missing": {"audio": {"stage": "talker", "error": ERROR}},
    }


async def test_whoever_takes_all_or_nothing_gets_the_failure(store: JobStore) -> None:
    job = await create(store, partial={})
    await run(store, job, "thinker", values={"text": "hi"})
    await fail(store, job, "talker")
    record = await store.get(job.id)
    assert record.state is JobState.FAILED and record.error == ERROR
    assert not record.partial and not record.missing


async def test_a_job_whose_outputs_all_need_the_failed_stage_fails(store: JobStore) -> None:
    job = await create(store)
    await fail(store, job, "thinker")
    record = await store.get(job.id)
    assert record.state is JobState.FAILED and record.error == ERROR and not record.missing
    assert (await last_event(store, job)).data == {"error": ERROR}


async def test_a_whole_success_says_nothing_of_parts(store: JobStore) -> None:
    job = await create(store)
    for stage in SPEAKS:
        await run(store, job, stage)
    record = await store.get(job.id)
    assert record.state is JobState.SUCCEEDED and not record.partial
    assert (await last_event(store, job)).data == {}


async def test_what_does_without_the_failed_stage_runs_to_its_end(
    store: JobStore, aredis: redis.asyncio.Redis
) -> None:
    """What only fed it stops: a run of it is told, and what it writes is refused."""
    job = await create(store, FORK, {"left": "b", "right": "d"})
    await run(store, job, "a")
    left, feeds = await begin(store, job, "b"), await begin(store, job, "c")
    # As by chunks: the reader runs beside what feeds it.
    await store.redis.hset(keys.job(job.id), "d|state", "running")
    await store.redis.hset(keys.job(job.id), "d|fence", "1")
    async with aredis.pubsub() as pubsub:
        await pubsub.subscribe(keys.cancel_channel())
        assert (await pubsub.get_message(timeout=5))["type"] == "subscribe"
        assert await store.fail_stage(job.id, "d", 1, ERROR)
        told = await pubsub.get_message(timeout=5)
    assert told["data"] == f"{job.id} c {feeds.fence}".encode()
    record = await store.get(job.id)
    assert record.state is JobState.RUNNING and list(record.missing) == ["right"]
    assert not await store.progress(job.id, "c", feeds.fence, 1, 2)
    assert not await store.finish_stage(job.id, "c", feeds.fence, StageResult())
    assert not await store.stop_stage(job.id, "c", feeds.fence)
    assert await store.progress(job.id, "b", left.fence, 1, 2)
    assert await store.finish_stage(job.id, "b", left.fence, StageResult(values={"left": 1}))
    record = await store.get(job.id)
    assert record.partial and record.values == {"left": 1}
    assert await states(store, job) == {
        "a": "succeeded", "b": "succeeded", "c": "cancelled", "d": "failed",
    }  # fmt: skip


async def test_the_failed_stage_and_what_is_behind_it_are_not_begun_again(store: JobStore) -> None:
    job = await create(store, FORK, {"left": "b", "right": "d"})
    await run(store, job, "a")
    await fail(store, job, "c")
    for stage in ("c", "d"):
        for redelivered in (False, True):
            grant = await store.begin_stage(job.id, stage, "w", redelivered=redelivered)
            assert grant.verdict is Verdict.STOP and grant.state is JobState.RUNNING
    assert not await store.fail_stage(job.id, "c", 1, ERROR)
    await run(store, job, "b")
    assert (await store.get(job.id)).partial


async def test_the_second_failure_fails_the_job_if_nothing_is_left(store: JobStore) -> None:
    job = await create(store, FORK, {"left": "b", "right": "d"})
    await run(store, job, "a")
    await fail(store, job, "c", "Traceback")
    letters = DeadLetters(store)
    assert not await letters.list(), "no dead letter while the job goes on"
    await fail(store, job, "b")
    record = await store.get(job.id)
    assert record.state is JobState.FAILED and record.error == ERROR and not record.missing
    assert [letter.stage for letter in await letters.list()] == ["c"]


async def test_the_delivery_limit_costs_only_what_needs_the_stage(store: JobStore) -> None:
    job = await create(store)
    await run(store, job, "thinker", values={"text": "hi"})
    await begin(store, job, "talker", max_deliveries=1)
    again = await store.begin_stage(job.id, "talker", "w", redelivered=True, max_deliveries=1)
    assert again.verdict is Verdict.STOP and again.state is JobState.SUCCEEDED
    record = await store.get(job.id)
    assert record.partial and record.missing["audio"].error["code"] == "delivery_limit"


async def test_at_the_deadline_what_was_made_is_kept(store: JobStore) -> None:
    """Nobody runs the talker: who waits, reads or watches has the text at the deadline."""
    job = await create(store, deadline=time.time() + 0.3)
    await run(store, job, "thinker", values={"text": "hi"})
    record = await store.wait(job.id, 10)
    assert record.partial and record.values == {"text": "hi"}
    why = record.missing["audio"]
    assert (why.stage, why.error["code"]) == ("talker", "deadline_exceeded")
    empty = await create(store, deadline=time.time() - 1)
    assert (await store.get(empty.id)).state is JobState.EXPIRED


async def test_a_run_that_its_deadline_ends_costs_only_what_needs_it(store: JobStore) -> None:
    job = await create(store, deadline=time.time() + 60)
    await run(store, job, "thinker")
    grant = await begin(store, job, "talker")
    late = {"code": "deadline_exceeded", "message": "late"}
    assert await store.expire_stage(job.id, "talker", grant.fence, late)
    record = await store.get(job.id)
    assert record.partial and record.missing["audio"].error == late
    job = await create(store, deadline=time.time() + 60)
    grant = await begin(store, job, "thinker")
    assert await store.expire_stage(job.id, "thinker", grant.fence, late)
    assert (await store.get(job.id)).state is JobState.EXPIRED


async def test_a_cancelled_job_stays_cancelled_whatever_it_lacked(store: JobStore) -> None:
    job = await create(store, FORK, {"left": "b", "right": "d"})
    await run(store, job, "a")
    await fail(store, job, "c", "Traceback")
    grant = await begin(store, job, "b")
    assert (await store.cancel(job.id)).state is JobState.CANCELLING
    assert await store.fail_stage(job.id, "b", grant.fence, ERROR)
    record = await store.get(job.id)
    assert record.state is JobState.CANCELLED and not record.missing
    assert not await DeadLetters(store).list()


async def test_what_only_the_failed_stage_would_read_is_freed_at_once(store: JobStore) -> None:
    """Before the job's end: what was made for it, and what is made for it later."""
    job = await create(store, FORK, {"left": "b", "right": "d"})
    await run(store, job, "a")
    await run(store, job, "c", blobs=[blob(job, "c")])
    left = await begin(store, job, "b")
    await store.redis.set(f"omniq:blob:{job.id}.c.1.o", b"abc")
    await fail(store, job, "d")
    assert await store.redis.smembers(keys.job_blobs(job.id)) == set()
    assert not await store.redis.exists(f"omniq:blob:{job.id}.c.1.o")
    assert await store.finish_stage(job.id, "b", left.fence, StageResult())
    # A reader that ran beside what feeds it is gone before that has ended.
    parts = {"text": "a", "sound": "c", "other": "b"}
    job = await create(store, {"a": [], "b": [], "c": ["a"]}, parts)
    grant = await begin(store, job, "a")
    await store.redis.hset(keys.job(job.id), mapping={"c|state": "running", "c|fence": "1"})
    assert await store.fail_stage(job.id, "c", 1, ERROR)
    await store.redis.set(f"omniq:blob:{job.id}.a.1.o", b"abc")
    assert await store.finish_stage(
        job.id, "a", grant.fence, StageResult(blobs=[blob(job, "a")], values={"text": "hi"})
    )
    assert (await store.get(job.id)).state is JobState.RUNNING
    assert not await store.redis.exists(f"omniq:blob:{job.id}.a.1.o")


async def test_a_stream_whose_reader_is_given_up_keeps_nothing_more(store: JobStore) -> None:
    """Until then the writer does not wait for a reader that it is not bound to."""
    job = await create(store)
    grant = await begin(store, job, "thinker")
    thinker = (job.id, "thinker", grant.fence)
    streams = ChunkStreams(store.redis)
    try:
        await streams.open(thinker, {"o": ["talker"]})
        writer = ChunkWriter(streams, thinker, "o", [Follower("talker", 1, 0)])
        for number in range(40):
            assert await writer.write(number) == number
        await streams.window_there(thinker, "talker", Post("talker", "q", b"m", b"", "t", "q"))
        talker = (job.id, "talker", (await begin(store, job, "talker")).fence)
        reader = ChunkReader(streams, talker, "thinker", "o", grant.fence)
        assert (await anext(reader)).value == 0
        assert await store.fail_stage(job.id, "talker", talker[2], ERROR)
        with pytest.raises(Unread):
            await writer.write(40)
        assert await store.redis.xlen(keys.stream(job.id, "thinker", "o")) == 40
        with pytest.raises(Refused):
            await reader.skip_rest()
        await writer.end()
        assert await store.finish_stage(job.id, "thinker", grant.fence, StageResult())
        assert (await store.get(job.id)).partial
        assert not await store.redis.exists(keys.stream(job.id, "thinker", "o"))
    finally:
        streams.close()


async def create_small(store: JobStore) -> JobRecord:
    """Its text is made by the first stage, its picture by the last."""
    spec = JobSpec(
        id=new_job_id(time.time()),
        pipeline="small",
        inputs={"prompt": "x"},
        parameters={},
        stages=["ar", "dit", "decode"],
        partial={"text": "ar", "image": "decode"},
        created=time.time(),
    )
    return await store.create(spec, {"ar": [], "dit": ["ar"], "decode": ["dit"]})


async def test_a_retry_of_the_dead_letter_makes_a_part_whole(small: None, store: JobStore) -> None:
    job = await create_small(store)
    info = ArtifactInfo(name="text.txt", content_type="text/plain", nbytes=2)
    info.key = await store.put_artifact(job.id, "text.txt", 1, b"hi")
    await run(store, job, "ar", values={"text": "hi"}, artifacts={"text.txt": info},
              outputs={"o": {"blob": blob(job, "ar").to_fields()}})  # fmt: skip
    await fail(store, job, "dit", "Traceback")
    assert (await store.get(job.id)).partial
    letters = DeadLetters(store)
    (letter,) = await letters.list()
    assert (letter.reason, letter.stage, letter.traceback) == ("engine_error", "dit", "Traceback")
    assert letter.resumes_at == ["ar"], "what it made for the failed stage is not kept"
    assert (await letters.retry(job.id)).state is JobState.QUEUED
    record = await store.get(job.id)
    assert not record.missing and record.values == {"text": "hi"}
    new = info.model_copy(update={"key": await store.put_artifact(job.id, "text.txt", 2, b"hi")})
    await run(store, job, "ar", values={"text": "hi"}, artifacts={"text.txt": new})
    await run(store, job, "dit")
    await run(store, job, "decode")
    record = await store.get(job.id)
    assert record.state is JobState.SUCCEEDED and not record.partial
    assert await store.get_artifact(job.id, "text.txt")
    assert not await store.redis.exists(info.key), "the old one is not left"
    assert not await letters.list()


async def test_a_retry_that_fails_earlier_costs_nothing_of_what_was_made(
    small: None, store: JobStore
) -> None:
    """Its text has been made, and is to be made again for what the failed stage reads."""
    job = await create_small(store)
    await run(store, job, "ar", values={"text": "hi"},
              outputs={"o": {"blob": blob(job, "ar").to_fields()}})  # fmt: skip
    await fail(store, job, "dit", "Traceback")
    letters = DeadLetters(store)
    for _ in range(2):
        await letters.retry(job.id)
        await fail(store, job, "ar", "Traceback")
        record = await store.get(job.id)
        assert record.state is JobState.SUCCEEDED and record.partial
        assert record.values == {"text": "hi"}
        assert {n: w.stage for n, w in record.missing.items()} == {"image": "ar"}
        assert (await last_event(store, job)).data["missing"].keys() == {"image"}
        assert [letter.stage for letter in await letters.list()] == ["ar"]


async def test_a_job_that_wants_only_some_outputs_can_be_retried(
    small: None, store: JobStore
) -> None:
    job = await submit(store, pipeline="small", inputs={"prompt": "x"}, outputs=["text"])
    assert job.spec.stages == ["ar"]
    await fail(store, job, "ar", "Traceback")
    letters = DeadLetters(store)
    (letter,) = await letters.list()
    assert letter.resumes_at == ["ar"]
    await letters.retry(job.id)
    messages = [json.loads(m) for m in await store.redis.lrange(QUEUE, 0, -1)]
    links = [json.loads(b64decode(m["body"]))[2] for m in messages]
    assert [link["chain"] for link in links] == [None, None], "nothing behind what it wants"
    await run(store, job, "ar", values={"text": "hi"})
    assert (await store.get(job.id)).state is JobState.SUCCEEDED


async def test_only_one_of_many_ends_counts(store: JobStore) -> None:
    """A stage that fails and one that succeeds at the same time: one end, and it is right."""
    for _ in range(20):
        job = await create(store, FORK, {"left": "b", "right": "d"})
        await run(store, job, "a")
        left, right = await begin(store, job, "b"), await begin(store, job, "c")
        assert all(
            await asyncio.gather(
                store.finish_stage(job.id, "b", left.fence, StageResult(values={"left": 1})),
                store.fail_stage(job.id, "c", right.fence, ERROR),
            )
        )
        record = await store.get(job.id)
        assert record.partial and record.values == {"left": 1}
        ends = [e.type async for e in store.events(job.id) if e is not None and e.final]
        assert ends == ["job.succeeded"]

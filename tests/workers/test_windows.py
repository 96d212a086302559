"""Window edges with real worker processes: stages that run side by side, and what may go wrong."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sounds import av_samples
from support import blobs_in, wait_until

from omniq import keys
from omniq.celery import app
from omniq.chain import task_id
from omniq.jobs.model import JobRecord, JobState
from omniq.jobs.store import JobStore
from omniq.submit import submit

Notes = Callable[..., list[str]]
RETRY = {"max_retries": 2, "backoff": 0.1, "max_deliveries": 3}


def define(stages: Any, *edges: str, window: int = 2, limit: int = 4, slots: int = 4) -> None:
    """The pipeline ``p``: ``a>b`` is a window edge, ``a=b`` a full one."""
    pairs = [(e[0], e[1], e[2]) for e in edges]
    names = list(dict.fromkeys(s for a, _, b in pairs for s in (a, b)))
    lines = [
        f"  - {{stage_id: {n}, engine_type: AR, engine: 'window_engines:Streaming', model: none, "
        f"max_in_flight: {slots}, retry: {json.dumps(RETRY)}}}"
        for n in names
    ]
    made = [f"  - {{from: input.prompt, to: {n}.prompt}}" for n in names]
    for a, how, b in pairs:
        more = f", trigger: window, window: {window}, window_limit: {limit}" if how == ">" else ""
        made.append(f"  - {{from: {a}.{'words' if more else 'text'}, to: {b}.{a}{more}}}")
    out = f"outputs: {{text: {{from: {pairs[-1][2]}.text, type: text}}}}"
    text = ["name: p", "inputs: {prompt: {type: text}}", "stages:", *lines, "edges:", *made, out]
    stages.define("a")  # settings; the file is written anew
    (stages.folder / "p.yaml").write_text("\n".join(text))


async def start_job(store: JobStore, prompt: str) -> JobRecord:
    return await submit(store, pipeline="p", inputs={"prompt": prompt})


async def ended(store: JobStore, job: JobRecord, timeout: float = 40) -> JobRecord:
    record = await store.wait(job.id, timeout)
    assert record.state.final, record
    return record


async def noted(notes: Notes, prefix: str, count: int = 1) -> None:
    await asyncio.to_thread(
        wait_until, lambda: len(notes(prefix)) >= count, 30, f"{count} x {prefix!r}"
    )


def words(count: int) -> str:
    return " ".join(f"w{i}" for i in range(count))


async def assert_nothing_left(store: JobStore, job: JobRecord, shm: Path) -> None:
    left = {k.decode() for k in await store.redis.keys(f"*{job.id}*")}
    assert left <= {keys.job(job.id), keys.job_events(job.id)}, left
    assert await store.redis.keys("omniq:blob:*") == []
    await asyncio.to_thread(wait_until, lambda: not blobs_in(shm), 10, "no blob left")


async def test_the_stage_behind_runs_while_the_one_before_still_produces(
    stages: Any, store: JobStore, notes: Notes, unacked: Any
) -> None:
    define(stages, "a>b")
    stages.start("a", "b")
    job = await start_job(store, "a:chunks=30 a:pace=0.05 a:tensors")
    record = await ended(store, job)
    assert record.state is JobState.SUCCEEDED
    assert record.values["text"] == words(30)
    assert [s.attempts for s in record.stages.values()] == [1, 1]
    said = notes()
    assert said.index(f"chunk b {job.id} 1") < said.index(f"done a {job.id}")
    assert notes("run b") == [f"run b {job.id}"], "the message behind the stage runs nothing twice"
    wait_until(lambda: unacked() == 0)
    await assert_nothing_left(store, job, stages.shm)


@pytest.mark.parametrize("how", ["whole", "thread", "chunks=1"])
async def test_any_way_of_producing_feeds_a_window_edge(
    stages: Any, store: JobStore, notes: Notes, how: str
) -> None:
    define(stages, "a>b")
    stages.start("a", "b")
    record = await ended(store, await start_job(store, f"a:{how}"))
    count = 1 if how == "chunks=1" else 3
    assert record.values["text"] == words(count)
    chunks = record.stages["b"].metrics["chunks"]
    assert chunks == (1 if how == "whole" else count)


async def test_windows_in_a_row_and_beside_a_full_edge(
    stages: Any, store: JobStore, notes: Notes
) -> None:
    define(stages, "a>b", "b>d", "c=d")
    stages.start("a", "b", "c", "d")
    job = await start_job(store, "a:chunks=20 a:pace=0.05 c:pace=0.1")
    record = await ended(store, job)
    assert record.values["text"] == words(20)
    assert len(notes("run d")) == 1
    said = notes()
    assert said.index(f"done c {job.id}") < said.index(f"run d {job.id}")
    assert said.index(f"run d {job.id}") < said.index(f"done a {job.id}")


async def test_revoking_only_the_readers_task_stops_its_producer_too(
    stages: Any, store: JobStore, notes: Notes, unacked: Any
) -> None:
    define(stages, "a>b")
    stages.start("a", "b")
    job = await start_job(store, "a:chunks=1000 b:pace=0.5")
    await noted(notes, f"chunk b {job.id}")
    fence = (await store.redis.hget(keys.job(job.id), "a|fence")).decode()
    app.control.revoke(task_id(job.id, "b", f"a-{fence}"), terminate=True)
    assert (await ended(store, job)).state is JobState.CANCELLED
    await noted(notes, f"stopped a {job.id}")
    wait_until(lambda: unacked() == 0)


async def test_a_killed_producer_frees_the_reader_and_both_run_again(
    stages: Any, store: JobStore, notes: Notes
) -> None:
    define(stages, "a>b", slots=1)
    stages.start("a", "b")
    job = await start_job(store, "a:chunks=60 a:pace=0.05 a:tensors")
    await noted(notes, f"chunk b {job.id} 4")
    stages.workers["a"].kill()
    # Nobody serves stage a: the reader's only slot is free for another job within the lease.
    await noted(notes, f"stopped b {job.id}")
    assert (await store.get(job.id)).stages["b"].state == "queued"
    stages.start("a")
    record = await ended(store, job)
    assert record.state is JobState.SUCCEEDED
    assert record.values["text"] == words(60)
    assert (record.stages["a"].attempts, record.stages["b"].attempts) == (2, 1)
    assert len(notes("run b")) == 2
    assert "Traceback" not in stages.workers["b"].output(), "a released run is no failure"
    await assert_nothing_left(store, job, stages.shm)


async def test_a_killed_reader_reads_again_from_the_start(
    stages: Any, store: JobStore, notes: Notes
) -> None:
    define(stages, "a>b")
    stages.start("a", "b")
    job = await start_job(store, "a:chunks=40 a:pace=0.05 a:tensors")
    await noted(notes, f"chunk b {job.id} 4")
    stages.workers["b"].kill()
    stages.start("b")
    record = await ended(store, job)
    assert record.values["text"] == words(40)
    assert (record.stages["a"].attempts, record.stages["b"].attempts) == (1, 2)
    assert notes("run a") == [f"run a {job.id}"], "the stage before is not repeated"


async def test_both_killed_at_once_run_again(stages: Any, store: JobStore, notes: Notes) -> None:
    define(stages, "a>b")
    stages.start("a", "b")
    job = await start_job(store, "a:chunks=40 a:pace=0.05")
    await noted(notes, f"chunk b {job.id} 4")
    for stage in "ab":
        stages.workers[stage].kill()
    stages.start("a", "b")
    record = await ended(store, job)
    assert (record.state, record.values["text"]) == (JobState.SUCCEEDED, words(40))


async def test_a_failing_producer_fails_the_job_once(
    stages: Any, store: JobStore, notes: Notes
) -> None:
    define(stages, "a>b")
    stages.start("a", "b")
    job = await start_job(store, "a:chunks=20 a:pace=0.05 a:fail=10")
    record = await ended(store, job)
    assert record.error is not None and record.error["code"] == "engine_error"
    await noted(notes, f"stopped b {job.id}")
    events = [e.type async for e in store.events(job.id) if e is not None]
    assert events.count("stage.failed") == events.count("job.failed") == 1
    assert record.stages["b"].state == "cancelled"
    await assert_nothing_left(store, job, stages.shm)


async def test_a_failing_reader_fails_the_job_and_stops_the_producer(
    stages: Any, store: JobStore, notes: Notes
) -> None:
    define(stages, "a>b")
    stages.start("a", "b")
    job = await start_job(store, "a:chunks=500 a:pace=0.02 b:fail=3")
    record = await ended(store, job)
    assert (record.state, record.stages["b"].state) == (JobState.FAILED, "failed")
    await noted(notes, f"stopped a {job.id}")
    await assert_nothing_left(store, job, stages.shm)


@pytest.mark.parametrize("stage", ["a", "b"])
async def test_a_retried_stage_repeats_what_it_must(
    stages: Any, store: JobStore, notes: Notes, stage: str
) -> None:
    define(stages, "a>b")
    stages.start("a", "b")
    job = await start_job(store, f"a:chunks=20 a:pace=0.03 a:tensors {stage}:retry=7")
    record = await ended(store, job)
    assert record.values["text"] == words(20)
    assert record.stages[stage].attempts == 2
    assert len(notes("run a")) == (2 if stage == "a" else 1)
    assert len(notes("run b")) == 2


async def test_a_producer_that_hangs_loses_its_reader_and_its_task(
    stages: Any, store: JobStore, notes: Notes
) -> None:
    """It comes to itself when its lease has lapsed; whoever runs it then, the result is right."""
    define(stages, "a>b", slots=1)
    stages.start("a", "b")
    job = await start_job(store, "a:chunks=12 a:pace=0.05 a:silent=4")
    await noted(notes, f"stopped b {job.id}")
    record = await ended(store, job)
    assert (record.state, record.values["text"]) == (JobState.SUCCEEDED, words(12))


async def test_cancelling_stops_both(
    stages: Any, store: JobStore, notes: Notes, unacked: Any
) -> None:
    define(stages, "a>b")
    stages.start("a", "b")
    job = await start_job(store, "a:chunks=500 a:pace=0.02 a:tensors b:pace=0.05")
    await noted(notes, f"chunk b {job.id} 3")
    await store.cancel(job.id)
    assert (await ended(store, job, 5)).state is JobState.CANCELLED
    await noted(notes, f"stopped a {job.id}")
    await noted(notes, f"stopped b {job.id}")
    wait_until(lambda: unacked() == 0)
    await assert_nothing_left(store, job, stages.shm)


@pytest.mark.parametrize("how", ["coroutine", "thread"])
async def test_a_slow_reader_holds_back_its_producer_and_no_other_job(
    stages: Any, store: JobStore, notes: Notes, how: str
) -> None:
    define(stages, "a>b", window=2, limit=4)
    stages.start("a", "b")
    slow = await start_job(store, f"a:chunks=40 a:{how} b:pace=0.15")
    await noted(notes, f"chunk b {slow.id} 2")
    if how == "coroutine":  # one that blocks the only model thread holds up those that need it
        quick = await start_job(store, "a:chunks=10")
        assert (await ended(store, quick)).values["text"] == words(10)
        assert not (await store.get(slow.id)).state.final
    record = await ended(store, slow)
    assert record.values["text"] == words(40)
    ahead, most = 0, 0
    for line in notes():
        if line == f"chunk a {slow.id} {ahead}":
            ahead += 1
        elif line.startswith(f"chunk b {slow.id} "):
            most = max(most, ahead - int(line.rpartition(" ")[2]))
    # The bound of the stream, the chunks that wait to be written, one at each end.
    assert 4 <= most <= 4 + 4 + 2 + 1


async def test_a_reader_that_needs_no_more_lets_the_producer_go_on(
    stages: Any, store: JobStore, notes: Notes
) -> None:
    define(stages, "a>b", limit=4)
    stages.start("a", "b")
    job = await start_job(store, "a:chunks=40 b:most=3")
    record = await ended(store, job)
    assert record.values["text"] == words(3)
    assert record.stages["a"].metrics["chunks"] == 40


async def test_a_stopping_producer_hands_over(stages: Any, store: JobStore, notes: Notes) -> None:
    define(stages, "a>b")
    # A lease so long that only the error mark can be what releases the reader.
    patient = {"OMNIQ_VISIBILITY_TIMEOUT": 300}
    stages.start("a", OMNIQ_DRAIN_SECONDS=0.2, **patient)
    stages.start("b", **patient)
    job = await start_job(store, "a:chunks=60 a:pace=0.05")
    await noted(notes, f"chunk b {job.id} 4")
    assert await asyncio.to_thread(stages.workers["a"].stop) == 0
    await noted(notes, f"stopped b {job.id}")
    stages.start("a", **patient)
    record = await ended(store, job)
    assert record.values["text"] == words(60)
    assert [s.attempts for s in record.stages.values()] == [1, 1]


async def test_streams_survive_a_broker_restart(
    own_valkey: Any, own_broker_stages: Any, notes: Notes
) -> None:
    stages = own_broker_stages
    define(stages, "a>b")
    stages.start("a", "b")
    store = JobStore.from_settings()
    job = await start_job(store, "a:chunks=60 a:pace=0.05")
    await store.close()
    await noted(notes, f"chunk b {job.id} 4")
    await asyncio.to_thread(own_valkey.stop)
    await asyncio.sleep(0.5)
    await asyncio.to_thread(own_valkey.start)
    store = JobStore.from_settings()
    record = await ended(store, job)
    assert (record.state, record.values["text"]) == (JobState.SUCCEEDED, words(60))
    assert len(notes("run a")) == 1
    await store.close()


async def test_clients_see_chunks_of_the_pipelines_outputs(stages: Any, store: JobStore) -> None:
    stages.define("a")
    text = (
        (stages.folder / "p.yaml")
        .read_text()
        .replace("stage_engines:Scripted", "window_engines:Painter")
    )
    text = text.replace(
        "outputs: {",
        "outputs: {picture: {from: a.image, type: image}, "
        "sound: {from: a.audio, type: audio, sample_rate: 8000, format: flac}, ",
    )
    (stages.folder / "p.yaml").write_text(text)
    stages.start("a")
    job = await start_job(store, "x")
    record = await ended(store, job)
    assert record.state is JobState.SUCCEEDED
    deltas = [
        e.data async for e in store.events(job.id) if e is not None and e.type == "stage.delta"
    ]
    said = [d["value"]["text"] for d in deltas if d["output"] == "text"]
    assert said == ["0 ", "1 ", "2 "]
    shown = [d for d in deltas if d["output"] == "image"]
    assert [d["sequence"] for d in shown] == [0, 1, 2]
    for delta in shown:
        name = delta["artifact"]["name"]
        data, info = await store.get_artifact(job.id, name)
        assert data.startswith(b"\x89PNG") and info.meta["sequence"] == delta["sequence"]
    heard = [d for d in deltas if d["output"] == "audio"]
    assert [d["sequence"] for d in heard] == [0, 1, 2]
    assert all("artifact" not in d and d["value"]["sample_rate"] == 8000 for d in heard)
    data, info = await store.get_artifact(job.id, "sound")
    assert info.content_type == "audio/flac" and info.meta["samples"] == 1200
    samples, _ = av_samples(data)
    pcm = b"".join(base64.b64decode(d["value"]["audio"]) for d in heard)
    assert pcm == samples.astype("<i2").tobytes(), "the chunks in a row are the whole"
    assert await store.get_artifact(job.id, "picture")

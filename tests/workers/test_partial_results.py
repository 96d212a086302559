"""Jobs that end without some outputs, with real worker processes: optional stages that fail, that
stream or are streamed to, or that nobody runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import blobs_in, wait_until

from omniq import keys
from omniq.jobs.dead import DeadLetters
from omniq.jobs.model import JobRecord, JobState
from omniq.jobs.store import JobStore
from omniq.submit import submit

Notes = Callable[..., list[str]]
LIMIT = 4


def define(stages: Any, *edges: str, outputs: dict[str, str]) -> None:
    """The pipeline ``p`` of stages that stream to each other: ``a>b``; a stage alone: ``a``."""
    pairs = [e.split(">") for e in edges]
    names = list(dict.fromkeys(s for p in pairs for s in p))
    retry = json.dumps({"max_retries": 0, "max_deliveries": 3})
    lines = [
        f"  - {{stage_id: {n}, engine_type: AR, engine: 'window_engines:Streaming', model: none, "
        f"max_in_flight: 4, retry: {retry}}}"
        for n in names
    ]
    made = [f"  - {{from: input.prompt, to: {n}.prompt}}" for n in names]
    made += [
        f"  - {{from: {a}.words, to: {b}.{a}, trigger: window, window: 2, window_limit: {LIMIT}}}"
        for a, *rest in pairs
        for b in rest
    ]
    out = ", ".join(f"{o}: {{from: {s}.text, type: text}}" for o, s in outputs.items())
    stages.define("a")  # settings; the file is written anew
    text = ["name: p", "inputs: {prompt: {type: text}}", "stages:", *lines]
    text += ["edges:", *made, f"outputs: {{{out}}}"]
    (stages.folder / "p.yaml").write_text("\n".join(text))


async def start_job(store: JobStore, prompt: str, **more: Any) -> JobRecord:
    more = {"allow_partial": True, **more}
    return await submit(store, pipeline="p", inputs={"prompt": prompt}, **more)


async def ended(store: JobStore, job: JobRecord) -> JobRecord:
    record = await store.wait(job.id, 40)
    assert record.state.final, record
    return record


async def noted(notes: Notes, line: str) -> None:
    await asyncio.to_thread(wait_until, lambda: line in notes(), 20, line)


def words(count: int) -> str:
    return " ".join(f"w{i}" for i in range(count))


async def assert_nothing_left(store: JobStore, job: JobRecord, shm: Path) -> None:
    left = {k.decode() for k in await store.redis.keys(f"*{job.id}*")}
    assert left <= {keys.job(job.id), keys.job_events(job.id)}, left
    await asyncio.to_thread(wait_until, lambda: not blobs_in(shm), 10, "no blob left")


async def test_a_reader_that_fails_costs_only_what_it_would_have_made(
    stages: Any, store: JobStore, notes: Notes, unacked: Any
) -> None:
    """The thinker goes on to its end though nobody takes what it streams."""
    define(stages, "a>b", outputs={"text": "a", "sound": "b"})
    stages.start("a", "b")
    prompt = "a:chunks=60 a:pace=0.02 a:tensors b:fail=3"
    job = await start_job(store, prompt)
    record = await ended(store, job)
    assert record.state is JobState.SUCCEEDED and record.partial
    assert record.values == {"text": words(60)}
    assert record.missing["sound"].stage == "b"
    assert record.missing["sound"].error["message"] == "broken by request"
    assert (record.stages["a"].attempts, record.stages["b"].state) == (1, "failed")
    wait_until(lambda: unacked() == 0)
    (letter,) = await DeadLetters(store).list()
    assert (letter.id, letter.stage, letter.resumes_at) == (job.id, "b", ["a"])
    await assert_nothing_left(store, job, stages.shm)
    # It fails again, and again the text is there.
    await DeadLetters(store).retry(job.id)
    record = await ended(store, job)
    assert record.partial and record.values == {"text": words(60)}
    whole = await ended(store, await start_job(store, prompt, allow_partial=False))
    assert whole.state is JobState.FAILED
    await assert_nothing_left(store, job, stages.shm)


async def test_a_stage_that_nobody_runs_costs_its_outputs_at_the_deadline(
    stages: Any, store: JobStore, notes: Notes
) -> None:
    """The stage before writes more than its reader may be behind, and waits for nobody."""
    define(stages, "a>b", outputs={"text": "a", "sound": "b"})
    stages.start("a")
    job = await start_job(store, f"a:chunks={5 * LIMIT} a:tensors", timeout=12)
    await noted(notes, f"done a {job.id}")
    record = await ended(store, job)
    assert record.partial and record.values == {"text": words(5 * LIMIT)}
    why = record.missing["sound"]
    assert (why.stage, why.error["code"]) == ("b", "deadline_exceeded")
    await assert_nothing_left(store, job, stages.shm)
    # A job that does not want the sound at all writes nothing for who would make it.
    job = await start_job(store, "a:chunks=20 a:tensors a:pace=0.05", outputs=["text"])
    await noted(notes, f"chunk a {job.id} 15")
    assert not await store.redis.exists(keys.stream(job.id, "a", "words"))
    assert not await store.redis.exists(keys.job_blobs(job.id)) and not blobs_in(stages.shm)
    record = await ended(store, job)
    assert record.state is JobState.SUCCEEDED and not record.partial
    await assert_nothing_left(store, job, stages.shm)


async def test_what_ran_for_the_failed_stage_stops_and_the_rest_goes_on(
    stages: Any, store: JobStore, notes: Notes, unacked: Any
) -> None:
    """A reader of the failed stage ends, and so does what only fed it."""
    define(stages, "a", "b>c", outputs={"text": "a", "sound": "c"})
    stages.start("a", "b", "c")
    endless = "a:chunks=60 a:pace=0.05 b:chunks=100000 b:pace=0.02"
    producer_fails = await start_job(store, f"{endless} b:fail=10")
    reader_fails = await start_job(store, f"{endless} c:fail=10")
    await noted(notes, f"stopped c {producer_fails.id}")
    await noted(notes, f"stopped b {reader_fails.id}")
    for job, failed, other in ((producer_fails, "b", "c"), (reader_fails, "c", "b")):
        record = await ended(store, job)
        assert record.partial and record.values == {"text": words(60)}
        assert record.missing["sound"].stage == failed
        states = {name: stage.state.value for name, stage in record.stages.items()}
        assert states == {"a": "succeeded", failed: "failed", other: "cancelled"}
        assert len(notes(f"run a {job.id}")) == 1
        events = [e.type async for e in store.events(job.id) if e is not None and e.final]
        assert events == ["job.succeeded"]
        await assert_nothing_left(store, job, stages.shm)
    wait_until(lambda: unacked() == 0)

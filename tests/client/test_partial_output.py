"""Python clients and `omniq generate` of a job that ends without some outputs; a played worker."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner

from omniq.async_client import AsyncOmniLLM
from omniq.cli.dlq import dlq
from omniq.cli.generate import generate
from omniq.cli.jobs import jobs
from omniq.errors import InvalidRequest, JobFailed
from omniq.jobs.model import JobState, StageResult
from omniq.jobs.store import JobStore
from omniq.settings import get_settings

ERROR = {"code": "engine_error", "message": "the engine is broken"}


async def play(store: JobStore, seen: set[str]) -> str:
    """Make the text of the next job, and fail to make its picture; returns its id."""
    while not (new := {r.id for r in (await store.list())[0]} - seen):
        await asyncio.sleep(0.01)
    (job_id,) = new
    grant = await store.begin_stage(job_id, "ar", "w", redelivered=False)
    result = StageResult(values={"text": "A red circle."})
    assert await store.finish_stage(job_id, "ar", grant.fence, result)
    grant = await store.begin_stage(job_id, "dit", "w", redelivered=False)
    assert await store.fail_stage(job_id, "dit", grant.fence, ERROR)
    seen.add(job_id)
    return job_id


async def test_a_growing_text_is_that_of_the_first_choice(broker: object) -> None:
    """As that of the finished output is, whichever choice says more first."""
    store = JobStore.from_settings()
    try:
        async with AsyncOmniLLM(broker_url=get_settings().url) as llm:
            job_id = await llm.submit("x", outputs=["text"])
            grant = await store.begin_stage(job_id, "ar", "w", redelivered=False)
            for index, piece in ((1, "An"), (0, "A "), (1, "other"), (0, "red")):
                value = {"index": index, "text": piece}
                assert await store.delta(job_id, "ar", grant.fence, "text", value)
            output = await llm.poll(job_id)
            async for event in store.events(job_id, block=1):
                if event is None:
                    break
                output.apply(event)
            assert output.text == "A red"
            with pytest.raises(InvalidRequest, match="parameters: must be a mapping, not list"):
                await llm.submit("x", ["seed"])  # type: ignore[arg-type]
    finally:
        await store.close()


async def test_what_strangers_say_moves_no_terminal(
    broker: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIQ_BROKER_URL", get_settings().url)
    evil = "\x1b]0;owned\x07\x9b2J\u202ered"
    store = JobStore.from_settings()
    try:
        async with AsyncOmniLLM(broker_url=get_settings().url) as llm:
            job_id = await llm.submit({"prompt": evil})
            grant = await store.begin_stage(job_id, "ar", "w", redelivered=False)
            await store.delta(job_id, "ar", grant.fence, "text", {"text": evil})
            error = {"code": "engine_error", "message": evil}
            assert await store.fail_stage(job_id, "ar", grant.fence, error, traceback=evil)
        for command, args in (
            (jobs, ["list"]), (jobs, ["show", job_id]), (jobs, ["events", job_id]),
            (jobs, ["events", job_id, "--json"]), (jobs, ["show", job_id, "--json"]),
            (dlq, ["list"]), (dlq, ["show", job_id]),
        ):  # fmt: skip
            done = await asyncio.to_thread(CliRunner().invoke, command, args)
            assert done.exit_code == 0, done.output
            assert "owned" in done.output
            assert all(c.isprintable() or c == "\n" for c in done.output)
            if args[-1] == "--json":
                json.loads(done.output.splitlines()[-1] if args[0] == "events" else done.output)
    finally:
        await store.close()


async def test_clients_and_shell_get_the_part_and_are_told(
    broker: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, seen = JobStore.from_settings(), set[str]()
    url = get_settings().url
    try:
        async with AsyncOmniLLM(broker_url=url) as llm:
            asking = asyncio.create_task(llm.generate("x", allow_partial=True))
            await play(store, seen)
            output = await asking
            assert output.partial and output.text == "A red circle."
            assert output.missing["image"].stage == "dit"
            asking = asyncio.create_task(llm.generate("x"))
            await play(store, seen)
            with pytest.raises(JobFailed, match="the engine is broken"):
                await asking
        monkeypatch.setenv("OMNIQ_BROKER_URL", url)
        get_settings.cache_clear()
        for flags in (["--json"], []):
            command = ["x", "--allow-partial", *flags]
            asked = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, generate, command))
            job_id = await play(store, seen)
            done = await asked
            assert done.exit_code == 0, done.output
            warning = "omniq: warning: no image: stage dit: the engine is broken"
            assert warning in done.stderr
            if flags:
                missing = json.loads(done.stdout)["missing"]
                assert missing == {"image": {"stage": "dit", "error": ERROR}}
            else:
                assert done.stdout == "A red circle.\n"
        shown = await asyncio.to_thread(CliRunner().invoke, jobs, ["show", job_id])
        assert f"{job_id}  {JobState.SUCCEEDED.value} (partial)" in shown.output
        assert "missing image: stage dit: engine_error: the engine is broken" in shown.output
    finally:
        await store.close()

"""OmniLLM and AsyncOmniLLM on real workers of a pipeline without a model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator

import pytest
from stand_in import stand_in
from support import wait_until

from omniq import AsyncOmniLLM, OmniLLM
from omniq.errors import (
    ConfigError,
    IdempotencyConflict,
    InvalidRequest,
    JobFailed,
    JobNotFound,
    Overloaded,
)
from omniq.jobs import admission
from omniq.jobs.model import JobState
from omniq.runtime.local import LocalSystem
from omniq.settings import get_settings


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSystem]:
    """One running system for the tests of this file, which clients find by its URL."""
    with stand_in(tmp_path_factory.mktemp("pipeline")), LocalSystem("stand-in") as running:
        yield running


@pytest.fixture
def llm(system: LocalSystem) -> Iterator[OmniLLM]:
    with OmniLLM("stand-in", broker_url=get_settings().url) as client:
        yield client


@pytest.fixture
async def allm(system: LocalSystem) -> AsyncIterator[AsyncOmniLLM]:
    async with AsyncOmniLLM("stand-in", broker_url=get_settings().url) as client:
        yield client


def test_one_prompt_gives_a_list_of_one(llm: OmniLLM) -> None:
    (output,) = llm.generate("hello world")
    assert output.finished
    assert output.text == "HELLO WORLD"
    assert output.prompt == "hello world"
    assert output.error is None
    assert output.images == []


def test_outputs_come_in_the_order_of_the_prompts(llm: OmniLLM) -> None:
    prompts = [f"number {i} {'more ' * (7 - i)}" for i in range(8)]
    outputs = llm.generate(prompts)
    assert [o.prompt for o in outputs] == prompts
    assert [o.text for o in outputs] == [" ".join(p.upper().split()) for p in prompts]


def test_all_prompts_are_submitted_at_once(llm: OmniLLM) -> None:
    """The first stage works on later prompts while the second one has earlier ones."""
    outputs = llm.generate(["one two three four five six"] * 8)
    first, second = ([o.stages[s] for o in outputs] for s in ("first", "second"))
    assert max(s.started or 0 for s in first) < max(s.finished or 0 for s in second)
    assert min(s.started or 0 for s in second) < max(s.finished or 0 for s in second)
    spread = max(s.queued or 0 for s in first) - min(s.queued or 0 for s in first)
    took = max(s.finished or 0 for s in second) - min(s.queued or 0 for s in first)
    assert spread < took / 2


def test_parameters_for_all_and_for_each(llm: OmniLLM) -> None:
    outputs = llm.generate(["a", "b"], [{"max_tokens": 1}, {"max_tokens": 2}], seed=7)
    assert all(o.state is JobState.SUCCEEDED for o in outputs)
    with pytest.raises(InvalidRequest, match="one for each of the 2 prompts"):
        llm.generate(["a", "b"], [{}])


def test_one_invalid_request_submits_nothing(llm: OmniLLM) -> None:
    with pytest.raises(InvalidRequest, match=r"parameters\.max_tokens"):
        llm.generate(["a", "b"], [{}, {"max_tokens": 0}])
    with pytest.raises(InvalidRequest, match=r"input\.prompt"):
        llm.generate(["a", ""])


def test_failed_job_raises_after_the_others_have_ended(llm: OmniLLM) -> None:
    with pytest.raises(JobFailed, match="told to fail") as caught:
        llm.generate(["good", "please fail"])
    assert caught.value.details["state"] == "failed"
    assert len(caught.value.details["failed"]) == 1


def test_failed_job_is_an_output_if_asked_for(llm: OmniLLM) -> None:
    good, bad = llm.generate(["good", "please fail"], raise_on_error=False)
    assert good.text == "GOOD"
    assert bad.state is JobState.FAILED
    assert bad.finished
    assert bad.error is not None
    assert bad.error["message"] == "told to fail"


async def test_many_at_a_time(allm: AsyncOmniLLM) -> None:
    """More than have a connection of their own to listen on."""
    outputs = await asyncio.gather(*(allm.generate(f"word {i}") for i in range(80)))
    assert [o.text for o in outputs] == [f"WORD {i}" for i in range(80)]


async def test_stream_grows_and_ends_with_the_finished_output(allm: AsyncOmniLLM) -> None:
    prompt = "a b c d e f g h i j k l m n o p q r s t"
    texts, steps, finished = [], [], []
    async for output in allm.stream(prompt):
        texts.append(output.text or "")
        steps.append(output.stages["first"].step or 0)
        finished.append(output.finished)
    assert texts[-1] == prompt.upper()
    assert all(texts[-1].startswith(text) for text in texts)
    assert len({text for text in texts if text}) > 2, "the text grows"
    assert any(0 < step < 20 for step in steps)
    assert finished[-1]
    assert not any(finished[:-1])


async def test_stream_of_a_failing_job_raises(allm: AsyncOmniLLM) -> None:
    with pytest.raises(JobFailed, match="told to fail"):
        async for _ in allm.generate_stream("fail"):
            pass


async def test_leaving_a_stream_cancels_the_job(allm: AsyncOmniLLM) -> None:
    stream = allm.stream("slow one")
    output = await anext(stream)
    await stream.aclose()
    ended = await allm.result(output.job_id, raise_on_error=False)
    assert ended.state is JobState.CANCELLED


async def test_cancelled_generate_cancels_the_job(allm: AsyncOmniLLM) -> None:
    task = asyncio.create_task(allm.generate("slow job to cancel"))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store = await allm._connected()
    records, _ = await store.list(limit=1)
    ended = await allm.result(records[0].id, raise_on_error=False)
    assert ended.prompt == "slow job to cancel"
    assert ended.state is JobState.CANCELLED


async def test_submit_poll_cancel(allm: AsyncOmniLLM) -> None:
    job_id = await allm.submit("slow", metadata={"user": "ada"})
    assert not (await allm.poll(job_id)).finished
    await allm.cancel(job_id)
    with pytest.raises(JobFailed, match="cancelled"):
        await allm.result(job_id)


async def test_unknown_job_is_an_error(allm: AsyncOmniLLM) -> None:
    with pytest.raises(JobNotFound):
        await allm.poll("nope")
    with pytest.raises(JobNotFound):
        await allm.result("nope")


def test_wrong_types_are_named(llm: OmniLLM) -> None:
    for wrong in (None, 5):
        with pytest.raises(InvalidRequest, match="prompts: must be"):
            llm.generate(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="parameters: must be"):
        llm.generate("x", 5)  # type: ignore[arg-type]


def test_a_fork_of_the_process_gets_an_error_not_a_hang(llm: OmniLLM) -> None:
    if (child := os.fork()) == 0:
        try:
            llm.generate("x")
        except ConfigError:
            os._exit(7)
        os._exit(1)
    wait_until(lambda: os.waitpid(child, os.WNOHANG) == (child, 7 << 8), 10, "the child ends")


def test_a_batch_waits_where_there_is_no_room_for_all_of_it(
    llm: OmniLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_KNOWN", {})
    monkeypatch.setattr(get_settings(), "max_jobs", 3)
    outputs = llm.generate([f"number {i}" for i in range(10)])
    assert [o.text for o in outputs] == [f"NUMBER {i}" for i in range(10)]


async def test_a_single_request_is_told_that_there_is_no_room(
    allm: AsyncOmniLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "_KNOWN", {})
    monkeypatch.setattr(get_settings(), "max_jobs", 1)
    job = await allm.submit("one two three four five six seven eight nine ten")
    with pytest.raises(Overloaded) as refused:
        await allm.generate("x")
    assert refused.value.limit == "pipeline_jobs"
    await allm.cancel(job)


def test_only_the_outputs_that_are_asked_for_are_made(llm: OmniLLM) -> None:
    """Of each prompt; stages that none of them needs do not run."""
    made = llm.generate(["a b", "c"], outputs=["draft"])
    assert [o.values for o in made] == [{"draft": "A B"}, {"draft": "C"}]
    assert [list(o.stages) for o in made] == [["first"]] * 2
    assert [o.text for o in made] == ["A B", "C"]
    for wanted in (["text"], ["text", "draft"], None):
        (whole,) = llm.generate("a b", outputs=wanted)
        assert list(whole.stages) == ["first", "second"]
        assert "text" in whole.values
    for wrong, says in ((["song"], "; got 'song'"), ([], "")):
        with pytest.raises(InvalidRequest, match=f"outputs: must be some of text, draft{says}$"):
            llm.generate("a", outputs=wrong)


async def test_only_the_outputs_that_are_asked_for_are_streamed(allm: AsyncOmniLLM) -> None:
    """By every call that takes them; another choice is another request."""
    seen = [list(o.stages) async for o in allm.stream("a b", outputs=["draft"])]
    assert seen[1:]
    assert all(stages == ["first"] for stages in seen)
    made = await allm.generate("a b", outputs=["draft"], idempotency_key="o", seed=1)
    assert (made.values, list(made.stages)) == ({"draft": "A B"}, ["first"])
    job = await allm.submit("a b", outputs=["draft"], idempotency_key="o", seed=1)
    assert job == made.job_id
    with pytest.raises(IdempotencyConflict):
        await allm.submit("a b", outputs=["text"], idempotency_key="o", seed=1)
    with pytest.raises(InvalidRequest, match="got 'song'"):
        await allm.submit("a", outputs=["song"])


def test_a_batch_sent_again_by_its_key_is_the_same_jobs(llm: OmniLLM) -> None:
    first = llm.generate(["a", "b"], idempotency_key="k", seed=1)
    again = llm.generate(["a", "b"], idempotency_key="k", seed=1)
    assert [o.job_id for o in again] == [o.job_id for o in first]
    with pytest.raises(IdempotencyConflict):
        llm.generate(["a", "c"], idempotency_key="k", seed=1)
    with pytest.raises(IdempotencyConflict):
        llm.generate(["a"], idempotency_key="k", seed=1)

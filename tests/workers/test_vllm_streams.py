"""Streams out of a worker with vLLM: to a client while the worker is stopped, to the next stage."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support import blobs_in, wait_until
from tiny_models import make_language_model, make_tokenizer

from omniq.config import available_pipelines
from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore
from omniq.serve.flags import ServeFlags
from omniq.serve.pipeline_file import pipeline_yaml
from omniq.serve.target import resolve_model
from omniq.submit import submit

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

CONTEXT = 2048
TOKENS = 600
"""Of an answer: some seconds of the tiny model's time."""
CHUNK = 16
ARGS = {"max_model_len": CONTEXT, "max_num_seqs": 4, "in_process": True}
LISTENED = f"""
name: p
inputs: {{prompt: {{type: text}}}}
stages:
  - stage_id: ar
    engine_type: AR
    engine: vllm
    model: MODEL
    dtype: float32
    output_modalities: [text, hidden_states]
    engine_args: {json.dumps({**ARGS, "stream_tokens": CHUNK})}
  - {{stage_id: listen, engine_type: AR, engine: "vllm_engines:Listener", model: none}}
edges:
  - {{from: input.prompt, to: ar.prompt}}
  - {{from: ar.token_ids, to: listen.token_ids, trigger: window, window: 1}}
  - {{from: ar.hidden_states, to: listen.states, trigger: window, window: 1}}
outputs:
  text: {{from: ar.text, type: text}}
  heard: {{from: listen.heard, type: json}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with room for long answers."""
    folder = tmp_path_factory.mktemp("models") / "long"
    tokenizer = make_tokenizer()
    make_language_model(tokenizer, context=CONTEXT).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
async def client(stages: Any, model: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Of the API in this process; the model is served as ``p``."""
    from omniq_api.app import create_app

    stages.define("ar")
    flags = ServeFlags(str(model), engine="vllm", engine_args={**ARGS, "dtype": "float32"})
    pipeline = resolve_model(flags).model_copy(update={"name": "p"})
    (stages.folder / "p.yaml").write_text(pipeline_yaml(pipeline))
    available_pipelines.cache_clear()
    app = create_app()
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
            yield client


def worker(stages: Any, name: str, drain: float) -> Any:
    """A worker of the stage ``ar`` that is ready."""
    command = [sys.executable, str(Path(__file__).parent / "run_stage.py"), "ar"]
    process = stages.spawn(name, command, OMNIQ_DRAIN_SECONDS=drain)
    process.wait_for("stage_ready", 150)
    return process


@pytest.mark.parametrize("drain", [0.2, 60.0], ids=["handed-back", "finished"])
async def test_a_stopped_worker_costs_the_client_nothing(
    stages: Any, store: JobStore, client: httpx.AsyncClient, drain: float
) -> None:
    """SIGTERM within a stream: the run ends in time, or a new worker goes on where the client is.

    Every token comes once: the text is that of a run of its own, and each has its probability.
    """
    body = {
        "model": "p",
        "messages": [{"role": "user", "content": "a red circle above a blue square"}],
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "seed": 7,
        "ignore_eos": True,
        "logprobs": True,
    }
    first = await asyncio.to_thread(worker, stages, "one", drain)
    alone = (await client.post("/v1/chat/completions", json=body, timeout=120)).json()
    asking = asyncio.create_task(
        client.post("/v1/chat/completions", json={**body, "stream": True}, timeout=240)
    )
    job = await _begun(store, alone["id"].removeprefix("chatcmpl-"))
    stopped = await asyncio.to_thread(first.stop, timeout=90)
    assert stopped == 0, first.output()
    last = first
    if drain < 1:
        assert not (await store.get(job)).state.final
        last = await asyncio.to_thread(worker, stages, "two", drain)
    response = await asking
    lines = [x[6:] for x in response.text.splitlines() if x.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    said = "".join(c["delta"].get("content", "") for c in choices)
    assert said == alone["choices"][0]["message"]["content"]
    probabilities = [t for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]
    assert len(probabilities) == TOKENS
    assert [t["token"] for t in probabilities] == [
        t["token"] for t in alone["choices"][0]["logprobs"]["content"]
    ]
    assert choices[-1]["finish_reason"] == "length"
    record = await store.get(job)
    assert record.state is JobState.SUCCEEDED
    # Going back to the queue is no failed attempt.
    assert record.stages["ar"].attempts == 1
    assert f".{last.popen.pid}@" in record.stages["ar"].worker


async def _begun(store: JobStore, other: str) -> str:
    """The id of the job that is not ``other``, once the client has some of its text."""
    async with asyncio.timeout(60):
        while True:
            (found, _) = await store.list(limit=10)
            ids = [record.id for record in found if record.id != other]
            if ids:
                break
            await asyncio.sleep(0.01)
        pieces = 0
        async for event in store.events(ids[0]):
            assert event is None or not event.final, "too fast for this test"
            pieces += event is not None and event.type == "stage.delta"
            if pieces == 3:
                return ids[0]
    raise AssertionError("the events have ended")


async def test_a_stage_hears_tokens_and_states_while_they_are_made(
    stages: Any, store: JobStore, model: Path, notes: Callable[..., list[str]]
) -> None:
    """Two workers: it begins with the first window, and has heard what transformers computes."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stages.define("ar")
    (stages.folder / "p.yaml").write_text(LISTENED.replace("MODEL", str(model)))
    available_pipelines.cache_clear()
    stages.start("ar", "listen", ready=False)
    for process in stages.workers.values():
        await asyncio.to_thread(process.wait_for, "stage_ready", 150)
    prompt = "a red circle"
    job = await submit(
        store,
        pipeline="p",
        inputs={"prompt": prompt},
        parameters={"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True},
    )
    record = await store.wait(job.id, 90)
    assert record.state is JobState.SUCCEEDED, record
    ar, listen = record.stages["ar"], record.stages["listen"]
    assert (ar.attempts, listen.attempts) == (1, 1)
    assert listen.started < ar.finished < listen.finished
    heard = record.values["heard"]
    assert len(heard["ids"]) == TOKENS
    # What has come since the last chunk goes as one, at least so many but in the last.
    assert all(size >= CHUNK for size in heard["sizes"][:-1])
    assert len(heard["sizes"]) > TOKENS // CHUNK // 4
    assert len(notes("heard")) == len(heard["sizes"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.decode(heard["ids"], skip_special_tokens=True) == record.values["text"]
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        out = reference(torch.tensor([ids + heard["ids"]]), output_hidden_states=True)
    expected = out.hidden_states[-1][0, len(ids) - 1 : -1]
    rows = torch.load(stages.folder / "heard.pt")
    assert rows.shape == expected.shape
    assert torch.cosine_similarity(rows, expected, dim=-1).min() > 0.9999
    assert await store.redis.keys(f"*{job.id}:stream*") == []
    await asyncio.to_thread(wait_until, lambda: not blobs_in(stages.shm), 10, "no blob left")

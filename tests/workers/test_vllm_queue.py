"""500 requests queued for one worker with vLLM: order, and how much it takes at a time."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import wait_until
from tiny_models import make_language_model, make_tokenizer

from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore
from omniq.submit import submit

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

RUNNING = 8
WINDOW = RUNNING + 1
"""What vLLM runs, and one more that waits to join."""
PIPELINE = """
name: p
inputs: {{prompt: {{type: text}}}}
stages:
  - stage_id: ar
    engine_type: AR
    engine: "vllm_engines:Counted"
    model: {model}
    dtype: float32
    engine_args: {args}
edges:
  - {{from: input.prompt, to: ar.prompt}}
outputs: {{text: {{from: ar.text, type: text}}}}
"""


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    tokenizer = make_tokenizer()
    folder = tmp_path / "model"
    make_language_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.timeout(400)
async def test_500_requests_go_in_order_and_are_taken_as_there_is_room(
    stages: Any,
    store: JobStore,
    chat_model: Path,
    unacked: Callable[[], int],
    notes: Callable[..., list[str]],
) -> None:
    """Urgent ones first but for one in nine, first in first out among equals; none is left, none is
    held in excess.
    """
    stages.define("ar")
    args = {"max_model_len": 96, "max_num_seqs": RUNNING, "in_process": True}
    text = PIPELINE.format(model=chat_model, args=json.dumps(args))
    (stages.folder / "p.yaml").write_text(text)
    params = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    priorities = [(0, 5, 9)[i % 3] for i in range(500)]
    jobs = [
        await submit(
            store,
            pipeline="p",
            inputs={"prompt": f"circle {i}"},
            parameters=params,
            priority=priority,
        )
        for i, priority in enumerate(priorities)
    ]
    stages.start("ar", ready=False)
    await asyncio.to_thread(stages.workers["ar"].wait_for, "stage_ready", 150)
    most = 0
    for job in jobs:
        while not (record := await store.get(job.id)).state.final:
            most = max(most, unacked())
            await asyncio.sleep(0.005)
        assert record.state is JobState.SUCCEEDED, record
    # Those that are done with are noted so a moment later, all together.
    assert 1 < most <= 2 * WINDOW
    wait_until(lambda: unacked() == 0)
    records = [await store.get(job.id) for job in jobs]
    # With so many waiting, both are full at some time; the notes are of each new maximum.
    assert notes("engine holds")[-1] == f"engine holds {WINDOW}"
    assert notes("vllm runs")[-1] == f"vllm runs {RUNNING}"
    started = sorted(range(500), key=lambda i: records[i].stages["ar"].started or 0.0)
    # Those of one window start together: their order among themselves is chance.
    for level in (0, 5, 9):
        order = [i for i in started if priorities[i] == level]
        assert max(abs(order.index(i) - at) for at, i in enumerate(sorted(order))) < WINDOW
    # After eight by priority one of another level has its turn (take.lua), so that none starves.
    urgent = sum(priorities[i] == 9 for i in started[:150])
    assert 150 * 8 / 9 - WINDOW < urgent < 150

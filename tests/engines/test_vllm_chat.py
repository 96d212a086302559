"""A real chat model (SmolLM2-135M-Instruct) through the vLLM engine and through transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import smollm2
import torch
from engine_helpers import ask, loaded, stage

from omniq.engines.base import NullEmit, StageInput, StageRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # the first time the model is dequantised
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
    pytest.mark.skipif(
        smollm2.missing() is not None, reason=f"needs the model: {smollm2.missing()}"
    ),
]


@pytest.fixture(scope="module")
def chat_model() -> Path:
    return smollm2.convert()


async def test_it_answers_and_its_states_are_transformers(chat_model: Path) -> None:
    """A true answer; each row is the state that transformers gives for the same tokens.

    In float32: over 30 layers two bfloat16 forwards differ from each other as much as each from
    the truth (cosine 0.997 at the worst position here).
    """
    from transformers import AutoModelForCausalLM

    config = stage(
        chat_model,
        "ar",
        engine="vllm",
        subfolder=None,
        dtype="float32",
        engine_args={"max_model_len": 512, "hidden_states": {"positions": "all"}},
    )
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = {"max_tokens": 24, "temperature": 0.0}
    engine = await loaded(config)
    try:
        out = await engine.run(
            StageRequest("chat", params), {"messages": StageInput(messages)}, NullEmit()
        )
        same = await ask(engine, params, prompt=messages[0]["content"])
        ids = engine._reader._encoder.encode_chat(messages, 512)
    finally:
        await engine.unload()
    assert "Paris" in out.values["text"]
    assert same.values["text"] == out.values["text"]
    tokens = out.tensors["token_ids"]["token_ids"].tolist()
    reference = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32).eval()
    with torch.no_grad():
        given = torch.tensor([ids + tokens])
        states = reference(given, output_hidden_states=True).hidden_states[-1][0]
    for name, expected in (
        ("prompt_hidden_states", states[: len(ids)]),
        ("hidden_states", states[len(ids) - 1 : -1]),
    ):
        rows = out.tensors[name][name]
        assert rows.shape == expected.shape
        assert (rows - expected).norm() / expected.norm() < 1e-3
        assert torch.cosine_similarity(rows, expected, dim=-1).min() > 0.9999

"""The vLLM AR engine against the transformers one, in a process of its own."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine_helpers import Recorder, ask, loaded, stage, until

from omniq.errors import ConfigError, InvalidRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

PROMPT = "a red circle above a blue square"
GREEDY = {"max_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return asyncio.run(loaded(stage(model, "ar")))


async def _vllm(model: Path, **more: Any) -> Any:
    return await loaded(stage(model, "ar", engine="vllm", **more))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[Any]:
    engine = await _vllm(model, engine_args={"max_model_len": 128})
    await engine.warmup()
    yield engine
    await engine.unload()


async def test_greedy_equals_transformers(engine: Any, reference: Any) -> None:
    """Eight at once, prompts of different length: same tokens, text and hidden states."""
    prompts = [" ".join([PROMPT] * (1 + i % 3)) + f" {i}" for i in range(8)]
    got = await asyncio.gather(*[ask(engine, GREEDY, prompt=p) for p in prompts])
    for prompt, out in zip(prompts, got, strict=True):
        expected = await ask(reference, GREEDY, prompt=prompt)
        tokens = expected.tensors["token_ids"]["token_ids"]
        assert out.tensors["token_ids"]["token_ids"].tolist() == tokens.tolist()
        assert out.values["text"].rstrip("\ufffd") == expected.values["text"].rstrip("\ufffd")
        assert out.metrics["prompt_tokens"] == expected.metrics["prompt_tokens"]
        rows = out.tensors["hidden_states"]["hidden_states"]
        same = expected.tensors["hidden_states"]["hidden_states"]
        assert rows.dtype == torch.float32
        torch.testing.assert_close(rows, same, atol=1e-3, rtol=1e-3)
        assert torch.cosine_similarity(rows, same, dim=-1).min() > 0.99


async def test_rows_are_right_when_the_prompt_comes_from_the_prefix_cache(engine: Any) -> None:
    first = await ask(engine, GREEDY, prompt=PROMPT * 3)
    second = await ask(engine, GREEDY, prompt=PROMPT * 3)
    for name in ("hidden_states", "token_ids"):
        torch.testing.assert_close(first.tensors[name][name], second.tensors[name][name])


async def test_pieces_are_emitted_while_generating(engine: Any) -> None:
    seen = Recorder()
    out = await ask(engine, GREEDY, seen, prompt=PROMPT)
    assert "".join(seen.pieces) == out.values["text"]
    assert len(seen.pieces) > 1  # how many depends on how fast they are fetched
    assert seen.steps[-1] == (24, 24)


async def test_stop_string_and_its_rows(engine: Any, reference: Any) -> None:
    full = (await ask(reference, GREEDY, prompt=PROMPT)).values["text"]
    given = {**GREEDY, "stop": [full[6:9]]}
    out = await ask(engine, given, prompt=PROMPT)
    expected = await ask(reference, given, prompt=PROMPT)
    assert out.values == expected.values
    count = len(expected.tensors["token_ids"]["token_ids"])
    assert out.tensors["hidden_states"]["hidden_states"].shape[0] == count


async def test_seeded_requests_do_not_depend_on_each_other(engine: Any) -> None:
    async def one(seed: int) -> list[int]:
        given = {"max_tokens": 12, "temperature": 1.0, "seed": seed}
        out = await ask(engine, given, prompt=PROMPT)
        return list(out.tensors["token_ids"]["token_ids"].tolist())

    alone = [await one(seed) for seed in range(4)]
    assert len({tuple(tokens) for tokens in alone}) > 1
    assert await asyncio.gather(*[one(seed) for seed in range(4)]) == alone


async def test_cancel_aborts_in_vllm(engine: Any) -> None:
    seen = Recorder()
    task = asyncio.create_task(
        ask(engine, {"max_tokens": 90, "temperature": 0.0}, seen, prompt=PROMPT)
    )
    await until(lambda: len(seen.pieces) >= 2, task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine._engine.get_num_unfinished_requests() == 0
    assert not len(engine._collector)
    assert seen.steps[-1][0] < 80
    assert (await ask(engine, GREEDY, prompt=PROMPT)).metrics["completion_tokens"] == 24


async def test_too_long_prompt_is_refused(engine: Any) -> None:
    with pytest.raises(InvalidRequest, match="must have 1 to 127 tokens"):
        await ask(engine, GREEDY, prompt=PROMPT * 20)


async def test_unknown_engine_argument_is_named(model: Path) -> None:
    with pytest.raises(ConfigError, match="unknown engine_args 'max_seqs'"):
        await _vllm(model, engine_args={"max_seqs": 3})


async def test_bfloat16_rows_and_chunked_prompts(model: Path) -> None:
    """16 tokens a step: the prompt comes in chunks, which give no rows.

    Compared where both models chose the same tokens.
    """
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 16}
    engine = await _vllm(model, dtype="bfloat16", engine_args=chunks)
    reference = await loaded(stage(model, "ar", dtype="bfloat16"))
    try:
        out, expected = [await ask(e, GREEDY, prompt=PROMPT) for e in (engine, reference)]
    finally:
        await engine.unload()
    pair = [o.tensors["token_ids"]["token_ids"] for o in (out, expected)]
    differing = (pair[0] != pair[1]).nonzero()
    same = int(differing[0]) + 1 if len(differing) else len(pair[0])
    assert same >= 4
    rows = [o.tensors["hidden_states"]["hidden_states"][:same] for o in (out, expected)]
    assert rows[0].dtype == torch.bfloat16
    assert torch.cosine_similarity(*[r.float() for r in rows], dim=-1).min() > 0.99

"""Hidden states out of vLLM against transformers' teacher-forced ones, wherever they could go
wrong: prompts in chunks, cached prefixes, preempted requests, several answers, several layers.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine_helpers import Recorder, ask, loaded, stage

from omniq.engines.base import Chunk
from omniq.errors import ConfigError, InvalidRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

PROMPT = "a red circle above a blue square"
GREEDY = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
#: Prompts go in pieces of at most 16 tokens a step.
CHUNKS = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_chunked_prefill": True}


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    yield AutoModelForCausalLM.from_pretrained(model / "text_encoder", dtype=torch.float32).eval()


@asynccontextmanager
async def _engine(model: Path, *, dtype: str = "float32", **args: Any) -> AsyncIterator[Any]:
    args = {"max_model_len": 192, "in_process": True, **args}
    engine = await loaded(stage(model, "ar", engine="vllm", dtype=dtype, engine_args=args))
    try:
        yield engine
    finally:
        await engine.unload()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def everything(model: Path) -> AsyncIterator[Any]:
    """All positions, all layers, chunked prompts, prefix cache on."""
    wanted = {"positions": "all", "layers": [0, 1, 2, -1]}
    async with _engine(model, hidden_states=wanted, **CHUNKS) as engine:
        yield engine


@torch.no_grad()
def _states(reference: Any, ids: list[int]) -> torch.Tensor:
    """[positions, layers + 1, hidden] of all ids at once."""
    out = reference(torch.tensor([ids]), output_hidden_states=True)
    return torch.stack([h[0] for h in out.hidden_states], dim=1)


def _ids(engine: Any, prompt: str) -> list[int]:
    return list(engine._reader._encoder.encode(prompt, 192))


def _check(engine: Any, reference: Any, prompt: str, out: Any) -> None:
    """Both outputs of a request, row by row."""
    ids = _ids(engine, prompt)
    tokens = out.tensors["token_ids"]["token_ids"].tolist()
    expected = _states(reference, ids + tokens)
    rows = out.tensors["hidden_states"]["hidden_states"]
    same = expected[len(ids) - 1 : len(ids) - 1 + len(tokens)]
    torch.testing.assert_close(rows, same, atol=2e-3, rtol=2e-3)
    rows = out.tensors["prompt_hidden_states"]["prompt_hidden_states"]
    torch.testing.assert_close(rows, expected[: len(ids)], atol=2e-3, rtol=2e-3)


async def test_every_layer_and_position_of_chunked_prompts(everything: Any, reference: Any) -> None:
    prompts = [" ".join([PROMPT] * (1 + i % 3)) + f" {i}" for i in range(8)]
    outs = await asyncio.gather(*[ask(everything, GREEDY, prompt=p) for p in prompts])
    for prompt, out in zip(prompts, outs, strict=True):
        _check(everything, reference, prompt, out)
    assert not len(everything._collector)


async def test_states_come_whole_through_the_processes_of_vllm(
    model: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several processes, and steps that the front end takes in slices (of 128 by default)."""
    from vllm import envs

    monkeypatch.setattr(envs, "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", 3)
    wanted = {"positions": "all", "layers": [0, 1, 2, -1]}
    prompts = [" ".join([PROMPT] * (1 + i % 2)) + f" {i}" for i in range(4)]
    async with _engine(model, hidden_states=wanted, in_process=False, **CHUNKS) as engine:
        outs = await asyncio.gather(*[ask(engine, GREEDY, prompt=p) for p in prompts])
        for prompt, out in zip(prompts, outs, strict=True):
            _check(engine, reference, prompt, out)


@pytest.mark.slow
async def test_states_of_a_model_over_two_devices(model: Path, reference: Any) -> None:
    wanted = {"positions": "all", "layers": [0, 1, 2, -1]}
    prompts = [" ".join([PROMPT] * (1 + i % 2)) + f" {i}" for i in range(4)]
    two = {"tensor_parallel_size": 2, "in_process": False, **CHUNKS}
    async with _engine(model, hidden_states=wanted, **two) as engine:
        outs = await asyncio.gather(*[ask(engine, GREEDY, prompt=p) for p in prompts])
        for prompt, out in zip(prompts, outs, strict=True):
            _check(engine, reference, prompt, out)


async def test_prompt_positions_are_computed_although_the_prefix_is_cached(
    everything: Any, reference: Any
) -> None:
    prompt = PROMPT * 3
    for _ in range(2):
        _check(everything, reference, prompt, await ask(everything, GREEDY, prompt=prompt))


async def test_each_of_several_answers_has_its_own_rows(everything: Any, reference: Any) -> None:
    asked = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 3, "ignore_eos": True}
    out = await ask(everything, asked, prompt=PROMPT)
    ids = _ids(everything, PROMPT)
    answers = out.tensors["token_ids"]
    assert list(answers) == ["0", "1", "2"]
    assert len({tuple(t.tolist()) for t in answers.values()}) == 3
    for name, tokens in answers.items():
        expected = _states(reference, ids + tokens.tolist())[len(ids) - 1 : -1]
        rows = out.tensors["hidden_states"][name]
        torch.testing.assert_close(rows, expected, atol=2e-3, rtol=2e-3)
    texts = [c["text"] for c in out.values["choices"]]
    assert texts[0] == out.values["text"]
    assert out.values["usage"]["completion_tokens"] == 36


async def test_seeded_requests_whose_prompts_come_in_chunks(everything: Any) -> None:
    """The engine process would end if the generator of such a request were rewound on the CPU."""

    async def one(seed: int) -> list[int]:
        asked = {"max_tokens": 8, "temperature": 1.0, "seed": seed, "ignore_eos": True}
        out = await ask(everything, asked, prompt=f"{seed} {PROMPT * 3}")
        return list(out.tensors["token_ids"]["token_ids"].tolist())

    alone = [await one(seed) for seed in range(6)]
    assert await asyncio.gather(*[one(seed) for seed in range(6)]) == alone


def _force_async_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM turns it off on the CPU, where it brings nothing; its scheduler and its runner's
    outputs, which are given out before the tokens are there, work all the same."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def forced(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(forced))


@pytest.mark.parametrize(
    ("positions", "overlapped"), [("generated", False), ("all", False), ("all", True)]
)
async def test_preempted_requests_keep_their_rows(
    model: Path,
    reference: Any,
    positions: str,
    overlapped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache of 12 blocks of 32 tokens for 8 requests of 5 blocks each."""
    if overlapped:
        _force_async_scheduling(monkeypatch)
    async with _engine(
        model,
        hidden_states={"positions": positions},
        num_gpu_blocks_override=13,
        block_size=32,
        **CHUNKS,
    ) as engine:
        core = engine._engine.engine_core._core
        assert (core.batch_queue is not None) == overlapped
        preempted: list[str] = []
        preempt = core.scheduler._preempt_request

        def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        core.scheduler._preempt_request = counted
        prompts = [f"{i} {PROMPT} {PROMPT}" for i in range(8)]
        asked = {**GREEDY, "max_tokens": 96}
        outs = await asyncio.gather(*[ask(engine, asked, prompt=p) for p in prompts])
        assert len(preempted) >= 4
        for prompt, out in zip(prompts, outs, strict=True):
            ids = _ids(engine, prompt)
            tokens = out.tensors["token_ids"]["token_ids"].tolist()
            assert len(tokens) == 96
            expected = _states(reference, ids + tokens)[:, -1]
            rows = out.tensors["hidden_states"]["hidden_states"]
            torch.testing.assert_close(rows, expected[len(ids) - 1 : -1], atol=2e-3, rtol=2e-3)
            if positions == "all":
                rows = out.tensors["prompt_hidden_states"]["prompt_hidden_states"]
                torch.testing.assert_close(rows, expected[: len(ids)], atol=2e-3, rtol=2e-3)
        assert not engine._engine.engine_core._core.scheduler.running


async def test_bfloat16_rows_as_float32(model: Path, reference: Any) -> None:
    """Against transformers in bfloat16, fed the same tokens."""
    from transformers import AutoModelForCausalLM

    folder = model / "text_encoder"
    same_dtype = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    wanted = {"positions": "all", "dtype": "float32"}
    async with _engine(model, dtype="bfloat16", hidden_states=wanted, **CHUNKS) as engine:
        out = await ask(engine, GREEDY, prompt=PROMPT * 2)
        ids = _ids(engine, PROMPT * 2)
    tokens = out.tensors["token_ids"]["token_ids"].tolist()
    expected = _states(same_dtype, ids + tokens)[:, -1].float()
    rows = out.tensors["hidden_states"]["hidden_states"]
    prompt = out.tensors["prompt_hidden_states"]["prompt_hidden_states"]
    assert rows.dtype == prompt.dtype == torch.float32
    for got, same in ((rows, expected[len(ids) - 1 : -1]), (prompt, expected[: len(ids)])):
        assert torch.cosine_similarity(got, same, dim=-1).min() >= 0.998


async def test_text_encoder_gives_the_prompts_states(model: Path, reference: Any) -> None:
    """As a DiT wants them: hidden_states[-2] of every prompt position, nothing generated."""
    seen = Recorder()
    async with _engine(model, text_encoder=True, hidden_states={"layers": -2}, **CHUNKS) as engine:
        out = await ask(engine, {}, seen, prompt=PROMPT)
        expected = _states(reference, _ids(engine, PROMPT))[:, -2]
    embeds = out.tensors["prompt_embeds"]["prompt_embeds"]
    torch.testing.assert_close(embeds, expected, atol=2e-3, rtol=2e-3)
    assert set(out.tensors) == {"prompt_embeds"}
    assert out.values["usage"]["completion_tokens"] == 0
    assert seen.pieces == []


async def test_pooling_model(model: Path, reference: Any) -> None:
    """vLLM's embedding of the last token, normalised."""
    async with _engine(model, runner="pooling") as engine:
        out = await ask(engine, {}, prompt=PROMPT)
        with pytest.raises(InvalidRequest, match=r"parameters\.max_tokens: a pooling stage"):
            await ask(engine, {"max_tokens": 3}, prompt=PROMPT)
        ids = engine._reader._encoder.tokenizer(PROMPT)["input_ids"]
    vector = out.tensors["pooling"]["pooling"]
    expected = torch.nn.functional.normalize(_states(reference, ids)[-1, -1], dim=0)
    torch.testing.assert_close(vector, expected, atol=2e-3, rtol=2e-3)
    assert out.values["usage"]["prompt_tokens"] == len(ids)


class _Chunks(Recorder):
    """Keeps chunks by output."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: dict[str, list[Chunk]] = {}

    async def achunk(
        self, output: str, value: Any = None, tensors: Any = None, **more: Any
    ) -> None:
        made = self.chunks.setdefault(output, [])
        made.append(Chunk(len(made), value, dict(tensors or {}), **more))


async def test_states_go_on_in_chunks(model: Path) -> None:
    """As to a stage behind a window edge: the same rows as in the whole output, in order."""
    seen = _Chunks()
    async with _engine(model, stream_tokens=5) as engine:
        out = await ask(engine, GREEDY, seen, prompt=PROMPT)
    for name in ("token_ids", "hidden_states"):
        pieces = [c.tensors[name] for c in seen.chunks[name]]
        assert len(pieces) >= 3
        assert all(len(p) >= 5 for p in pieces[:-1])
        torch.testing.assert_close(torch.cat(pieces), out.tensors[name][name])


@pytest.mark.parametrize("layers", [4, [-5], []])
async def test_layers_a_model_has_not(model: Path, layers: Any) -> None:
    with pytest.raises(ConfigError, match=r"engine_args\.hidden_states\.layers must be within"):
        async with _engine(model, hidden_states={"layers": layers}):
            pass

"""Qwen2.5-Omni with its thinker on vLLM, against transformers' ``generate`` on the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine_helpers import until
from omni_stages import MARKS_OF_VLLM, Chunks, OmniStages, omni_stage
from qwen_omni_reference import PROMPTS, STAGES, WORDS, Reference, params, turn
from tiny_qwen_omni import SAMPLES_A_CODE, make_qwen_omni

from omniq.engines import create_engine
from omniq.engines.base import NullEmit, StageInput, StageRequest
from omniq.engines.omni import reply
from omniq.errors import ConfigError, InvalidRequest

pytestmark = MARKS_OF_VLLM

ON_VLLM = {"thinker": "omni-thinker-vllm"}
#: Prompts go in pieces, several requests in a step.
VLLM_ARGS = {"max_model_len": 1024, "in_process": True, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen_omni(tmp_path_factory.mktemp("omni") / "tiny-qwen2.5-omni")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def staged(folder: Path) -> AsyncIterator[OmniStages]:
    async with OmniStages.loaded(folder, STAGES, ON_VLLM, thinker=VLLM_ARGS) as stages:
        yield stages


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(folder: Path) -> AsyncIterator[OmniStages]:
    """The thinker on transformers."""
    async with OmniStages.loaded(folder, STAGES[:1]) as stages:
        yield stages


async def test_streamed_side_by_side_equals_generate(
    staged: OmniStages, reference: Reference
) -> None:
    """All kinds of prompts at once, streamed to the talker, twice: text tokens and speech codes are
    those of ``generate``, the waveform but for rounding. The second time the pictures are in vLLM's
    caches, and the front end sees nothing of them.
    """
    asked = [turn(*parts) for parts in PROMPTS.values()]
    expected = [reference.answer(reference.inputs(m), 24, 40) for m in asked]
    for _ in range(2):
        together = await asyncio.gather(
            *(staged.streamed(params(codes=40), messages=m) for m in asked)
        )
        for (tokens, codes, waveform), (made, said) in zip(expected, together, strict=True):
            assert made["thinker"].tensors["token_ids"]["token_ids"].tolist() == tokens
            # vLLM leaves out a character that the answer's end cuts.
            text = reference.text(tokens).rstrip("\ufffd")
            assert "".join(said["thinker"].texts).rstrip("\ufffd") == text
            assert len(said["thinker"].tensors) > 3
            assert torch.cat(said["thinker"].tensors).tolist() == tokens
            assert made["talker"].tensors["codes"]["codes"].tolist() == codes
            assert len(set(codes)) > 5
            audio = made["token2wav"].tensors["audio"]["audio"]
            assert audio.shape == waveform.shape == (len(codes) * SAMPLES_A_CODE,)
            assert waveform.std() > 0.01
            torch.testing.assert_close(audio, waveform, atol=1e-4, rtol=0)


@pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS.keys())
async def test_the_same_reply_as_on_transformers(
    staged: OmniStages, plain: OmniStages, parts: list[Any]
) -> None:
    """Ids, positions and states that the talker gets, of every kind of prompt."""
    inputs = {"messages": StageInput(turn(*parts))}
    request = StageRequest("one", params()["thinker"], stream=False)
    theirs = (await plain.engines["thinker"].run(request, inputs, NullEmit())).tensors
    ours = (await staged.engines["thinker"].run(request, inputs, NullEmit())).tensors
    assert ours.keys() == theirs.keys()
    assert ours[reply.NAME].keys() == theirs[reply.NAME].keys()
    for name, tensor in theirs[reply.NAME].items():
        made = ours[reply.NAME][name]
        assert made.is_contiguous()
        if tensor.is_floating_point():
            torch.testing.assert_close(made, tensor, atol=2e-3, rtol=2e-3)
        else:
            assert torch.equal(made, tensor)
    assert torch.equal(ours["hidden_states"]["hidden_states"], ours[reply.NAME]["hidden_states"])


async def test_of_several_answers_the_first_is_spoken(staged: OmniStages) -> None:
    """As on transformers: the others are text only."""
    asked = params(8, 20)
    asked["thinker"] |= {"n": 3, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    made, said = await staged.streamed(asked, messages=turn(WORDS))
    assert len(made["thinker"].values["choices"]) == 3
    assert len(made["thinker"].tensors[reply.NAME]["token_ids"]) == 8
    assert len(said["thinker"].tensors) > 1
    assert len(made["talker"].tensors["codes"]["codes"]) > 0


async def test_who_goes_away_leaves_nothing(staged: OmniStages) -> None:
    """A cancelled request is ended in vLLM, and its states are let go."""
    thinker: Any = staged.engines["thinker"]
    said = Chunks(reply.NAME)
    asked = {"temperature": 0.0, "max_tokens": 900, "ignore_eos": True}
    going = asyncio.create_task(
        thinker.run(StageRequest("gone", asked), {"messages": StageInput(turn(WORDS))}, said)
    )
    await until(lambda: len(said.tensors) > 3, going)
    going.cancel()
    await asyncio.wait([going])
    scheduler = thinker._engine.engine_core._core.scheduler
    await until(lambda: not scheduler.has_requests())
    assert not len(thinker._collector)


async def test_a_prompt_by_tokens_and_what_is_refused(
    staged: OmniStages, plain: OmniStages, folder: Path
) -> None:
    request = StageRequest("one", params()["thinker"], stream=False)
    ids = {"token_ids": StageInput([5, 6, 7, 8])}
    made = [(await s.engines["thinker"].run(request, ids, NullEmit())) for s in (plain, staged)]
    tokens = [m.tensors["token_ids"]["token_ids"].tolist() for m in made]
    assert tokens[0] == tokens[1]
    with pytest.raises(InvalidRequest, match="must have 1 to 1023 tokens"):
        await staged.engines["thinker"].run(
            request, {"prompt": StageInput("red " * 2000)}, NullEmit()
        )
    for name, value in (("hidden_states", {"layers": 1}), ("text_encoder", True)):
        engine = create_engine(
            omni_stage(folder, "thinker", "omni-thinker-vllm", engine_args={name: value})
        )
        with pytest.raises(ConfigError, match=f"engine_args.{name}: engine 'omni-thinker-vllm'"):
            await engine.load()

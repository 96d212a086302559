"""Qwen3-Omni in stages, compared with ``generate`` of transformers on the same weights."""

from __future__ import annotations

import asyncio
import importlib.util
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omni_stages import OmniStages, omni_stage
from qwen3_omni_reference import Reference
from qwen_omni_reference import SEED, turn
from tiny_qwen3_omni import GROUPS, SAMPLES_A_FRAME, make_qwen3_omni
from tiny_qwen_omni import picture, sound

from omniq.engines import create_engine
from omniq.engines.base import NullEmit, StageInput, StageRequest
from omniq.engines.omni import qwen3
from omniq.engines.omni.reply import ThinkerPrompt
from omniq.errors import InvalidRequest

STAGES = ("thinker", "talker", "code2wav")
ENGINES = {"code2wav": "omni-code2wav"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_omni(tmp_path_factory.mktemp("omni") / "tiny-qwen3-omni")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture
async def staged(folder: Path) -> AsyncIterator[OmniStages]:
    async with OmniStages.loaded(folder, STAGES, ENGINES) as stages:
        yield stages


def params(tokens: int = 20, codes: int = 30, **talker: Any) -> dict[str, dict[str, Any]]:
    """As ``generate`` has them by default, but for the lengths: greedy text, sampled speech."""
    sampling = {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05, "seed": SEED}
    return {
        "thinker": {"temperature": 0.0, "max_tokens": tokens},
        "talker": {**sampling, "max_tokens": codes, **talker},
    }


PROMPTS = {
    "text": turn("a red circle above a blue square"),
    "audio": turn("What is it? ", sound(1)),
    "image": turn(picture(1, 64, 96), "What is it?"),
    "turns": [
        {"role": "system", "content": "You see."},
        *turn(picture(2, 64, 64), "What is it?"),
        {"role": "assistant", "content": "A green star."},
        # No sound beside pictures: the reference's talker then fails on its own configuration.
        *turn("And now?", picture(3, 96, 64)),
    ],
}


@pytest.mark.parametrize("messages", PROMPTS.values(), ids=PROMPTS.keys())
async def test_staged_equals_generate(
    staged: OmniStages, reference: Reference, messages: list[dict[str, Any]]
) -> None:
    """Text tokens and frames of codes are those of ``generate``; so is the waveform, but for
    rounding.
    """
    tokens, codes, waveform = reference.answer(messages, 20, 30)
    made = await staged.whole(params(), messages=messages)
    assert made["thinker"].tensors["token_ids"]["token_ids"].tolist() == tokens
    frames = made["talker"].tensors["codes"]["codes"]
    assert frames.tolist() == codes.tolist()
    assert frames.shape[1] == GROUPS
    assert len(frames) > 3
    audio = made["code2wav"].tensors["audio"]["audio"]
    assert audio.shape == waveform.shape
    assert waveform.std() > 1e-3
    torch.testing.assert_close(audio, waveform, atol=1e-4, rtol=0)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("vllm", "torchvision"))),
    reason="needs vllm and torchvision",
)
async def test_a_thinker_on_vllm(folder: Path, reference: Reference) -> None:
    """All prompts at once, streamed to the talker: tokens, codes and waveform of ``generate``."""
    engines = {**ENGINES, "thinker": "omni-thinker-vllm"}
    args = {"max_model_len": 1024, "in_process": True, "max_num_batched_tokens": 64}
    expected = [reference.answer(m, 20, 30) for m in PROMPTS.values()]
    async with OmniStages.loaded(folder, STAGES, engines, thinker=args) as stages:
        together = await asyncio.gather(
            *(stages.streamed(params(), messages=m) for m in PROMPTS.values())
        )
    for (tokens, codes, waveform), (made, _) in zip(expected, together, strict=True):
        assert made["thinker"].tensors["token_ids"]["token_ids"].tolist() == tokens
        assert made["talker"].tensors["codes"]["codes"].tolist() == codes.tolist()
        audio = made["code2wav"].tensors["audio"]["audio"]
        assert audio.shape == waveform.shape
        torch.testing.assert_close(audio, waveform, atol=1e-4, rtol=0)


async def test_greedy_speech_of_another_voice(staged: OmniStages, reference: Reference) -> None:
    messages = PROMPTS["text"]
    _, codes, waveform = reference.answer(
        messages, 20, 30, speaker="Chelsie", talker_do_sample=False
    )
    made = await staged.whole(params(temperature=0.0, speaker="Chelsie"), messages=messages)
    assert made["talker"].tensors["codes"]["codes"].tolist() == codes.tolist()
    audio = made["code2wav"].tensors["audio"]["audio"]
    torch.testing.assert_close(audio, waveform, atol=1e-4, rtol=0)


async def test_streamed_stages_say_the_same(staged: OmniStages) -> None:
    """Fed by chunks: the same text and codes; the sound of windows goes on without a gap."""
    messages, longer = PROMPTS["audio"], params(codes=90, min_tokens=90)
    whole = await staged.whole(longer, messages=messages)
    made, said = await staged.streamed(longer, messages=messages)
    assert "".join(said["thinker"].texts) == whole["thinker"].values["text"]
    codes = whole["talker"].tensors["codes"]["codes"]
    assert made["talker"].tensors["codes"]["codes"].equal(codes)
    audio = made["code2wav"].tensors["audio"]["audio"]
    packets = [len(packet) / SAMPLES_A_FRAME for packet in said["code2wav"].tensors]
    assert [math.ceil(p) for p in packets[:4]] == [5, 10, 20, 25]
    assert torch.cat(said["code2wav"].tensors).equal(audio)
    assert audio.shape == whole["code2wav"].tensors["audio"]["audio"].shape


async def test_windows_that_see_everything_change_nothing(folder: Path) -> None:
    """code2wav is causal: with all that was before in each window nothing differs.

    In double precision, where rounding does not hide it: in float32 other shapes round otherwise.
    """
    codes = torch.randint(0, 64, (70, GROUPS), generator=torch.Generator().manual_seed(3))
    inputs = {"codes": StageInput(tensors={"codes": codes})}
    args = {"context_frames": 1000, "window_frames": 9}
    wide: Any = create_engine(omni_stage(folder, "code2wav", "omni-code2wav", engine_args=args))
    await wide.load()
    wide._model.double()
    streamed, whole = [
        (await wide.run(StageRequest("wide", {}, stream=s), inputs, NullEmit())).tensors["audio"]
        for s in (True, False)
    ]
    await wide.unload()
    assert len(whole["audio"]) > 69 * SAMPLES_A_FRAME
    torch.testing.assert_close(streamed["audio"], whole["audio"], atol=1e-6, rtol=0)


async def test_an_unknown_voice_is_refused(staged: OmniStages) -> None:
    with pytest.raises(InvalidRequest, match="no speaker 'Bob'; allowed: chelsie, ethan"):
        await staged.whole(params(speaker="Bob"), messages=PROMPTS["text"])


def test_only_the_users_turns_are_heard() -> None:
    """Positions of the user's turns are as if nothing else had been before them."""
    tokens = qwen3.Tokens((90,), 1, 2, 3, 7, 8, 9, ())
    ids = torch.tensor([1, 4, 50, 1, 2, 90, 90, 51, 1, 3, 52, 1, 2, 53, 1, 3, 10])
    places = torch.arange(len(ids))
    places[7:] -= 1  # two tokens of media, one position
    prompt = ThinkerPrompt(ids, places.expand(3, -1), torch.zeros(len(ids), 4))
    kept = qwen3.user_mask(ids, tokens)
    assert ids[kept].tolist() == [1, 2, 90, 90, 51, 1, 2, 53]
    assert qwen3.assistant_start(ids, tokens) == 14
    assert qwen3.positions(prompt, 2, tokens)[0].tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8]

"""Qwen2.5-Omni in stages, compared with ``generate`` of transformers on the same weights."""

from __future__ import annotations

import asyncio
import base64
import io
import wave
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_qwen_omni import (
    CODEC,
    INPUT_RATE,
    SAMPLES_A_CODE,
    make_qwen_omni,
    picture,
    sound,
)
from tiny_vision import data_url

from omniq.config import OmniStageConfig
from omniq.engines import create_engine
from omniq.engines.base import Chunk, Engine, NullEmit, StageInput, StageOutput, StageRequest
from omniq.errors import ConfigError, InvalidRequest

ENDS = [CODEC["pad"], CODEC["end"]]
SEED = 11
WORDS = "a red circle above a blue square"
STAGES = {
    "thinker": {
        "engine_type": "AR",
        "engine": "omni-thinker",
        "output_modalities": ["text", "hidden_states"],
    },
    "talker": {"engine_type": "talk"},
    "token2wav": {"engine_type": "vocode"},
}


def stage(folder: Path, stage_id: str, **more: Any) -> OmniStageConfig:
    settings = {"stage_id": stage_id, "model": str(folder), "max_in_flight": 8}
    return OmniStageConfig.model_validate({**settings, **STAGES[stage_id], **more})


def wav(samples: np.ndarray) -> str:
    """Base64 of a WAV file, as messages hold it; 16 bits lose what the reference loses, too."""
    file = io.BytesIO()
    with wave.open(file, "wb") as w:
        w.setparams((1, 2, INPUT_RATE, 0, "NONE", ""))
        w.writeframes((samples * 32_767).astype("<i2").tobytes())
    return base64.b64encode(file.getvalue()).decode()


def turn(*parts: Any) -> list[dict[str, Any]]:
    """A user's message of texts, pictures and sounds."""
    content = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif isinstance(part, np.ndarray):
            data = {"data": wav(part), "format": "wav"}
            content.append({"type": "input_audio", "input_audio": data})
        else:
            content.append({"type": "image_url", "image_url": {"url": data_url(part)}})
    return [{"role": "user", "content": content}]


class Reference:
    """The whole model in transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen2_5OmniForConditionalGeneration

        self.model = Qwen2_5OmniForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.codes: list[int] = []
        token2wav = self.model.token2wav.forward

        def seeded(code: torch.Tensor, **more: Any) -> torch.Tensor:
            self.codes = code[0].tolist()
            torch.manual_seed(SEED)  # of the noise alone
            return token2wav(code, **more)

        self.model.token2wav.forward = seeded
        talk = self.model.talker.generate

        def talk_seeded(**more: Any) -> Any:
            torch.manual_seed(SEED)
            return talk(**more)

        self.model.talker.generate = talk_seeded

    def answer(
        self, inputs: dict[str, Any], tokens: int, codes: int, **more: Any
    ) -> tuple[list[int], list[int], torch.Tensor]:
        """Tokens, codes and waveform."""
        made, waveform = self.model.generate(
            **inputs,
            thinker_max_new_tokens=tokens,
            talker_max_new_tokens=codes,
            talker_eos_token_id=ENDS,
            **more,
        )
        return made[0, inputs["input_ids"].shape[1] :].tolist(), self.codes, waveform


class Chunks(NullEmit):
    """Hands on the chunks of one output to the next engine, and keeps what was said."""

    def __init__(self, output: str) -> None:
        self.output, self.texts = output, []
        self.queue: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self.tensors: list[torch.Tensor] = []

    def delta(self, output: str, value: Any) -> None:
        self.texts.append(value["text"])

    async def achunk(
        self, output: str, value: Any = None, tensors: Any = None, *, last: bool = False
    ) -> None:
        assert output == self.output
        self.tensors.append(next(iter(tensors.values())))
        self.queue.put_nowait(Chunk(len(self.tensors) - 1, value, tensors, last))

    async def read(self) -> AsyncIterator[Chunk]:
        while (chunk := await self.queue.get()) is not None:
            yield chunk


class Staged:
    """The three engines."""

    def __init__(self, engines: dict[str, Engine]) -> None:
        self.engines = engines

    async def whole(
        self, params: dict[str, dict[str, Any]], **inputs: Any
    ) -> dict[str, StageOutput]:
        """One stage after the other, nothing streamed."""
        given = {name: StageInput(value) for name, value in inputs.items()}
        made: dict[str, StageOutput] = {}
        passed = given
        for stage_id, output in (("thinker", "reply"), ("talker", "codes"), ("token2wav", "audio")):
            request = StageRequest("whole", params.get(stage_id, {}), stream=False)
            done = await self.engines[stage_id].run(request, passed, NullEmit())
            made[stage_id] = done
            passed = {output: StageInput(tensors=done.tensors[output])}
        return made

    async def streamed(
        self, params: dict[str, dict[str, Any]], **inputs: Any
    ) -> tuple[dict[str, StageOutput], dict[str, Chunks]]:
        """All stages at once, each fed by the chunks of the one before."""
        emits = {i: Chunks(o) for i, o in zip(STAGES, ("reply", "codes", "audio"), strict=True)}
        passed: dict[str, StageInput] = {n: StageInput(v) for n, v in inputs.items()}
        runs = {}
        for stage_id, emit in emits.items():
            request = StageRequest("streamed", params.get(stage_id, {}), stream=True)
            run = asyncio.ensure_future(self.engines[stage_id].run(request, passed, emit))
            run.add_done_callback(lambda _, e=emit: e.queue.put_nowait(None))
            runs[stage_id] = run
            passed = {emit.output: StageInput(chunks=emit.read())}
        await asyncio.gather(*runs.values())
        return {i: r.result() for i, r in runs.items()}, emits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen_omni(tmp_path_factory.mktemp("omni") / "tiny-qwen2.5-omni")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture
async def staged(folder: Path) -> AsyncIterator[Staged]:
    engines = {i: create_engine(stage(folder, i)) for i in STAGES}
    for engine in engines.values():
        await engine.load()
    yield Staged(engines)
    for engine in engines.values():
        await engine.unload()


def params(tokens: int = 24, codes: int = 50, **talker: Any) -> dict[str, dict[str, Any]]:
    """As ``generate`` has them by default, but for the lengths: greedy text, sampled speech."""
    sampling = {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05}
    return {
        "thinker": {"temperature": 0.0, "max_tokens": tokens},
        "talker": {**sampling, "seed": SEED, "max_tokens": codes, **talker},
        "token2wav": {"seed": SEED},
    }


def reference_inputs(staged: Staged, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """What the model's processor makes of a conversation, with a token of padding before it.

    Of a prompt without padding, ``generate`` (transformers 5.19) drops the mask before its talker
    sees it, which then leaves out the codec's tokens and the positions of media.
    """
    thinker: Any = staged.engines["thinker"]
    ids, more = thinker._prompts.read({"messages": StageInput(messages)}, {}, 1024)
    tensor = torch.tensor([[0, *ids]])
    mask = torch.ones_like(tensor)
    mask[:, 0] = 0
    if "pixel_values" in more:  # the talker's `generate` refuses them
        more["thinker_pixel_values"] = more.pop("pixel_values")
    return {"input_ids": tensor, "attention_mask": mask, **more}


PROMPTS = {
    "text": [WORDS],
    "audio": ["What is it? ", sound(1)],
    "image": [picture(1), "What is it?"],
    "several": [sound(2, 0.5), picture(2, 112, 56), "and", sound(3, 2.0), picture(3)],
}


@pytest.mark.parametrize("parts", PROMPTS.values(), ids=PROMPTS.keys())
async def test_staged_equals_generate(
    staged: Staged, reference: Reference, parts: list[Any]
) -> None:
    """Text tokens and speech codes are those of ``generate``, the waveform but for rounding."""
    messages = turn(*parts)
    tokens, codes, waveform = reference.answer(reference_inputs(staged, messages), 24, 50)
    made = await staged.whole(params(), messages=messages)
    assert made["thinker"].tensors["token_ids"]["token_ids"].tolist() == tokens
    assert made["talker"].tensors["codes"]["codes"].tolist() == codes
    assert len(set(codes)) > 5
    audio = made["token2wav"].tensors["audio"]["audio"]
    assert audio.dtype is torch.float32
    assert audio.shape == waveform.shape == (len(codes) * SAMPLES_A_CODE,)
    assert waveform.std() > 0.01
    torch.testing.assert_close(audio, waveform, atol=1e-4, rtol=0)

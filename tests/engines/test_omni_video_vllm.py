"""Videos with the thinker of an omni model on vLLM, against the one on transformers, which is
compared with ``generate`` elsewhere.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from clips import clip
from omni_stages import MARKS_OF_VLLM, OmniStages
from qwen_omni_reference import turn
from tiny_qwen3_omni import make_qwen3_omni
from tiny_qwen_omni import make_qwen_omni, picture, sound

from omniq.engines.base import NullEmit, StageInput, StageRequest
from omniq.engines.omni import reply
from omniq.errors import InvalidRequest

pytestmark = MARKS_OF_VLLM

WORDS = "What is it?"
MAKERS = {"qwen2.5": make_qwen_omni, "qwen3": make_qwen3_omni}
#: vLLM has room for one step's media.
VLLM_ARGS = {"max_model_len": 1024, "in_process": True, "max_num_batched_tokens": 1024}
LONG = clip(1, frames=11, fps=4, size=(80, 60))


@pytest.fixture(scope="module", params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param) / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinkers(folder: Path) -> AsyncIterator[list[Any]]:
    """On transformers and on vLLM."""
    stages, on_vllm = ("thinker",), {"thinker": "omni-thinker-vllm"}
    async with (
        OmniStages.loaded(folder, stages, thinker={"max_model_len": 1024}) as theirs,
        OmniStages.loaded(folder, stages, on_vllm, thinker=VLLM_ARGS) as ours,
    ):
        yield [theirs.engines["thinker"], ours.engines["thinker"]]


def said(*parts: Any) -> dict[str, StageInput]:
    messages = turn(*(p if not isinstance(p, bytes) else "" for p in parts))
    for i, part in enumerate(parts):
        if isinstance(part, bytes):
            url = f"data:video/mp4;base64,{base64.b64encode(part).decode()}"
            messages[0]["content"][i] = {"type": "video_url", "video_url": {"url": url}}
    return {"messages": StageInput(messages)}


def beside(fps: float) -> dict[str, StageInput]:
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 255, (6, 56, 84, 3), dtype=torch.uint8, generator=generator)
    return {"prompt": StageInput(WORDS), "video": StageInput([{"fps": fps}], {"0000": frames})}


async def replies(
    thinkers: list[Any], inputs: dict[str, StageInput], options: dict[str, Any]
) -> list[Any]:
    params = {"temperature": 0.0, "max_tokens": 12, "mm_processor_kwargs": options}
    request = StageRequest("one", params, stream=False)
    outputs = [await engine.run(request, inputs, NullEmit()) for engine in thinkers]
    return [output.tensors[reply.NAME] for output in outputs]


CASES: dict[str, tuple[dict[str, StageInput], dict[str, Any]]] = {
    "two a second": (said(LONG, WORDS), {}),
    "one a second": (said(LONG, WORDS), {"fps": 1.0}),
    "min_frames": (said(clip(4, frames=30, fps=30), WORDS), {"min_frames": 6}),
    "max_frames": (said(LONG, WORDS), {"max_frames": 4}),
    "several": (said(LONG, picture(1), clip(5, frames=4), sound(1, 0.5), WORDS), {}),
    "frames": (beside(2.0), {}),
    "the same frames, slower": (beside(1.0), {}),
}


@pytest.mark.parametrize(("inputs", "options"), CASES.values(), ids=CASES.keys())
async def test_as_on_transformers(
    thinkers: list[Any], inputs: dict[str, StageInput], options: dict[str, Any]
) -> None:
    """The same frames, at the same places: tokens are equal, states but for rounding."""
    theirs, ours = await replies(thinkers, inputs, options)
    assert ours.keys() == theirs.keys()
    for name in ("token_ids", "prompt_token_ids"):
        assert torch.equal(ours[name], theirs[name])
    places = theirs["prompt_positions"]
    assert torch.equal(ours["prompt_positions"].to(places.dtype), places)
    for name in ("hidden_states", "prompt_hidden_states"):
        torch.testing.assert_close(ours[name], theirs[name], atol=2e-3, rtol=2e-3)


async def test_frames_between_whole_places(thinkers: list[Any]) -> None:
    """Qwen3-Omni has such, vLLM has none; Qwen2.5-Omni rounds them itself."""
    for inputs, options in ((said(LONG, WORDS), {"fps": 1.5}), (beside(1.5), {})):
        if thinkers[1]._places is None:
            theirs, ours = await replies(thinkers, inputs, options)
            assert torch.equal(ours["token_ids"], theirs["token_ids"])
            assert torch.equal(ours["prompt_positions"], theirs["prompt_positions"])
            continue
        (theirs,) = await replies(thinkers[:1], inputs, options)
        assert (theirs["prompt_positions"] % 1).any()
        with pytest.raises(InvalidRequest, match=r"at 1\.5 frames a second are .* whole ones only"):
            await replies(thinkers[1:], inputs, options)


def heard(samples: int, rate: int) -> dict[str, StageInput]:
    """A second of it has whole hops of the spectrogram; vLLM pads others for Qwen3-Omni."""
    wave = sine(samples, rate)
    facts = [{"sample_rate": rate}]
    return {"prompt": StageInput(WORDS), "audio": StageInput(facts, {"0000": wave})}


def sine(samples: int, rate: int) -> torch.Tensor:
    return torch.sin(torch.arange(samples) * (2 * torch.pi * 220 / rate))


@pytest.mark.parametrize("rate", [8_000, 24_000, 44_100, 48_000])
async def test_sounds_of_other_rates(thinkers: list[Any], rate: int) -> None:
    theirs, ours = await replies(thinkers, heard(rate, rate), {})
    assert torch.equal(ours["prompt_token_ids"], theirs["prompt_token_ids"])
    assert torch.equal(ours["token_ids"], theirs["token_ids"])


@pytest.mark.parametrize(("samples", "rate"), [(1, 16_000), (399, 16_000), (20, 48_000)])
async def test_sounds_too_short_to_be_heard(thinkers: list[Any], samples: int, rate: int) -> None:
    for engine in thinkers:
        with pytest.raises(InvalidRequest, match="a sound must last at least 25 ms"):
            await replies([engine], heard(samples, rate), {})


async def test_what_is_refused(thinkers: list[Any]) -> None:
    """With the same words on both, but for what vLLM's lacks."""
    none = StageInput([{"fps": 2.0}], {"0000": torch.zeros(0, 56, 56, 3, dtype=torch.uint8)})
    faults: list[tuple[dict[str, StageInput], dict[str, Any], str]] = [
        (said(clip(6, frames=1), WORDS), {}, "a video must have at least 2 frames, has 1"),
        (said(b"nothing of the kind" * 20), {}, "video_url holds no video that can be read"),
        ({"prompt": StageInput(WORDS), "video": none}, {}, r"must be uint8 \[frames, H, W, 3\]"),
        (said(clip(8, frames=40)), {"fps": 8.0, "max_frames": 40}, "videos alone are .* tokens"),
    ]
    for inputs, options, fault in faults:
        for engine in thinkers:
            with pytest.raises(InvalidRequest, match=fault):
                await replies([engine], inputs, options)
    with pytest.raises(InvalidRequest, match="the sound of videos is not heard"):
        await replies(thinkers[1:], said(LONG), {"use_audio_in_video": True})

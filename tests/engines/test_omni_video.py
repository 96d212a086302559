"""Videos in conversations with omni models, compared with transformers' processor and ``generate``.

The reference gets every frame of a file, decoded by PyAV here, and chooses among them itself.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import qwen3_omni_reference
import torch
from clips import all_frames, clip, its_sound
from omni_stages import OmniStages
from qwen_omni_reference import SEED, Reference, turn
from tiny_qwen3_omni import make_qwen3_omni
from tiny_qwen_omni import (
    make_omni_tokenizer,
    make_qwen_omni,
    picture,
    save_processor,
    sound,
)

from omniq.config.params import ARParams
from omniq.engines.base import NullEmit, StageInput, StageRequest
from omniq.engines.omni import videos
from omniq.engines.omni.families import QWEN2_5, QWEN3, OmniFamily
from omniq.engines.omni.prompts import MediaPrompts
from omniq.engines.text import PromptEncoder
from omniq.errors import InvalidRequest

Answer = tuple[list[int], Any, torch.Tensor]
WORDS = "What is it?"


@dataclass(frozen=True)
class Model:
    """A tiny model: where it is, what it is called in omniq, and the reference's answers."""

    folder: Path
    family: OmniFamily
    stages: tuple[str, ...]
    engines: dict[str, str]
    answer: Callable[[dict[str, Any], bool], Answer]

    def inputs(self, parts: list[Any], options: dict[str, Any]) -> dict[str, Any]:
        """By the model's own processor; parts are texts, pictures, sounds and video files."""
        processor = resolve_name(self.family.processor).from_pretrained(self.folder)
        heard = options.get("use_audio_in_video", False)
        content, given = [], {"images": [], "audio": [], "videos": [], "video_metadata": []}
        for part in parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            elif isinstance(part, bytes):
                frames, rate = all_frames(part)
                content.append({"type": "video"})
                given["videos"].append(frames)
                given["video_metadata"].append({"total_num_frames": len(frames), "fps": rate})
                given["audio"] += [its_sound(part)] if heard else []
            elif isinstance(part, np.ndarray):
                content.append({"type": "audio"})
                given["audio"].append((part * 32_767).astype("<i2").astype(np.float32) / 32_768)
            else:
                content.append({"type": "image"})
                given["images"].append(part)
        text = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        kwargs = {"do_sample_frames": True, "fps": 2.0, **options}
        return dict(
            processor(
                text=text, return_tensors="pt", **{k: v for k, v in given.items() if v}, **kwargs
            )
        )


def _qwen2_5(folder: Path) -> Model:
    reference = Reference(make_qwen_omni(folder))

    def answer(inputs: dict[str, Any], heard: bool) -> Answer:
        # A token of padding before it, and no pixels for the talker: see the reference.
        ids = torch.nn.functional.pad(inputs["input_ids"], (1, 0))
        mask = torch.ones_like(ids)
        mask[:, 0] = 0
        more = {f"thinker_{n}": v for n, v in inputs.items() if n.startswith("pixel_values")}
        others = {n: v for n, v in inputs.items() if not n.startswith("pixel_values")}
        given = {**others, **more, "input_ids": ids, "attention_mask": mask}
        return reference.answer(given, 12, 24, use_audio_in_video=heard)

    return Model(folder, QWEN2_5, ("thinker", "talker", "token2wav"), {}, answer)


def _qwen3(folder: Path) -> Model:
    reference = qwen3_omni_reference.Reference(make_qwen3_omni(folder))

    def answer(inputs: dict[str, Any], heard: bool) -> Answer:
        reference.mend(heard)
        tokens, codes, waveform = reference.answer_to(inputs, 12, 16, use_audio_in_video=heard)
        return tokens, codes.tolist(), waveform

    engines = {"code2wav": "omni-code2wav"}
    return Model(folder, QWEN3, ("thinker", "talker", "code2wav"), engines, answer)


MAKERS = {"qwen2.5": _qwen2_5, "qwen3": _qwen3}


@pytest.fixture(scope="module", params=MAKERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return MAKERS[request.param](tmp_path_factory.mktemp("omni") / "tiny")


@pytest.fixture
async def staged(model: Model) -> Any:
    async with OmniStages.loaded(model.folder, model.stages, model.engines) as stages:
        yield stages


def said(*parts: Any) -> list[dict[str, Any]]:
    """The same parts as OpenAI's API has them."""
    messages = turn(*(p if not isinstance(p, bytes) else "" for p in parts))
    content = messages[0]["content"]
    for i, part in enumerate(parts):
        if isinstance(part, bytes):
            url = f"data:video/mp4;base64,{base64.b64encode(part).decode()}"
            content[i] = {"type": "video_url", "video_url": {"url": url}}
    return messages


def params(model: Model, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    talker: dict[str, Any] = {"temperature": 0.9, "repetition_penalty": 1.05, "seed": SEED}
    if model.family is QWEN2_5:
        talker |= {"top_k": 40, "top_p": 0.8, "max_tokens": 24}
    else:
        talker |= {"top_k": 50, "max_tokens": 16}
    thinker = {"temperature": 0.0, "max_tokens": 12, "mm_processor_kwargs": options}
    return {"thinker": thinker, "talker": talker, "token2wav": {"seed": SEED}}


SILENT = clip(1, frames=11, fps=4, size=(80, 60))
LOUD = clip(2, frames=13, fps=5, sound=sound(5, 2.6))
CASES: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "frames": ([SILENT, WORDS], {}),
    "its sound is not asked for": ([LOUD, WORDS], {}),
    "sound": ([LOUD, WORDS], {"use_audio_in_video": True}),
    "mp4 with sound": (
        ["Look. ", clip(3, frames=8, fps=4, sound=sound(6, 1.9), form="mp4"), WORDS],
        {"use_audio_in_video": True},
    ),
    "fps": ([SILENT, WORDS], {"fps": 1.5}),
    "max_frames": ([SILENT, WORDS], {"fps": 4.0, "max_frames": 4}),
    "min_frames": ([clip(4, frames=30, fps=30), WORDS], {"min_frames": 6}),
    "sounds of both kinds": (
        [sound(7, 0.5), LOUD, "and", sound(8, 0.7), WORDS],
        {"use_audio_in_video": True},
    ),
    "several": ([SILENT, "and", picture(1, 64, 96), clip(5, frames=4), WORDS], {}),
}


@pytest.mark.parametrize(("parts", "options"), CASES.values(), ids=CASES.keys())
async def test_videos_equal_generate(
    model: Model, staged: OmniStages, parts: list[Any], options: dict[str, Any]
) -> None:
    """Text tokens and speech codes are those of ``generate``, the waveform but for rounding."""
    inputs = model.inputs(parts, options)
    tokens, codes, waveform = model.answer(inputs, options.get("use_audio_in_video", False))
    made = await staged.whole(params(model, options), messages=said(*parts))
    assert made["thinker"].tensors["token_ids"]["token_ids"].tolist() == tokens
    assert made["talker"].tensors["codes"]["codes"].tolist() == codes
    audio = made[model.stages[-1]].tensors["audio"]["audio"]
    assert waveform.std() > 1e-3
    torch.testing.assert_close(audio, waveform, atol=1e-4, rtol=0)


async def test_files_beside_a_prompt_are_as_in_messages(model: Model, staged: OmniStages) -> None:
    """The input ``video`` gets the file itself, and a picture or a sound may stand beside it."""
    thinker, options = staged.engines["thinker"], {"use_audio_in_video": True}
    request = StageRequest("one", params(model, options)["thinker"], stream=False)
    heard = sound(7, 0.5)
    file = torch.frombuffer(bytearray(LOUD), dtype=torch.uint8)
    rounded = torch.from_numpy((heard * 32_767).astype(np.int16).astype(np.float32) / 32_768)
    beside = {
        "prompt": StageInput(WORDS),
        "video": StageInput(None, {"0000": file}),
        "audio": StageInput([{"sample_rate": 16_000}], {"0000": rounded}),
    }
    within = {"messages": StageInput(said(heard, LOUD, WORDS))}
    made = [await thinker.run(request, inputs, NullEmit()) for inputs in (beside, within)]
    assert made[0].values["text"] == made[1].values["text"]
    prompt = [m.tensors["reply"]["prompt_hidden_states"] for m in made]
    assert prompt[0].equal(prompt[1])


async def test_others_go_on_while_a_video_is_decoded(
    model: Model, staged: OmniStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    chosen = videos.chosen_frames

    def slow(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return chosen(*args)

    monkeypatch.setattr(videos, "chosen_frames", slow)

    async def ask(messages: Any) -> Any:
        request = StageRequest("one", params(model, {})["thinker"], stream=False)
        inputs = {"messages": StageInput(messages)}
        return await staged.engines["thinker"].run(request, inputs, NullEmit())

    seen = asyncio.create_task(ask(said(SILENT, WORDS)))
    await asyncio.to_thread(begun.wait, 60)
    plain = await ask([{"role": "user", "content": WORDS}])
    assert plain.values["text"]
    assert not seen.done()
    go_on.set()
    assert (await seen).values["text"]


async def test_who_goes_away_ends_the_decoding(
    model: Model, staged: OmniStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run has not ended before: threads of requests that nobody wants do not pile up."""
    begun, ended = threading.Event(), threading.Event()

    def endless(data: bytes, name: str, choose: Any, most: int, clock: Any) -> Any:
        begun.set()
        try:
            while True:
                clock.check(0.0)
        finally:
            ended.set()

    monkeypatch.setattr(videos, "chosen_frames", endless)
    request = StageRequest("one", params(model, {})["thinker"], stream=False)
    inputs = {"messages": StageInput(said(SILENT, WORDS))}
    gone = asyncio.create_task(staged.engines["thinker"].run(request, inputs, NullEmit()))
    assert await asyncio.to_thread(begun.wait, 60)
    gone.cancel()
    await asyncio.wait([gone], timeout=60)
    assert gone.cancelled()
    assert ended.is_set()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> MediaPrompts:
    """What reads prompts, without weights."""
    folder = tmp_path_factory.mktemp("reader")
    save_processor(folder, make_omni_tokenizer(), "Qwen2_5OmniProcessor")
    return MediaPrompts(folder, PromptEncoder(folder, chat_template=True), QWEN2_5.processor)


def read(reader: MediaPrompts, *parts: Any, context: int = 1024, **options: Any) -> list[int]:
    asked = {"mm_processor_kwargs": options}
    return reader.read({"messages": StageInput(said(*parts))}, asked, context)[0]


FAULTS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "one frame": ([clip(6, frames=1)], {}, "a video must have at least 2 frames, has 1"),
    "no sound": (
        [SILENT],
        {"use_audio_in_video": True},
        "parameters.mm_processor_kwargs: use_audio_in_video: the file holds no sound",
    ),
    "no video": ([b"nothing of the kind" * 20], {}, "video_url holds no video that can be read"),
    "empty": ([b""], {}, "video_url holds no video that can be read"),
    "its head alone": ([LOUD[:40]], {}, "video_url holds no video that can be read"),
    "too many": ([clip(7, frames=2)] * 17, {}, "must have at most 16 videos"),
    "too long a prompt": (
        [clip(8, frames=40)],
        {"max_frames": 40, "fps": 8.0},
        r"videos alone are \d+ tokens, and the model takes 1024 in all; take fewer frames .*fps",
    ),
    "too short a sound": ([sound(1, 0.02)], {}, "a sound must last at least 25 ms"),
    "too narrow": ([clip(9, frames=4, size=(4096, 16))], {}, "aspect ratio"),
}


@pytest.mark.parametrize(("parts", "options", "fault"), FAULTS.values(), ids=FAULTS.keys())
def test_what_is_refused(
    reader: MediaPrompts, parts: list[Any], options: dict[str, Any], fault: str
) -> None:
    with pytest.raises(InvalidRequest, match=fault):
        read(reader, *parts, WORDS, **options)


def test_a_file_that_was_cut_off_gives_what_it_has(reader: MediaPrompts) -> None:
    """Or is refused; how many frames it has is counted, and its head believed in nothing."""
    whole = clip(10, frames=60, fps=30, size=(160, 120), form="mp4")
    for share in (0.3, 0.6, 0.9):
        for data in (whole[: int(len(whole) * share)], LOUD[: int(len(LOUD) * share)]):
            try:
                assert read(reader, data)
            except InvalidRequest:
                continue


def test_frames_that_are_not_taken_take_no_memory(reader: MediaPrompts, setting: Any) -> None:
    """The bound is on those that are, of all of a request's videos together."""
    long = clip(11, frames=120, fps=60, size=(160, 120))
    four = 4 * 160 * 120 * 3
    setting(redis_blob_max_bytes=2 * four)
    assert read(reader, long, long)
    with pytest.raises(InvalidRequest, match="which are allowed"):
        read(reader, long, long, long)


def test_videos_have_a_request_s_time_together(reader: MediaPrompts, setting: Any) -> None:
    setting(max_decode_seconds=1e-9)
    with pytest.raises(InvalidRequest, match="takes longer than 1e-09 s to decode"):
        read(reader, SILENT)


def test_what_may_be_said_of_videos_has_bounds() -> None:
    for options, fault in (
        ({"fps": 0}, "greater than 0"),
        ({"fps": 1000}, "less than or equal to 60"),
        ({"max_frames": 1}, "greater than or equal to 2"),
        ({"min_frames": 8, "max_frames": 4}, "at least min_frames, 8"),
        ({"use_audio_in_video": "yes"}, "valid boolean"),
        ({"size": 3}, "not permitted"),
    ):
        with pytest.raises(ValueError, match=fault):
            ARParams.model_validate({"mm_processor_kwargs": options})


def test_without_torchvision_videos_are_refused_and_pictures_read(
    reader: MediaPrompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_processor(tmp_path, make_omni_tokenizer(), "Qwen2_5OmniProcessor")
    monkeypatch.setattr("transformers.utils.is_torchvision_available", lambda: False)
    encoder = PromptEncoder(tmp_path, chat_template=True)
    without = MediaPrompts(tmp_path, encoder, QWEN2_5.processor)
    with pytest.raises(InvalidRequest, match="video needs torchvision, which is not installed"):
        read(without, SILENT, WORDS)
    made = StageInput([{"fps": 2.0}], {"0000": torch.zeros(4, 28, 28, 3, dtype=torch.uint8)})
    beside = {"prompt": StageInput(WORDS), "video": made}
    assert len(reader.read(beside, {}, 1024)[0]) > 200
    with pytest.raises(InvalidRequest, match=r"input\.video: video needs torchvision"):
        without.read(beside, {}, 1024)
    seen = [picture(1), sound(1), WORDS]
    assert read(without, *seen) == read(reader, *seen)

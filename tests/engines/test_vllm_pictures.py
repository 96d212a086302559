"""Pictures in conversations: a multimodal model in vLLM against transformers and vLLM alone."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from engine_helpers import loaded, stage
from PIL import Image
from tiny_vision import IMAGE_TOKENS, Reference, data_url, make_vision_model, picture, turn

from omniq.engines.base import NullEmit, StageInput, StageRequest
from omniq.errors import InvalidRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

COUNT = 12
GREEDY = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True}
CONTEXT = 160
LIMITS = {"image": 2}
#: Conversations of pictures of different sizes and texts, in any order.
TURNS: list[tuple[str | Image.Image, ...]] = [
    (picture(0), "a red circle"),
    (picture(1), "a red circle"),
    ("a red circle ", picture(2, 28, 28)),
    (picture(3, 90, 31), "above", picture(4, 20, 77), "a blue square"),
    (picture(4, 20, 77), "above", picture(3, 90, 31), "a blue square"),
    ("a red circle above a blue square",),
    (picture(5),),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "tiny")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[Any]:
    args = {
        "max_model_len": CONTEXT,
        "in_process": True,
        "limit_mm_per_prompt": LIMITS,
        "hidden_states": {"positions": "all"},
    }
    engine = await loaded(stage(folder, "ar", engine="vllm", subfolder=None, engine_args=args))
    yield engine
    await engine.unload()


async def _run(engine: Any, params: Any = None, **inputs: Any) -> Any:
    given = {k: v if isinstance(v, StageInput) else StageInput(v) for k, v in inputs.items()}
    return await engine.run(StageRequest("test", {**GREEDY, **(params or {})}), given, NullEmit())


def _tokens(out: Any) -> list[int]:
    return list(out.tensors["token_ids"]["token_ids"].tolist())


async def test_all_at_once_each_answers_as_transformers(engine: Any, reference: Reference) -> None:
    """Pictures of other requests, and equal ones in another order, are kept apart."""
    outs = await asyncio.gather(*[_run(engine, messages=turn(*parts)) for parts in TURNS])
    expected = [reference.greedy(*parts, count=COUNT) for parts in TURNS]
    assert len({tuple(tokens) for tokens in expected}) == len(TURNS)
    assert [_tokens(out) for out in outs] == expected
    for parts, out in zip(TURNS, outs, strict=True):
        length = reference.inputs(*parts)["input_ids"].shape[1]
        assert out.values["usage"]["prompt_tokens"] == length
    # Again, with everything in vLLM's caches of prefixes and of pictures.
    outs = await asyncio.gather(*[_run(engine, messages=turn(*parts)) for parts in TURNS])
    assert [_tokens(out) for out in outs] == expected


async def test_hidden_states_of_pictures_are_transformers(
    engine: Any, reference: Reference
) -> None:
    """Of the picture's positions and of those behind it."""
    parts = (picture(6), "a red circle")
    place = reference.model.config.image_token_id
    # A place for a picture that the model writes itself, the reference would want to fill.
    out = await _run(engine, {"logit_bias": {str(place): -100}}, messages=turn(*parts))
    inputs = reference.inputs(*parts)
    prompt = inputs["input_ids"]
    assert int((prompt == place).sum()) == IMAGE_TOKENS
    ids = torch.cat([prompt, torch.tensor([_tokens(out)])], dim=1)
    given = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        states = reference.model(**given, output_hidden_states=True).hidden_states[-1][0]
    length = prompt.shape[1]
    for name, expected in (
        ("prompt_hidden_states", states[:length]),
        ("hidden_states", states[length - 1 : -1]),
    ):
        rows = out.tensors[name][name]
        assert rows.shape == expected.shape
        torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-3)


async def test_a_picture_that_a_stage_before_has_made(engine: Any, reference: Reference) -> None:
    """A uint8 tensor beside a prompt is that picture in the user's turn."""
    image = picture(7)
    pixels = torch.from_numpy(np.asarray(image).copy())
    out = await _run(engine, prompt="a red circle", image=StageInput(tensors={"image": pixels}))
    assert _tokens(out) == reference.greedy(image, "a red circle", count=COUNT)


async def test_forms_of_pictures(engine: Any, reference: Reference) -> None:
    """JPEG, a palette, grey, transparency: what the file shows is what the model sees."""
    image = picture(8)
    jpeg = data_url(image, "JPEG")
    grey = image.convert("L")
    clear = image.convert("RGBA")
    clear.putalpha(grey)
    on_white = Image.composite(image, Image.new("RGB", image.size, "white"), grey)
    for url, shown in (
        (data_url(clear), on_white),
        (jpeg, _decoded(jpeg)),
        (data_url(grey), grey.convert("RGB")),
        (data_url(image.convert("P")), image.convert("P").convert("RGB")),
    ):
        content = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
        out = await _run(engine, messages=[{"role": "user", "content": content}])
        assert _tokens(out) == reference.greedy(shown, count=COUNT)


def _decoded(url: str) -> Image.Image:
    import base64
    import io

    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://pictures.example/a.png", "must be a data: URL"),
        ("data:image/png,plain", "must be base64"),
        ("data:image/png;base64,****", "not base64"),
        ("data:image/png;base64,aGVsbG8=", "no image that can be read"),
        (data_url(picture(0))[:-400], "no image that can be read"),
        (data_url(picture(0), "BMP"), "must be a PNG, JPEG, WEBP, GIF file"),
        (data_url(Image.new("1", (5000, 4000))), "must have at most 16777216 pixels"),
        (None, "must be a data: URL"),
    ],
)
async def test_a_picture_that_cannot_be_read_is_named(
    engine: Any, url: str | None, message: str
) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(InvalidRequest, match=message) as caught:
        await _run(engine, messages=[{"role": "user", "content": content}])
    assert [f["field"] for f in caught.value.fields] == ["input.messages"]


async def test_more_than_the_stage_takes_is_refused(engine: Any, reference: Reference) -> None:
    """Too many pictures, sound, or a prompt too long with them; the next request is served."""
    for messages, message in (
        (turn(picture(0), picture(1), picture(2)), "at most 2 of kind image; got 3"),
        (turn(picture(0), "red " * CONTEXT), str(CONTEXT)),
        ([{"role": "user", "content": [_sound()]}], "takes no audio"),
    ):
        with pytest.raises(InvalidRequest, match=message) as caught:
            await _run(engine, messages=messages)
        assert [f["field"] for f in caught.value.fields] == ["input.messages"]
    out = await _run(engine, messages=turn(picture(0)))
    assert _tokens(out) == reference.greedy(picture(0), count=COUNT)


def _sound() -> dict[str, Any]:
    import base64
    import io
    import wave

    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(3_200))
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


async def test_a_template_without_a_place_for_pictures(folder: Path, reference: Reference) -> None:
    """The model's own word for a picture stands before the text, or where the text has it."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    # In a process of its own: vLLM can have one engine in a process.
    args = {"max_model_len": CONTEXT, "custom_chat_template": template}
    engine = await loaded(
        stage(
            folder,
            "ar",
            engine="vllm",
            subfolder=None,
            output_modalities=["text"],
            engine_args={**args, "limit_mm_per_prompt": LIMITS},
        )
    )
    tokenizer = reference.processor.tokenizer
    reference.processor.chat_template = (
        "{% for m in messages %}{% for part in m['content'] %}"
        "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
    )
    try:
        for said, meant in (
            (("red", picture(0)), (picture(0), "\nred")),
            (("red <image> blue", picture(1)), ("red ", picture(1), " blue")),
            ((picture(0), "red <image>", picture(1)), (picture(0), "\nred ", picture(1))),
        ):
            out = await _run(engine, messages=turn(*said))
            assert _tokens(out) == reference.greedy(*meant, count=COUNT)
    finally:
        reference.processor.chat_template = tokenizer.chat_template
        await engine.unload()


async def test_vllm_alone_says_the_same(
    engine: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same messages through vLLM's own chat."""
    from vllm import LLM, SamplingParams

    from omniq.engines.vllm import contract

    ours = [_tokens(await _run(engine, messages=turn(*parts))) for parts in TURNS]
    monkeypatch.setitem(os.environ, contract.MULTIPROCESSING, "0")
    llm = LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=CONTEXT,
        limit_mm_per_prompt=LIMITS,
    )
    params = SamplingParams(**GREEDY)
    outs = llm.chat([turn(*parts) for parts in TURNS], params, use_tqdm=False)
    assert ours == [list(out.outputs[0].token_ids) for out in outs]

"""What clients get: values and files, by output type."""

from __future__ import annotations

import importlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.torch import load
from sounds import tags_of

from omniq import __version__
from omniq.config import OutputConfig
from omniq.config.params import DecodeParams
from omniq.errors import ConfigError
from omniq.outputs import MultimodalOutputProcessor, OutputContext, ProcessedOutput
from omniq.outputs.base import OutputError
from omniq.outputs.pooling import INLINE_MAX
from omniq.settings import get_settings

PROMPT = "a red circle, rouge clair: é, 赤い円 🙂"
CONTEXT = OutputContext(
    "job1", PROMPT, {"ar": {"seed": 5, "temperature": 0.7}, "dit": {"seed": 5, "width": 24}}
)
PIXELS = torch.randint(0, 256, (16, 24, 3), generator=torch.Generator().manual_seed(0)).to(
    torch.uint8
)


def process(kind: str, data: Any, form: str | None = None, **more: Any) -> ProcessedOutput:
    rate = {"sample_rate": 8_000} if kind == "audio" else {}
    config = OutputConfig.model_validate({"from": "s.out", "type": kind, "format": form, **rate})
    context = more.pop("context", CONTEXT)
    return MultimodalOutputProcessor().process("picture", config, data, context)


def picture(form: str | None = None, **more: Any) -> Any:
    artifact = process("image", {"image": PIXELS}, form, **more).artifact
    assert artifact is not None
    return artifact, Image.open(io.BytesIO(artifact.data))


def test_text_is_an_inline_value() -> None:
    assert process("text", "hello") == ProcessedOutput(value="hello")
    assert process("text", {"text": "hello"}) == ProcessedOutput(value="hello")
    with pytest.raises(OutputError, match="text must be a string, not int"):
        process("text", 3)


def test_png_has_the_same_pixels() -> None:
    artifact, image = picture()
    assert (artifact.name, artifact.content_type) == ("picture", "image/png")
    assert artifact.meta == {"width": 24, "height": 16, "format": "png"}
    assert np.array_equal(np.asarray(image), PIXELS.numpy())


def test_png_says_how_it_was_made() -> None:
    """Characters outside Latin-1 too."""
    _, image = picture()
    image.load()
    assert image.text["prompt"] == PROMPT
    assert image.text["seed"] == "5"
    assert json.loads(image.text["parameters"]) == CONTEXT.parameters
    assert image.text["job_id"] == "job1"
    assert image.text["Software"] == f"omniq {__version__}"


def test_seeds_that_differ_are_given_by_stage() -> None:
    context = OutputContext("j", "p", {"ar": {"seed": 1}, "dit": {"seed": 2}, "decode": {}})
    assert context.seed == {"ar": 1, "dit": 2}
    _, image = picture(context=context)
    assert json.loads(image.text["seed"]) == {"ar": 1, "dit": 2}
    _, image = picture(context=OutputContext("j"))
    assert "seed" not in image.text


@pytest.mark.parametrize("form", ["webp", "jpeg"])
def test_lossy_pictures_carry_the_same_facts(form: str) -> None:
    artifact, image = picture(form)
    assert artifact.content_type == f"image/{form}"
    assert image.format == form.upper()
    assert image.size == (24, 16)
    exif = image.getexif()
    assert exif[0x0131] == f"omniq {__version__}"
    comment = exif.get_ifd(0x8769)[0x9286]
    assert comment.startswith(b"ASCII\0\0\0")
    facts = json.loads(comment[8:])
    assert facts["prompt"] == PROMPT
    assert facts["seed"] == 5
    assert facts["parameters"] == CONTEXT.parameters


def test_longest_prompt_fits_every_format() -> None:
    context = OutputContext("j", "🙂" * 100_000)
    for form in ("png", "webp", "jpeg"):
        picture(form, context=context)[1].load()


@pytest.mark.parametrize(
    "pixels",
    [
        torch.zeros(16, 24, 3),
        torch.zeros(16, 24, 3, dtype=torch.bfloat16),
        torch.zeros(16, 24, 3, dtype=torch.int8),
        torch.zeros(3, 16, 24, dtype=torch.uint8),
        torch.zeros(1, 1, 16, 24, 3, dtype=torch.uint8),
        torch.zeros(0, 24, 3, dtype=torch.uint8),
    ],
)
def test_what_is_no_picture_is_refused(pixels: torch.Tensor) -> None:
    with pytest.raises(OutputError, match=r"output 'picture': a picture is uint8 \[H, W, 3\]"):
        process("image", {"image": pixels})


def test_several_pictures_become_several_files() -> None:
    """Each says its own seed; the first has the output's own name."""
    out = process("image", {"image": torch.stack([PIXELS, 255 - PIXELS])})
    assert [a.name for a in out.artifacts] == ["picture", "picture-1"]
    assert [a.meta["index"] for a in out.artifacts] == [0, 1]
    first, second = (Image.open(io.BytesIO(a.data)) for a in out.artifacts)
    assert np.array_equal(np.asarray(second), 255 - PIXELS.numpy())
    first.load(), second.load()
    assert (first.text["seed"], second.text["seed"]) == ("5", "6")
    assert json.loads(second.text["parameters"])["dit"] == {"seed": 6, "width": 24}
    assert [a.name for a in process("image", {"image": PIXELS[None]}).artifacts] == ["picture"]


def frames(count: int = 5, height: int = 16, width: int = 24) -> torch.Tensor:
    """A square that moves, uint8 [F, H, W, 3]."""
    made = torch.full((count, height, width, 3), 40, dtype=torch.uint8)
    for i in range(count):
        made[i, 4:10, 2 * i : 2 * i + 6] = torch.tensor([200, 60, 60], dtype=torch.uint8)
    return made


@pytest.mark.parametrize(("height", "width"), [(16, 24), (15, 23)])
def test_mp4_has_the_frames(height: int, width: int) -> None:
    av = pytest.importorskip("av")
    context = OutputContext("job1", PROMPT, {"decode": {"fps": 24.0}, "dit": {"seed": 5}})
    given = frames(7, height, width)
    artifact = process("video", {"video": given}, context=context).artifact
    assert artifact is not None
    assert artifact.content_type == "video/mp4"
    assert artifact.meta == {
        "width": width, "height": height, "frames": 7, "fps": 24.0, "format": "mp4",
    }  # fmt: skip
    with av.open(io.BytesIO(artifact.data)) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert stream.average_rate == 24
        facts = json.loads(container.metadata["comment"])
        back = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert (facts["prompt"], facts["seed"]) == (PROMPT, 5)
    assert np.stack(back).shape == given.shape
    assert np.abs(np.stack(back).astype(int) - given.numpy().astype(int)).mean() < 12


@pytest.mark.parametrize("form", ["webp", "gif"])
def test_animations_need_no_extra(form: str) -> None:
    artifact = process("video", {"video": frames()}, form).artifact
    assert artifact is not None
    image = Image.open(io.BytesIO(artifact.data))
    assert (image.n_frames, image.size) == (5, (24, 16))
    assert artifact.meta["fps"] == 16.0


def facts_in(kind: str, form: str, data: torch.Tensor, context: OutputContext) -> dict[str, Any]:
    """What a file says about how it was made."""
    artifact = process(kind, {"x": data}, form, context=context).artifact
    assert artifact is not None
    if kind == "audio":
        return dict(json.loads(tags_of(artifact.data)["comment"]))
    if form == "mp4":
        import av

        with av.open(io.BytesIO(artifact.data)) as container:
            return dict(json.loads(container.metadata["comment"]))
    image = Image.open(io.BytesIO(artifact.data))
    if form == "png":
        image.load()
        plain = ("prompt", "pipeline", "job_id", "Software")
        return {k: v if k in plain else json.loads(v) for k, v in image.text.items()}
    if form == "gif":
        return dict(json.loads(image.info["comment"]))
    comment = image.getexif().get_ifd(0x8769).get(0x9286)
    return {} if comment is None else dict(json.loads(comment[8:]))


EVERY_FILE = [
    *(("image", form) for form in ("png", "webp", "jpeg")),
    *(("video", form) for form in ("mp4", "webp", "gif")),
    *(("audio", form) for form in ("wav", "flac", "mp3", "opus")),
]
DATA = {"image": PIXELS, "audio": torch.zeros(800)}


@pytest.mark.parametrize(("kind", "form"), EVERY_FILE)
def test_every_file_says_the_same_unless_it_may_not(
    kind: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("av")
    context = replace(CONTEXT, pipeline="tiny@3")
    data = frames() if kind == "video" else DATA[kind]
    facts = facts_in(kind, form, data, context)
    wanted = {"prompt": PROMPT, "seed": 5, "pipeline": "tiny@3", "job_id": "job1"}
    assert wanted.items() <= facts.items()
    assert facts["parameters"] == CONTEXT.parameters
    monkeypatch.setenv("OMNIQ_EMBED_METADATA", "false")
    get_settings.cache_clear()
    assert set(facts_in(kind, form, data, context)) <= {"software", "Software"}
    monkeypatch.undo()
    get_settings.cache_clear()


@pytest.mark.parametrize(("kind", "form"), EVERY_FILE)
def test_every_file_takes_the_longest_request(kind: str, form: str) -> None:
    pytest.importorskip("av")
    long = {"ar": {"tools": ["🙂" * 20_000], "seed": 5}}
    context = OutputContext("j", "🙂" * 100_000, long)
    data = frames() if kind == "video" else DATA[kind]
    assert facts_in(kind, form, data, context)["seed"] == 5


@pytest.mark.parametrize("form", ["mp4", "webp", "gif"])
def test_every_format_takes_every_fps_that_a_request_may_ask_for(form: str) -> None:
    if form == "mp4":
        pytest.importorskip("av")
    with pytest.raises(ValidationError, match="fps"):
        DecodeParams.model_validate({"fps": 1e-6})
    for fps in (0.1, 240.0):
        params = DecodeParams.model_validate({"fps": fps}).model_dump()
        context = OutputContext("job1", PROMPT, {"decode": params})
        artifact = process("video", {"video": frames()}, form, context=context).artifact
        assert artifact is not None
        assert artifact.meta["fps"] == fps


def test_several_videos_become_several_files() -> None:
    out = process("video", {"video": torch.stack([frames()] * 2)}, "webp")
    assert [a.name for a in out.artifacts] == ["picture", "picture-1"]


def test_what_is_no_video_is_refused() -> None:
    for wrong in (PIXELS, frames().float(), frames()[..., :2]):
        with pytest.raises(OutputError, match=r"a video is uint8 \[F, H, W, 3\]"):
            process("video", {"video": wrong}, "webp")


def test_mp4_without_pyav_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.setattr("omniq.outputs.base.find_spec", lambda name: None)
    config = OutputConfig.model_validate({"from": "s.out", "type": "video"})
    with pytest.raises(ConfigError, match="needs PyAV") as caught:
        MultimodalOutputProcessor().check("clip", config)
    assert "omniq[media]" in str(caught.value.hint)


def test_picture_from_several_tensors_is_refused() -> None:
    with pytest.raises(OutputError, match=r"needs one tensor, got \['a', 'b'\]"):
        process("image", {"a": PIXELS, "b": PIXELS})
    with pytest.raises(OutputError, match="needs one tensor, got str"):
        process("image", "x")


def test_unknown_format_lists_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match="no format 'gif'; allowed: png, webp, jpeg"):
        picture("gif")
    with pytest.raises(ConfigError, match="no format 'txt'; allowed: none"):
        process("text", "x", "txt")


def test_text_and_picture_together() -> None:
    out = process("text+image", {"text": "hello", "image": {"image": PIXELS}})
    assert out.value == "hello"
    assert out.artifact is not None
    assert out.artifact.content_type == "image/png"
    with pytest.raises(OutputError, match=r"needs 'text' and 'image', got \['text'\]"):
        process("text+image", {"text": "hello"})


@pytest.mark.parametrize("kind", ["latents", "hidden_states"])
def test_tensors_become_a_safetensors_file(kind: str) -> None:
    """Views, shared memory and bfloat16 included."""
    base = torch.randn(4, 6)
    tensors = {"a": base, "b": base.t(), "c": base[1:3].to(torch.bfloat16)}
    artifact = process(kind, tensors).artifact
    assert artifact is not None
    assert artifact.content_type == "application/x-safetensors"
    assert artifact.meta["tensors"]["c"] == {"dtype": "bfloat16", "shape": [2, 6]}
    back = load(artifact.data)
    assert all(torch.equal(back[name], t) for name, t in tensors.items())


def test_safetensors_name_their_job(tmp_path: Path) -> None:
    artifact = process("latents", {"x": torch.ones(1)}).artifact
    assert artifact is not None
    (tmp_path / "f").write_bytes(artifact.data)
    with safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"job_id": "job1", "software": f"omniq {__version__}"}


def test_no_tensors_are_refused() -> None:
    for data in ({}, "x", {"a": 3}):
        with pytest.raises(OutputError):
            process("latents", data)


def test_small_embedding_is_an_inline_list() -> None:
    out = process("pooling", {"e": torch.tensor([1.0, -0.5], dtype=torch.bfloat16)})
    assert out == ProcessedOutput(value=[1.0, -0.5])
    assert process("pooling", [[0.5], [1]]).value == [[0.5], [1]]


def test_large_embedding_is_a_file_unless_json_is_asked_for() -> None:
    large = torch.randn(2, INLINE_MAX)
    out = process("pooling", {"e": large})
    assert out.value is None
    assert out.artifact is not None
    assert torch.equal(load(out.artifact.data)["picture"], large)
    assert process("pooling", {"e": large}, "json").artifact is None
    assert process("pooling", {"e": large[:, :2]}, "safetensors").value is None


@pytest.mark.parametrize(
    "data",
    [
        {"e": torch.zeros(1, 2, 3)},
        {"e": torch.zeros(3, dtype=torch.int64)},
        {"e": torch.tensor([float("nan")])},
        [float("inf")],
        ["x"],
        [True],
    ],
)
def test_what_is_no_embedding_is_refused(data: Any) -> None:
    with pytest.raises(OutputError):
        process("pooling", data)


def test_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(ValidationError, match=r"no output type 'smell'; allowed: .*text\+image"):
        process("smell", b"")


def test_check_finds_wrong_formats_without_data() -> None:
    config = OutputConfig.model_validate({"from": "s.out", "type": "image", "format": "gif"})
    with pytest.raises(ConfigError, match="gif"):
        MultimodalOutputProcessor().check("picture", config)


def test_third_party_handler_adds_a_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But never replaces a built-in one."""
    info = tmp_path / "smell-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: smell\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[omniq.outputs]\nsmell = smell_output:Smell\ntext = smell_output:Smell\n"
    )
    (tmp_path / "smell_output.py").write_text(
        "from omniq.outputs import OutputHandler, ProcessedOutput\n"
        "class Smell(OutputHandler):\n"
        "    def encode(self, name, form, data, context):\n"
        "        return ProcessedOutput(value='smell')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert process("smell", b"").value == "smell"
    assert process("text", "hello").value == "hello"

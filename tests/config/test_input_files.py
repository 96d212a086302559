"""Pictures and tensors of a request: every way to give one, and what is refused."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load
from safetensors.torch import save

from omniq.config import PipelineConfig
from omniq.config.request import validate_request
from omniq.errors import ArtifactNotFound, InputTooLarge, InvalidRequest, UnsupportedInput
from omniq.inputs import InputFile, read_inputs
from omniq.request_output import Artifact
from omniq.settings import get_settings

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
PIPELINE = PipelineConfig.model_validate(
    {
        "name": "edit",
        "inputs": {
            "prompt": {"type": "text"},
            "image": {"type": "image", "required": False, "max_items": 3, "max_pixels": 100},
            "latents": {"type": "latents", "required": False},
        },
        "stages": [{"stage_id": "dit", "engine_type": "DiT", "model": "none"}],
        "edges": [{"from": f"input.{n}", "to": f"dit.{n}"} for n in ("prompt", "image", "latents")],
        "outputs": {"latents": {"from": "dit.latents", "type": "latents"}},
    }
)


def encoded(form: str = "PNG", pixels: np.ndarray = PIXELS, **more: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **more)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def read(value: Any, name: str = "image", *, local: bool = True) -> InputFile:
    async def fetch(job: str, artifact: str) -> bytes:
        if (job, artifact) != ("j1", "image-1"):
            raise ArtifactNotFound(f"job {job} has no artifact {artifact!r}")
        return encoded()

    inputs = {"prompt": "x", name: value}
    validate_request(PIPELINE, inputs, {})
    found = (await read_inputs(PIPELINE, inputs, fetch, local=local))[name]
    assert isinstance(found, InputFile)
    return found


REMOTE = [
    encoded(),
    data_url(encoded()),
    {"job": "j1", "artifact": "image-1"},
    "/v1/jobs/j1/artifacts/image-1",
    "/mounted/here/v1/jobs/j1/artifacts/image%2D1",
]
LOCAL = [Image.fromarray(PIXELS), PIXELS, torch.from_numpy(PIXELS), Artifact("x", "y", encoded())]


@pytest.mark.parametrize("value", REMOTE + LOCAL, ids=range(len(REMOTE + LOCAL)))
async def test_every_way_to_give_a_picture(value: Any) -> None:
    made = await read(value)
    assert np.array_equal(load(made.data)["0000"], PIXELS)
    assert made.shown == [{"width": 8, "height": 6}]


@pytest.mark.parametrize("kind", [str, Path])
async def test_paths_are_read_only_for_local_clients(tmp_path: Path, kind: type) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(encoded())
    assert np.array_equal(load((await read(kind(file))).data)["0000"], PIXELS)
    with pytest.raises(InvalidRequest, match="must be a"):
        await read(kind(file), local=False)
    with pytest.raises(InvalidRequest, match="no file that can be read"):
        await read(kind(tmp_path / "none.png"))


async def test_several_pictures_keep_their_order() -> None:
    made = await read([PIXELS, encoded(pixels=PIXELS[::-1].copy())])
    found = load(made.data)
    assert np.array_equal(found["0000"], PIXELS)
    assert np.array_equal(found["0001"], PIXELS[::-1])
    assert len(made.shown) == 2


async def test_pictures_are_read_as_diffusers_reads_them(tmp_path: Path) -> None:
    """Orientation, transparency, palettes; 16 bits of grey are not clipped."""
    from diffusers.utils import load_image

    exif = Image.Exif()
    exif[0x0112] = 6
    turned = io.BytesIO()
    Image.fromarray(PIXELS).save(turned, "PNG", exif=exif)
    clear = io.BytesIO()
    Image.fromarray(np.dstack([PIXELS, PIXELS[..., 0]])).save(clear, "PNG")
    palette = io.BytesIO()
    Image.fromarray(PIXELS).quantize(16).save(palette, "PNG")
    for data in (turned.getvalue(), clear.getvalue(), palette.getvalue(), encoded("JPEG")):
        (tmp_path / "x").write_bytes(data)
        expected = np.asarray(load_image(str(tmp_path / "x")))
        assert np.array_equal(load((await read(data)).data)["0000"], expected)
    deep = io.BytesIO()
    Image.fromarray((PIXELS[..., 0].astype(np.uint16) << 8) + 7).save(deep, "PNG")
    grey = load((await read(deep.getvalue())).data)["0000"]
    assert np.array_equal(grey, np.repeat(PIXELS[..., :1], 3, axis=2))


def bomb(side: int) -> bytes:
    """A PNG that says it has ``side`` x ``side`` pixels and holds none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))


def odd_exif() -> bytes:
    """A picture to be turned, whose EXIF has a text where a number belongs."""
    tags = ((0x112, 3, 1, 6), (0x11A, 2, 1, 0x41))
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4)
    return encoded(exif=exif)


FAULTS: list[tuple[Any, type[InvalidRequest], str]] = [
    (bomb(100_000), InputTooLarge, "at most 100 pixels"),
    (bomb(11), InputTooLarge, r"at most 100 pixels, has 11 x 11 = 121"),
    (np.zeros((11, 11, 3), np.uint8), InputTooLarge, "at most 100 pixels"),
    (encoded()[:-30], InvalidRequest, "cannot be decoded"),
    (odd_exif(), InvalidRequest, "cannot be decoded"),
    (b"GIF89a", UnsupportedInput, "must be a PNG, JPEG, WEBP file"),
    (encoded("GIF"), UnsupportedInput, "must be a PNG, JPEG, WEBP file"),
    (b"", UnsupportedInput, "must be a PNG"),
    (data_url(b"<svg/>", "image/svg+xml"), UnsupportedInput, "must be a PNG"),
    ("data:image/png;base64,???", InvalidRequest, "holds no base64"),
    ("data:image/png", InvalidRequest, "comma"),
    ("https://example.com/a.png", InvalidRequest, "nothing is fetched from a network"),
    ("file:///etc/passwd", InvalidRequest, "nothing is fetched from a network"),
    ({"job": "j1", "artifact": "no"}, InvalidRequest, "has no artifact 'no'"),
    ({"job": "j1"}, InvalidRequest, "an object names a result file"),
    ({"job": "j1", "artifact": "x" * 9999}, InvalidRequest, "has at most 256 characters"),
    (f"/v1/jobs/j1/artifacts/{'x' * 9999}", InvalidRequest, "has at most 256 characters"),
    (np.zeros((4, 4), np.uint8), InvalidRequest, r"must be uint8 \[H, W, 3\]"),
    (PIXELS / 255, InvalidRequest, r"must be uint8 \[H, W, 3\], is float64"),
    (3, InvalidRequest, "must be a picture, not int"),
    ([PIXELS, b"x"], UnsupportedInput, r"input\.image\.1"),
    ([], InvalidRequest, "must have 1 to 3 pictures, has 0"),
    ([PIXELS] * 4, InvalidRequest, "must have 1 to 3 pictures, has 4"),
    (None, InvalidRequest, "must not be null"),
]


@pytest.mark.parametrize(("value", "error", "message"), FAULTS, ids=range(len(FAULTS)))
async def test_what_is_no_usable_picture_is_refused(
    value: Any, error: type[InvalidRequest], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        await read(value)
    assert type(caught.value) is error
    assert caught.value.fields[0]["field"].startswith("input.image")


async def test_settings_bound_bytes_and_pixels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the pipeline allows, and before a file or a data URL is read whole."""
    monkeypatch.setenv("OMNIQ_MAX_IMAGE_PIXELS", "40")
    get_settings.cache_clear()
    with pytest.raises(InputTooLarge, match="at most 40 pixels"):
        await read(PIXELS)
    monkeypatch.setenv("OMNIQ_MAX_INPUT_BYTES", "50")
    get_settings.cache_clear()
    (tmp_path / "a.png").write_bytes(encoded())
    for value in (encoded(), data_url(encoded()), tmp_path / "a.png", REMOTE[2]):
        with pytest.raises(InputTooLarge, match="must have at most 50 bytes, has"):
            await read(value)
    get_settings.cache_clear()


async def test_what_pictures_hold_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few bytes may hold very many; the next stage's store must have room for all."""
    one = np.zeros((10, 10, 3), np.uint8)
    monkeypatch.setenv("OMNIQ_REDIS_BLOB_MAX_BYTES", str(4096 + 2 * one.nbytes))
    get_settings.cache_clear()
    assert len((await read([encoded(pixels=one)] * 2)).shown) == 2
    with pytest.raises(InputTooLarge, match=r"input\.image\.2: has 900 bytes decoded, with those"):
        await read([encoded(pixels=one)] * 3)
    with pytest.raises(InputTooLarge, match=r"input\.latents: has \d+ bytes"):
        await read(torch.zeros(1, 4, 32, 32), "latents")
    get_settings.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_latents_travel_as_they_are(dtype: torch.dtype) -> None:
    from safetensors.torch import load as load_torch

    given = torch.randn(1, 4, 8, 8).to(dtype)
    file = save({"anything": given})
    for value in (given, file, data_url(file, "application/x-safetensors"), {"latents": given}):
        made = await read(value, "latents")
        assert torch.equal(next(iter(load_torch(made.data).values())), given)
        assert made.shown["shape"] == [1, 4, 8, 8]
    array = given.float().numpy()
    assert np.array_equal(load((await read(array, "latents")).data)["latents"], array)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (b"x" * 20, UnsupportedInput, "must be a safetensors file"),
        (encoded(), UnsupportedInput, "must be a safetensors file"),
        (save({"a": torch.zeros(1), "b": torch.zeros(1)}), InvalidRequest, "holds 2: a, b"),
        (torch.zeros(4, 8, 8), InvalidRequest, r"\[n, C, h, w\] .* is F32 \[4, 8, 8\]"),
        (torch.zeros(1, 4, 8, 8, dtype=torch.int32), InvalidRequest, "floating point"),
        ([torch.zeros(1, 4, 8, 8)], InvalidRequest, "must be one file, not a list"),
        ("x", InvalidRequest, "no file that can be read"),
    ],
)
async def test_what_is_no_latents_is_refused(
    value: Any, error: type[InvalidRequest], message: str
) -> None:
    with pytest.raises(error, match=message):
        await read(value, "latents")

"""What is fed with bad inputs: each target takes one and returns whether it was accepted.

A refusal is an error that the part documents; any other exception is a finding.
"""

from __future__ import annotations

import asyncio
import base64
import io
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import yaml
from bad_inputs import mutated, text, value
from PIL import Image
from sounds import tone

from omniq.blobs import codec
from omniq.blobs.redis_frame import HEADER_BYTES, Plan, read_header
from omniq.config import PipelineConfig
from omniq.config.loader import BUILTIN_DIR, parse_pipeline
from omniq.config.request import validate_request
from omniq.errors import BlobCorrupt, ConfigError, InvalidRequest
from omniq.inputs import read_inputs
from omniq.inputs.pictures import pixels_of, transparency_of
from omniq.inputs.sounds import samples_of
from omniq.inputs.sources import source_of
from omniq.inputs.tensors import tensor_file
from omniq.inputs.videos import chosen_frames, frames_of
from omniq.outputs.base import OutputContext
from omniq.outputs.sound import to_int16
from omniq.outputs.sound_files import encoded
from omniq.outputs.video import VideoHandler

Target = Callable[[random.Random], bool]

#: Every type of input, and stages of every type.
OMNI = """
name: fuzz
inputs:
  prompt: {type: text, max_length: 500}
  messages: {type: messages, required: false}
  ids: {type: token_ids, required: false}
  image: {type: image, required: false, max_items: 2, max_pixels: 5000}
  sound: {type: audio, required: false, max_seconds: 1}
  clip: {type: video, required: false, max_frames: 8, max_pixels: 5000}
  latents: {type: latents, required: false}
stages:
  - {stage_id: ar, engine_type: AR, model: none, limits: {max_tokens: {max: 64}}}
  - {stage_id: encode, engine_type: encode, model: none}
  - {stage_id: dit, engine_type: DiT, model: none, limits: {width: {multiple_of: 8}}}
  - {stage_id: decode, engine_type: decode, model: none}
edges:
  - {from: input.prompt, to: ar.prompt}
  - {from: input.messages, to: ar.messages}
  - {from: input.ids, to: ar.ids}
  - {from: input.sound, to: ar.sound}
  - {from: input.clip, to: ar.clip}
  - {from: ar.text, to: encode.text, trigger: window, window: 2}
  - {from: encode.embeds, to: dit.embeds}
  - {from: input.image, to: dit.image}
  - {from: input.latents, to: dit.latents}
  - {from: dit.latents, to: decode.latents}
outputs:
  image: {from: decode.image, type: image, format: webp}
  voice: {from: ar.voice, type: audio, sample_rate: 16000}
"""


@cache
def omni() -> PipelineConfig:
    return parse_pipeline(OMNI, "fuzz.yaml")


def refused(*kinds: type[Exception]) -> Callable[[Target], Target]:
    """The target, with these errors as refusals."""

    def wrap(target: Target) -> Target:
        def run(rng: random.Random) -> bool:
            try:
                target(rng)
            except kinds:
                return False
            return True

        return run

    return wrap


@cache
def _blob() -> bytes:
    tensors = {
        "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "b": torch.ones(2, 1, 3, dtype=torch.bfloat16),
        "c": torch.zeros(0, 5, dtype=torch.int8),
    }
    from safetensors.torch import save

    return bytes(save(tensors, {"k": "v"}))


@refused(BlobCorrupt)
def blobs(rng: random.Random) -> bool:
    for tensor in codec.parse(mutated(rng, _blob())).values():
        tensor.float().sum()
    return True


@cache
def _latents() -> bytes:
    from safetensors.torch import save

    return bytes(save({"latents": torch.zeros(1, 4, 8, 8)}))


@refused(InvalidRequest)
def safetensors(rng: random.Random) -> bool:
    tensor_file(mutated(rng, _latents()), "input.latents")
    return True


@cache
def _pictures() -> list[bytes]:
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8))
    clear = pixels.convert("RGBA")
    made = []
    for picture, form, more in (
        (pixels, "PNG", {}),
        (clear, "PNG", {}),
        (pixels.quantize(8), "PNG", {"transparency": 0}),
        (pixels, "JPEG", {"exif": _exif()}),
        (pixels, "JPEG", {"progressive": True}),
        (pixels, "WEBP", {"exif": _exif()}),
        (clear, "WEBP", {"lossless": True}),
    ):
        file = io.BytesIO()
        picture.save(file, form, **more)
        made.append(file.getvalue())
    return made


def _exif() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x0131] = "x"
    return exif.tobytes()


@refused(InvalidRequest)
def pictures(rng: random.Random) -> bool:
    read = pixels_of if rng.random() < 0.8 else transparency_of
    read(mutated(rng, rng.choice(_pictures())), "input.image", 5000)
    return True


@cache
def _sounds() -> list[bytes]:
    samples, context = to_int16(tone(16_000, 0.1)), OutputContext("j", "x", {})
    return [encoded(samples, 16_000, f, context) for f in ("wav", "flac", "mp3", "opus", "aac")]


@refused(InvalidRequest)
def sounds(rng: random.Random) -> bool:
    samples_of(mutated(rng, rng.choice(_sounds())), "input.sound", 16_000, 2.0)
    return True


@cache
def _clip() -> bytes:
    frames = torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(-1, 32, 32, 3) * 60
    context = OutputContext("j", "x", {})
    artifact = VideoHandler().encode("v", "mp4", {"v": frames.contiguous()}, context).artifact
    assert artifact is not None
    return artifact.data


@refused(InvalidRequest)
def videos(rng: random.Random) -> bool:
    data = mutated(rng, _clip())
    if rng.random() < 0.5:
        frames_of(data, "input.clip", omni().inputs["clip"], 1 << 20)
    else:
        chosen_frames(data, "input.clip", lambda total, rate: range(0, total, 2), 1 << 20)
    return True


@cache
def _texts() -> list[str]:
    return [OMNI, *(p.read_text() for p in sorted(BUILTIN_DIR.glob("*.yaml")))]


@refused(ConfigError)
def pipelines(rng: random.Random) -> bool:
    source = rng.choice(_texts())
    if rng.random() < 0.5:
        bad = mutated(rng, source.encode()).decode("utf-8", "replace")
    else:
        tree = yaml.safe_load(source)
        _spoil(rng, tree)
        bad = yaml.safe_dump(tree)
    parse_pipeline(bad, "fuzz.yaml")
    return True


def _spoil(rng: random.Random, tree: Any) -> None:
    """Put something else somewhere into a tree of lists and objects."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(tree[key], dict | list) or rng.random() < 0.2:
            match rng.randrange(3):
                case 0:
                    del tree[key]
                case 1 if isinstance(tree, dict):
                    tree[text(rng).replace("\ud800", "")[:30]] = tree.pop(key)
                case _:
                    made = value(rng)
                    tree[key] = made if "\ud800" not in str(made) else None
            return
        tree = tree[key]


PARAMETERS = (
    *("seed", "width", "max_tokens", "stop", "structured_outputs", "logit_bias", "lora", "tools"),
    *("tool_choice", "fps", "sigmas", "negative_prompt", "ar", "dit", "extra_args"),
)


@refused(InvalidRequest)
def requests(rng: random.Random) -> bool:
    names = [*omni().inputs, "other"]
    inputs = {"prompt": "x"} if rng.random() < 0.7 else {}
    for name in rng.sample(names, rng.randrange(3)):
        inputs[name] = value(rng)
    parameters = {rng.choice(PARAMETERS): value(rng) for _ in range(rng.randrange(4))}
    validate_request(omni(), inputs, parameters)
    return True


async def _fetch(job: str, artifact: str) -> bytes:
    return b""


@refused(InvalidRequest)
def files(rng: random.Random) -> bool:
    name = rng.choice(("image", "sound", "clip", "latents"))
    given = value(rng) if rng.random() < 0.5 else text(rng)
    if rng.random() < 0.3:
        given = f"data:{text(rng)}"
    elif rng.random() < 0.3:
        real = rng.choice((_pictures()[0], _sounds()[0], _clip(), _latents()))
        data = mutated(rng, real) if rng.random() < 0.7 else real
        given = f"data:x/y;base64,{base64.b64encode(data).decode()}"
    source_of(given, f"input.{name}", local=False)
    inputs = {"prompt": "x", name: given}
    validate_request(omni(), inputs, {})
    asyncio.run(read_inputs(omni(), inputs, _fetch))
    return True


@refused(BlobCorrupt)
def frames(rng: random.Random) -> bool:
    """Heads of chunks in Redis."""
    head = mutated(rng, Plan(100, 64, bytes(8)).header(1))[:HEADER_BYTES]
    plan = read_header(head.ljust(HEADER_BYTES, b"\0"), 1, 100)
    assert plan.nbytes == 100 and plan.chunks >= 1
    return True


LOCAL: dict[str, Target] = {
    "blobs": blobs,
    "frames": frames,
    "safetensors": safetensors,
    "pictures": pictures,
    "sounds": sounds,
    "videos": videos,
    "pipelines": pipelines,
    "requests": requests,
    "files": files,
}

"""Images and sound in a request, as vLLM's multimodal models take them."""

from __future__ import annotations

import base64
import binascii
import io
import wave
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from omniq.engines.base import StageInput
from omniq.errors import InputTooLarge, InvalidRequest
from omniq.inputs.pictures import FORMATS as PICTURES
from omniq.inputs.pictures import read_file
from omniq.settings import get_settings

#: Input names of a stage that carry media, and vLLM's name of the kind.
INPUTS = {"image": "image", "images": "image", "audio": "audio"}
#: Content parts that are media, and vLLM's name of the kind.
PARTS = {"image_url": "image", "input_audio": "audio"}
#: Pictures that messages may hold, as in OpenAI's API.
FORMATS = (*PICTURES, "GIF")
DEFAULT_SAMPLE_RATE = 16_000

Media = dict[str, list[Any]]


def of_inputs(inputs: Mapping[str, StageInput]) -> Media:
    """Media that stages before have made.

    Images are uint8 ``[H, W, 3]`` tensors, any number in one input; audio is one float tensor
    ``[samples]`` with ``{"sample_rate": hertz}`` as the input's value.

    Raises:
        InvalidRequest: a tensor is nothing of that kind.
    """
    found: Media = {}
    for name, kind in INPUTS.items():
        for key, tensor in inputs[name].tensors.items() if name in inputs else ():
            array = tensor.cpu().numpy()
            if kind == "image":
                if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
                    raise bad(name, f"{key!r} must be uint8 [H, W, 3], is {_form(array)}")
                found.setdefault(kind, []).append(Image.fromarray(array))
            else:
                if array.dtype.kind != "f" or array.ndim != 1:
                    raise bad(name, f"{key!r} must be float [samples], is {_form(array)}")
                value = inputs[name].value
                rate = value.get("sample_rate") if isinstance(value, dict) else None
                found.setdefault(kind, []).append(
                    (array.astype(np.float32), float(rate or DEFAULT_SAMPLE_RATE))
                )
    return found


def with_parts(content: Any, found: Media) -> list[dict[str, Any]]:
    """A message's content with a part for each of the media before it."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return [{"type": kind} for kind, items in found.items() for _ in items] + parts


def of_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], Media]:
    """Chat messages for a chat template, and the media that were in them, in order.

    Content parts are those of OpenAI's API: ``text``, ``image_url`` with a ``data:`` URL, and
    ``input_audio`` with base64 WAV. Nothing is fetched from a network.

    Raises:
        InvalidRequest: a part is of another type, or cannot be decoded.
    """
    media: Media = {}
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [_part(part, media) for part in content]
        plain.append({**message, "content": content})
    return plain, media


def counts(messages: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """How many media of each kind are in messages, by what their parts say."""
    found: Counter[str] = Counter()
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(kind := part.get("type"), str):
                found.update([PARTS[kind]] if kind in PARTS else ())
    return found


def as_text(
    messages: Sequence[Mapping[str, Any]], placeholder: Callable[[str, int], str | None]
) -> list[dict[str, Any]]:
    """Chat messages for a template that reads no parts: media as the model's own words for them.

    As vLLM's server does: those that a message's text does not place itself stand before it.

    Args:
        messages: of :func:`of_messages`.
        placeholder: the model's word for the i-th (from 1) item of a kind, if it needs one.
    """
    counts: Counter[str] = Counter()
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            text = "\n".join(part["text"] for part in content if part["type"] == "text")
            words: Counter[str] = Counter()
            for kind in (part["type"] for part in content if part["type"] != "text"):
                counts[kind] += 1
                if word := placeholder(kind, counts[kind]):
                    words[word] += 1
            missing = [w for word, n in words.items() for w in [word] * (n - text.count(word))]
            content = "\n".join([*missing, text] if text else missing)
        plain.append({**message, "content": content})
    return plain


def _part(part: Any, media: Media) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        media.setdefault("image", []).append(_image(url))
        return {"type": "image"}
    if kind == "input_audio":
        sound = part.get("input_audio")
        media.setdefault("audio", []).append(_audio(sound if isinstance(sound, dict) else {}))
        return {"type": "audio"}
    raise bad(
        "messages", f"a content part is text, image_url or input_audio, not {str(part)[:80]!r}"
    )


def _image(url: Any) -> Image.Image:
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise bad("messages", "image_url must be a data: URL; nothing is fetched from a network")
    header, _, data = url.partition(",")
    if not header.lower().endswith(";base64"):
        raise bad("messages", "image_url must be base64")
    try:
        return read_file(
            _decoded(data), "image_url", get_settings().max_image_pixels, _as_vllm, FORMATS
        )
    except InputTooLarge as exc:
        raise bad("messages", exc.message) from exc
    except InvalidRequest as exc:
        if exc.fields[0]["field"] != "image_url":
            raise
        fault = exc.fields[0]["message"]
        raise bad("messages", f"image_url holds no image that can be read: {fault}") from exc


def _as_vllm(image: Image.Image) -> Image.Image:
    """RGB as vLLM's own server makes it: turned as EXIF says, transparency on white."""
    turned = ImageOps.exif_transpose(image)
    if turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info:
        clear = turned.convert("RGBA")
        white = Image.new("RGB", clear.size, (255, 255, 255))
        white.paste(clear, mask=clear.getchannel("A"))
        return white
    return turned.convert("RGB")


def _audio(sound: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    if sound.get("format") != "wav" or not isinstance(sound.get("data"), str):
        raise bad("messages", "input_audio needs format 'wav' and base64 data")
    try:
        with wave.open(io.BytesIO(_decoded(sound["data"]))) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError, ValueError) as exc:
        raise bad("messages", f"input_audio holds no WAV that can be read: {exc}") from exc
    if width != 2:
        raise bad("messages", f"input_audio must have 16 bits a sample, has {8 * width}")
    samples = np.frombuffer(frames, np.int16, len(frames) // (2 * channels) * channels)
    return samples.reshape(-1, channels).mean(axis=1).astype(np.float32) / 32_768, float(rate)


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise bad("messages", f"not base64: {exc}") from exc


def bad(name: str, message: str) -> InvalidRequest:
    """The error that names one input."""
    field = f"input.{name}"
    return InvalidRequest(f"{field}: {message}", fields=[{"field": field, "message": message}])


def _form(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"

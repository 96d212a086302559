"""Images, sound and videos in a request, as vLLM's multimodal models take them."""

from __future__ import annotations

import base64
import binascii
import io
import wave
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from omniq.config.pipeline import InputConfig
from omniq.engines.base import StageInput
from omniq.errors import InputTooLarge, InvalidRequest
from omniq.inputs.decoding import check_sound
from omniq.inputs.pictures import FORMATS as PICTURES
from omniq.inputs.pictures import read_file
from omniq.inputs.sounds import sound_of
from omniq.inputs.videos import frames_of
from omniq.settings import get_settings

#: Input names of a stage that carry media, and vLLM's name of the kind.
INPUTS = {"image": "image", "images": "image", "audio": "audio", "video": "video"}
#: Content parts that are media, and vLLM's name of the kind.
PARTS = {
    "image_url": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
}
#: What ``input_audio`` may say it holds; what it does hold is looked at.
SOUNDS = ("wav", "mp3", "flac", "ogg", "opus", "aac")
#: Pictures that messages may hold, as in OpenAI's API.
FORMATS = (*PICTURES, "GIF")
DEFAULT_SAMPLE_RATE = 16_000
#: Of a video in messages, frames of a second that are taken, and how many at most.
FPS, MOST_FRAMES = 2.0, 256

Media = dict[str, list[Any]]
#: float32 [samples], and how many a second.
Sound = tuple[np.ndarray, float]
#: Reads a video file, given as errors call it: what vLLM calls a video, and its sound if that is
#: wanted, too.
ReadVideo = Callable[[bytes, str], tuple[Any, Sound | None]]


def of_inputs(inputs: Mapping[str, StageInput]) -> Media:
    """Media that stages before have made.

    Images are uint8 ``[H, W, 3]`` tensors, audio is float tensors ``[samples]``, videos are uint8
    ``[frames, H, W, 3]`` or files, uint8 ``[bytes]``; any number in one input. The input's value
    says of sounds the ``sample_rate`` (hertz) and of videos the ``fps``: an object, or a list of
    one for each.

    Raises:
        InvalidRequest: a tensor is nothing of that kind.
    """
    found: Media = {}
    for name, kind in INPUTS.items():
        tensors = inputs[name].tensors if name in inputs else {}
        for i, (key, tensor) in enumerate(tensors.items()):
            array, facts = tensor.cpu().numpy(), _facts(inputs[name].value, i)
            if kind == "image":
                if _is_no_picture(array, 3):
                    raise bad(name, f"{key!r} must be uint8 [H, W, 3], is {_form(array)}")
                found.setdefault(kind, []).append(Image.fromarray(array))
            elif kind == "video" and array.dtype == np.uint8 and array.ndim == 1:
                try:
                    found.setdefault(kind, []).append(
                        read_video(array.tobytes(), f"input.{name}")[0]
                    )
                except InputTooLarge as exc:
                    raise bad(name, exc.message) from exc
            elif kind == "video":
                if _is_no_picture(array, 4):
                    raise bad(name, f"{key!r} must be uint8 [frames, H, W, 3], is {_form(array)}")
                found.setdefault(kind, []).append(_video(array, facts.get("fps")))
            else:
                if array.dtype.kind != "f" or array.ndim != 1 or not array.size:
                    raise bad(name, f"{key!r} must be float [samples], is {_form(array)}")
                rate = facts.get("sample_rate") or DEFAULT_SAMPLE_RATE
                found.setdefault(kind, []).append((array.astype(np.float32), float(rate)))
    return found


def _is_no_picture(array: np.ndarray, axes: int) -> bool:
    """Whether it is no picture, or no video, or one of nothing."""
    return array.dtype != np.uint8 or array.ndim != axes or array.shape[-1] != 3 or not array.size


def _facts(value: Any, index: int) -> Mapping[str, Any]:
    if isinstance(value, list) and index < len(value):
        value = value[index]
    return value if isinstance(value, dict) else {}


def read_video(data: bytes, field: str) -> tuple[Any, None]:
    """At most ``FPS`` frames of each second, without the sound.

    Raises:
        InvalidRequest: or a subclass, naming ``field``; also for more than ``MOST_FRAMES``.
    """
    spec = InputConfig(type="video", fps=FPS, max_frames=MOST_FRAMES, max_seconds=MOST_FRAMES / FPS)
    return _video(*frames_of(data, field, spec, get_settings().redis_blob_max_bytes)), None


def _video(frames: np.ndarray, fps: float | None) -> tuple[np.ndarray, dict[str, Any]]:
    """Frames and what vLLM is told of them: they are all to be used."""
    rate = fps or FPS
    about = {
        "fps": rate,
        "duration": len(frames) / rate,
        "total_num_frames": len(frames),
        "frames_indices": list(range(len(frames))),
        "video_backend": "pyav",
        "do_sample_frames": False,
    }
    return frames, about


def with_parts(content: Any, found: Media) -> list[dict[str, Any]]:
    """A message's content with a part for each of the media before it."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return [{"type": kind} for kind, items in found.items() for _ in items] + parts


def of_messages(
    messages: Sequence[Mapping[str, Any]], read_video: ReadVideo = read_video
) -> tuple[list[dict[str, Any]], Media]:
    """Chat messages for a chat template, and the media that were in them, in order.

    Content parts are those of OpenAI's API, ``text``, ``image_url`` and ``input_audio``, and those
    of vLLM's server, ``audio_url`` and ``video_url``; URLs are ``data:`` URLs. Nothing is fetched
    from a network here.

    Args:
        messages: of valid outer form.
        read_video: a sound that it gives stands among the sounds where the video is.

    Raises:
        InvalidRequest: a part is of another type, or cannot be decoded.
    """
    media: Media = {}
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [_part(part, media, read_video) for part in content]
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


def _part(part: Any, media: Media, read_video: ReadVideo) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        media.setdefault("image", []).append(_image(part))
        return {"type": "image"}
    if kind == "input_audio":
        sound = part.get("input_audio")
        media.setdefault("audio", []).append(_audio(sound if isinstance(sound, dict) else {}))
        return {"type": "audio"}
    if kind == "audio_url":
        data = _of_url(part, kind)
        media.setdefault("audio", []).append(_sound(data, kind))
        return {"type": "audio"}
    if kind == "video_url":
        data = _of_url(part, kind)
        with _within(kind, "video"):
            video, sound = read_video(data, kind)
        media.setdefault("video", []).append(video)
        if sound is not None:
            media.setdefault("audio", []).append(sound)
        return {"type": "video"}
    kinds = ", ".join(["text", *PARTS])
    raise bad("messages", f"a content part is one of {kinds}, not {str(part)[:80]!r}")


def _of_url(part: Mapping[str, Any], kind: str) -> bytes:
    """The file in a part's ``data:`` URL."""
    url = part.get(kind)
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str) or url[:5].lower() != "data:":
        raise bad("messages", f"{kind} must be a data: URL; nothing is fetched from a network")
    header, _, data = url.partition(",")
    if not header.lower().endswith(";base64"):
        raise bad("messages", f"{kind} must be base64")
    return _decoded(data)


@contextmanager
def _within(part: str, what: str) -> Iterator[None]:
    """What is wrong with the file of a part, as an error of the messages."""
    try:
        yield
    except InputTooLarge as exc:
        raise bad("messages", exc.message) from exc
    except InvalidRequest as exc:
        if exc.fields[0]["field"] != part:
            raise
        fault = exc.fields[0]["message"]
        raise bad("messages", f"{part} holds no {what} that can be read: {fault}") from exc


def _image(part: Mapping[str, Any]) -> Image.Image:
    data = _of_url(part, "image_url")
    with _within("image_url", "image"):
        return read_file(data, "image_url", get_settings().max_image_pixels, _as_vllm, FORMATS)


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
    form, data = sound.get("format"), sound.get("data")
    if form not in SOUNDS or not isinstance(data, str):
        raise bad(
            "messages",
            f"input_audio needs format {' or '.join(map(repr, SOUNDS))}, and base64 data",
        )
    return _sound(_decoded(data), "input_audio")


def _sound(data: bytes, part: str) -> tuple[np.ndarray, float]:
    """Samples and their rate; 16-bit WAV files need no PyAV."""
    if data[:4] != b"RIFF" or find_spec("av") is not None:
        with _within(part, "sound"):
            samples, rate = sound_of(data, part)
        return samples, float(rate)
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError, ValueError) as exc:
        raise bad("messages", f"{part} holds no WAV that can be read: {exc}") from exc
    if width != 2:
        raise bad("messages", f"{part} must have 16 bits a sample, has {8 * width}")
    with _within(part, "sound"):
        check_sound(channels, rate, part)
    samples = np.frombuffer(frames, np.int16, len(frames) // (2 * channels) * channels)
    if not samples.size:
        raise bad("messages", f"{part} holds no sound that can be read: the sound holds no samples")
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

"""Conversations with media, as the thinker's forward pass takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from omniq.engines.base import StageInput
from omniq.engines.inputs import text_input
from omniq.engines.omni.videos import PARAMETER, VideoReader
from omniq.engines.text import PROMPTS, PromptEncoder, check_messages
from omniq.engines.vllm import media
from omniq.errors import InputTooLarge, InvalidRequest

#: The stage's input with videos.
VIDEO = "video"
#: The model's argument that says whether sounds belong to videos.
SOUND_IN_VIDEO = "use_audio_in_video"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and the media in them, read."""

    field: str
    """The input they come from."""
    messages: list[dict[str, Any]]
    """For the chat template; media are parts of their ``type`` only."""
    media: media.Media
    fps: float
    """Of all its videos."""
    with_sound: bool
    """The sounds of its videos stand among its sounds, each where its video is."""


def has_media(inputs: Mapping[str, StageInput]) -> bool:
    """Whether a request has more than text."""
    messages: Any = inputs["messages"].value if "messages" in inputs else ()
    return any(name in inputs for name in media.INPUTS) or (
        isinstance(messages, Sequence)
        and any(isinstance(m, Mapping) and isinstance(m.get("content"), list) for m in messages)
    )


def conversation(inputs: Mapping[str, StageInput], videos: VideoReader) -> Conversation | None:
    """What a request says, its media decoded; None: text or token ids alone.

    Needs no tokenizer, and may be called on any thread.

    Raises:
        InvalidRequest: naming the input that is missing or wrong.
    """
    given = [name for name in PROMPTS if name in inputs]
    files = _files(inputs)
    found = media.of_inputs({n: v for n, v in inputs.items() if n != VIDEO or not files})
    if len(given) != 1 or given == ["token_ids"] or (given == ["prompt"] and not (found or files)):
        if found or files:
            raise media.bad("prompt", "media need a prompt or messages to belong to")
        return None
    messages: Any = inputs["messages"].value if "messages" in inputs else None
    if messages is None:
        messages = [{"role": "user", "content": text_input(inputs, "prompt")}]
    check_messages(messages, given[0])
    plain, inside = media.of_messages(messages[:-1], videos)
    fps = _rate_of(found.get("video", []), videos)
    sounds = []
    for data in files:
        video, sound = _video_of(data, videos)
        found.setdefault("video", []).append(video)
        sounds += [] if sound is None else [sound]
    (last,), more = media.of_messages(messages[-1:], videos)
    if found:  # what stages before made, or the request has beside it, belongs to the last turn
        last = {**last, "content": media.with_parts(last.get("content"), found)}
    if sounds:  # these have no parts of their own; the videos' parts come behind those of sounds
        found["audio"] = [*found.get("audio", []), *sounds]
    for items in (found, more):
        for kind, listed in items.items():
            inside.setdefault(kind, []).extend(listed)
    if fps != videos.fps and len(inside["video"]) > len(found["video"]):
        raise media.bad("messages", f"its videos must have {fps:g} frames a second, as the others")
    return Conversation(given[0], [*plain, last], inside, fps, videos.with_sound)


async def read_conversation(
    inputs: Mapping[str, StageInput], videos: VideoReader
) -> Conversation | None:
    """:func:`conversation` on a thread of its own; if it is cancelled, the videos are given up, and
    it waits until the thread has stopped.
    """
    reading = asyncio.ensure_future(asyncio.to_thread(conversation, inputs, videos))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        videos.stop()
        await asyncio.gather(reading, return_exceptions=True)
        raise


def _files(inputs: Mapping[str, StageInput]) -> list[bytes]:
    """Videos that are files still: uint8 [bytes] each."""
    tensors = inputs[VIDEO].tensors if VIDEO in inputs else {}
    if any(t.ndim != 1 or t.dtype is not torch.uint8 for t in tensors.values()):
        return []
    return [t.cpu().numpy().tobytes() for t in tensors.values()]


def _rate_of(frames: list[Any], videos: VideoReader) -> float:
    """Frames a second of videos that come as frames already; without any, of those to be read."""
    if frames:
        videos.check(f"input.{VIDEO}")
    if frames and videos.with_sound:
        raise media.bad(VIDEO, "use_audio_in_video needs video files; these are frames alone")
    rates = {about["fps"] for _, about in frames} or {videos.fps}
    if len(rates) > 1:
        raise media.bad(VIDEO, "all videos of a request must have the same frames a second")
    return float(rates.pop())


def _video_of(data: bytes, videos: VideoReader) -> tuple[Any, media.Sound | None]:
    try:
        return videos(data, f"input.{VIDEO}")
    except InputTooLarge as exc:
        raise media.bad(VIDEO, exc.message) from exc


class MediaPrompts:
    """Reads prompts that may hold pictures, sound and videos.

    Args:
        folder: of the model, with its preprocessors' configuration.
        encoder: reads text.
        processor: the model's processor class in transformers, ``module:Class``.
    """

    def __init__(self, folder: Path, encoder: PromptEncoder, processor: str) -> None:
        self._encoder = encoder
        self._processor, self._videos = _load(folder, encoder.tokenizer, processor)

    def videos(self, params: Mapping[str, Any]) -> VideoReader:
        """What reads the videos of a request with such parameters."""
        return VideoReader(self._videos, params)

    def read(
        self, inputs: Mapping[str, StageInput], params: Mapping[str, Any], context: int
    ) -> tuple[list[int], dict[str, Any]]:
        """Token ids, media expanded; and what the model takes beside them.

        Raises:
            InvalidRequest: naming the input that is missing or wrong.
        """
        said = conversation(inputs, self.videos(params))
        return self.encoded(said, inputs, params, context)

    def encoded(
        self,
        said: Conversation | None,
        inputs: Mapping[str, StageInput],
        params: Mapping[str, Any],
        context: int,
    ) -> tuple[list[int], dict[str, Any]]:
        """:meth:`read` of a request whose media are decoded already: :func:`conversation`."""
        if said is None:
            return self._encoder.read(inputs, params, context), {}
        options = params.get("chat_template_kwargs")
        text = self._encoder.render_chat(
            said.messages, tools=params.get("tools"), options=options, field=said.field
        )
        made = self._processed(text, said, context)
        ids = self._encoder.checked(made.pop("input_ids")[0].tolist(), context, said.field)
        made.pop("attention_mask", None)
        return ids, made

    def _processed(self, text: str, said: Conversation, context: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if pictures := said.media.get("image"):
            arguments["images"] = pictures
        if sounds := said.media.get("audio"):
            arguments["audio"] = heard(self._processor, sounds, said.field)
        try:
            if videos := [frames for frames, _ in said.media.get("video", ())]:
                check_room(self._processor, videos, said.field, context)
                arguments["videos"] = videos
                arguments["videos_kwargs"] = {
                    "fps": said.fps,
                    "do_sample_frames": False,
                    "input_data_format": "channels_last",
                    "use_audio_in_video": said.with_sound,
                }
            made = dict(self._processor(text=text, return_tensors="pt", **arguments))
        except (ValueError, StopIteration, IndexError) as exc:
            raise media.bad(said.field, f"the model's processor refuses the media: {exc}") from exc
        return {**made, SOUND_IN_VIDEO: True} if videos and said.with_sound else made


def check_room(processor: Any, videos: list[np.ndarray], field: str, context: int) -> None:
    """Before frames become floats of the size that the model sees, which small ones exceed.

    Args:
        processor: the model's.
        videos: uint8 [frames, H, W, 3] each.
        field: the input they come from.
        context: tokens that the model takes.

    Raises:
        InvalidRequest: they alone are as many tokens or more.
    """
    reader = processor.video_processor
    # What the processor hands to its video part, whatever that is configured to.
    defaults = processor.valid_processor_kwargs._defaults["videos_kwargs"]
    sizes = defaults.get("size") or reader.size
    tokens = 0
    for frames in videos:
        count, height, width = frames.shape[:3]
        patches = reader.get_num_of_video_patches(count, height, width, {"size": sizes})
        tokens += int(patches) // reader.merge_size**2
    if tokens >= context:
        raise media.bad(
            field,
            f"its videos alone are {tokens} tokens, and the model takes {context} in all; take "
            f"fewer frames of them (parameter {PARAMETER}: fps, max_frames)",
        )


def heard(processor: Any, sounds: Sequence[media.Sound], field: str) -> list[np.ndarray]:
    """Sounds as the model's ears have them: float32 [samples] each, at their rate.

    Args:
        processor: the model's.
        sounds: of any rate.
        field: the input they come from.

    Raises:
        InvalidRequest: one is shorter than a window of the spectrogram, of which some models make
            nothing and others fail; or as :func:`resampled`.
    """
    ears = processor.feature_extractor
    rate, least = int(ears.sampling_rate), int(ears.n_fft)
    made = [resampled(samples, given, rate) for samples, given in sounds]
    if any(len(samples) < least for samples in made):
        raise media.bad(field, f"a sound must last at least {1000 * least / rate:g} ms")
    return made


def resampled(samples: np.ndarray, rate: float, wanted: int) -> np.ndarray:
    """float32 [samples] at ``wanted`` hertz.

    Raises:
        InvalidRequest: the rates differ, and PyAV is not installed.
    """
    if int(rate) == wanted:
        return samples
    try:
        import av  # noqa: PLC0415 - an extra
    except ImportError:
        raise InvalidRequest(
            f"input_audio must have {wanted} samples a second, has {rate:g}: PyAV, which would "
            "resample it, is not installed"
        ) from None
    frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
    frame.sample_rate = int(rate)
    resampler = av.AudioResampler(format="flt", layout="mono", rate=wanted)
    frames = [*resampler.resample(frame), *resampler.resample(None)]
    none = np.zeros(0, np.float32)  # of too few samples the resampler makes no frame
    return np.concatenate([none, *(f.to_ndarray()[0] for f in frames)]).astype(np.float32)


def _load(folder: Path, tokenizer: Any, target: str) -> tuple[Any, Any]:
    """The model's processor, and its part for videos; None: torchvision is missing."""
    from transformers.utils import is_torchvision_available  # noqa: PLC0415 - slow import

    cls = resolve_name(target)
    if is_torchvision_available():
        processor = cls.from_pretrained(folder)
        return processor, processor.video_processor
    from transformers import (  # noqa: PLC0415
        Qwen2VLImageProcessorPil,
        WhisperFeatureExtractor,
    )

    # ProcessorMixin wants all of its parts, and the one for video needs torchvision.
    processor = cls.__new__(cls)
    pictures = Qwen2VLImageProcessorPil.from_pretrained(folder)
    processor.image_processor = pictures
    processor.video_processor = SimpleNamespace(merge_size=pictures.merge_size)
    processor.feature_extractor = WhisperFeatureExtractor.from_pretrained(folder)
    processor.tokenizer = tokenizer
    processor.chat_template = tokenizer.chat_template
    for part in ("image", "audio", "video", "vision_bos", "vision_eos", "audio_bos", "audio_eos"):
        setattr(processor, f"{part}_token", getattr(tokenizer, f"{part}_token"))
    return processor, None

"""Conversations with media, as the thinker's forward pass takes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import numpy as np

from omniq.engines.base import StageInput
from omniq.engines.inputs import text_input
from omniq.engines.text import PROMPTS, PromptEncoder, check_messages
from omniq.engines.vllm import media
from omniq.errors import InvalidRequest

#: vLLM's name of a kind of media, and the argument of the processor.
ARGUMENTS = {"image": "images", "audio": "audio", "video": "videos"}


class MediaPrompts:
    """Reads prompts that may hold pictures and sound.

    Args:
        folder: of the model, with its preprocessors' configuration.
        encoder: reads text.
        processor: the model's processor class in transformers, ``module:Class``.
    """

    def __init__(self, folder: Path, encoder: PromptEncoder, processor: str) -> None:
        self._encoder = encoder
        self._processor = _load(folder, encoder.tokenizer, processor)
        self._rate = int(self._processor.feature_extractor.sampling_rate)

    def read(
        self, inputs: Mapping[str, StageInput], params: Mapping[str, Any], context: int
    ) -> tuple[list[int], dict[str, Any]]:
        """Token ids, media expanded; and what the model takes beside them.

        Raises:
            InvalidRequest: naming the input that is missing or wrong.
        """
        given = [name for name in PROMPTS if name in inputs]
        found = media.of_inputs(inputs)
        if len(given) != 1 or given == ["token_ids"] or (given == ["prompt"] and not found):
            if found:
                raise media.bad("prompt", "media need a prompt or messages to belong to")
            return self._encoder.read(inputs, params, context), {}
        messages: Any = inputs["messages"].value if "messages" in inputs else None
        if messages is None:
            messages = [{"role": "user", "content": text_input(inputs, "prompt")}]
        check_messages(messages, given[0])
        plain, inside = media.of_messages(messages)
        if found:  # what stages before made belongs to the last turn
            plain[-1] = {**plain[-1], "content": media.with_parts(plain[-1].get("content"), found)}
        for kind, items in found.items():
            inside.setdefault(kind, []).extend(items)
        options = params.get("chat_template_kwargs")
        text = self._encoder.render_chat(
            plain, tools=params.get("tools"), options=options, field=given[0]
        )
        made = self._processed(text, inside, given[0])
        ids = self._encoder.checked(made.pop("input_ids")[0].tolist(), context, given[0])
        made.pop("attention_mask", None)
        return ids, made

    def _processed(self, text: str, items: media.Media, field: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for kind, found in items.items():
            if kind == "audio":
                heard = [resampled(samples, rate, self._rate) for samples, rate in found]
                arguments[ARGUMENTS[kind]] = heard
            else:
                arguments[ARGUMENTS[kind]] = found
        try:
            return dict(self._processor(text=text, return_tensors="pt", **arguments))
        except (ValueError, StopIteration, IndexError) as exc:
            raise media.bad(field, f"the model's processor refuses the media: {exc}") from exc


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
    return np.concatenate([f.to_ndarray()[0] for f in frames]).astype(np.float32)


def _load(folder: Path, tokenizer: Any, target: str) -> Any:
    """The model's processor; without torchvision one that takes no video."""
    from transformers.utils import is_torchvision_available  # noqa: PLC0415 - slow import

    cls = resolve_name(target)
    if is_torchvision_available():
        return cls.from_pretrained(folder)
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
    return processor

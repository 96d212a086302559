"""Chats with a served omni model by the real OpenAI client: text and speech, as a stream or not."""

from __future__ import annotations

import base64
import io
import wave
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openai

RATE = 24_000
#: int16 [samples]
Samples = np.ndarray[Any, np.dtype[np.int16]]


def samples_of(wav: str) -> Samples:
    """Of a WAV file in base64: mono, 16 bits, at the models' rate."""
    with wave.open(io.BytesIO(base64.b64decode(wav))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def most_apart(samples: Samples, waveform: Any) -> float:
    """Between 16-bit samples and a tensor float [samples] in -1..1, in steps of 16 bits."""
    assert samples.shape == tuple(waveform.shape)
    return float(np.abs(samples - waveform.numpy() * 32_767).max())


@dataclass
class Streamed:
    """All chunks of a stream."""

    job: str = ""
    #: ``text`` or ``audio``, in the order in which they came.
    kinds: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    usage: Any = None
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def pcm(self) -> bytes:
        """Of all pieces; the last has the transcript instead."""
        return b"".join(base64.b64decode(audio.data) for audio in self.audios[:-1])

    @property
    def samples(self) -> Samples:
        return np.frombuffer(self.pcm, "<i2")


def streamed(client: openai.OpenAI, voice: str, **asked: Any) -> Streamed:
    """Text and speech of one chat."""
    found = Streamed()
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(
        modalities=["text", "audio"],
        audio={"voice": voice, "format": "pcm16"},
        stream=True,
        stream_options=options,
        **asked,
    ):
        found.job, found.usage = chunk.id, chunk.usage or found.usage
        for choice in chunk.choices:
            delta: Any = choice.delta
            found.finish_reason = choice.finish_reason or found.finish_reason
            if delta.content:
                found.kinds.append("text")
                found.texts.append(delta.content)
            if getattr(delta, "audio", None):
                found.kinds.append("audio")
                found.audios.append(delta.audio)
    return found

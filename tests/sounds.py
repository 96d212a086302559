"""Waveforms of tests, and what sound files hold."""

from __future__ import annotations

import io
from typing import Any

import numpy as np


def tone(rate: int, seconds: float = 0.5, hertz: float = 440.0, loud: float = 0.5) -> Any:
    """A sine, float32 [samples]."""
    time = np.arange(int(rate * seconds)) / rate
    return (loud * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


def av_samples(data: bytes) -> tuple[Any, int]:
    """What FFmpeg reads of a sound file: samples [channels, samples] in the file's own type, or
    [samples] of one channel; and their rate.
    """
    import av

    with av.open(io.BytesIO(data)) as container:
        (stream,) = container.streams.audio
        channels = stream.channels
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
        planar, rate = stream.format.is_planar, stream.rate
    if planar:
        samples = np.concatenate(frames, axis=1)
    else:
        samples = np.concatenate([f.reshape(-1) for f in frames]).reshape(-1, channels).T
    return (samples[0] if channels == 1 else samples), rate


def tags_of(data: bytes) -> dict[str, str]:
    """Tags of the file and of its stream, by lower-case names."""
    import av

    with av.open(io.BytesIO(data)) as container:
        tags = {**container.streams.audio[0].metadata, **container.metadata}
    return {name.lower(): text for name, text in tags.items()}

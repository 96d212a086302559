"""Samples as 16-bit PCM: the one way from floats to integers, and the header of a WAV file."""

from __future__ import annotations

import base64
import struct
from typing import Any

import numpy as np

#: Bytes of a 16-bit sample.
WIDTH = 2
#: What full scale is, as libsndfile (soundfile) writes float samples to 16-bit files.
FULL_SCALE = 32_767
#: The size that a WAV header gives when nobody knows it yet; players read on to the end.
UNKNOWN = 0xFFFF_FFFF
_PCM = 1

Samples = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int16]]


def to_int16(samples: Samples) -> Integers:
    """float32 samples, any shape, as int16 of the same shape: rounded, clipped to -1..1.

    Each sample is converted by itself: chunks of a waveform make the bytes that the whole makes.

    Raises:
        ValueError: NaN or infinity among them.
    """
    if not np.isfinite(samples).all():
        raise ValueError("has samples that are NaN or infinite")
    return np.rint(np.clip(samples, -1.0, 1.0) * np.float32(FULL_SCALE)).astype(np.int16)


def pcm16(samples: Samples) -> bytes:
    """[samples] or [channels, samples] as little-endian 16-bit PCM, channels interleaved.

    Raises:
        ValueError: as :func:`to_int16`.
    """
    return interleaved(to_int16(samples))


def interleaved(samples: Integers) -> bytes:
    """int16 [samples] or [channels, samples] as little-endian bytes, channels interleaved."""
    return samples.T.astype("<i2").tobytes()


def pcm16_message(samples: Samples, sample_rate: int) -> dict[str, Any]:
    """A chunk of a waveform as small JSON: ``audio`` is base64 of :func:`pcm16`.

    Raises:
        ValueError: as :func:`to_int16`.
    """
    return {
        "audio": base64.b64encode(pcm16(samples)).decode(),
        "format": "pcm16",
        "sample_rate": sample_rate,
        "channels": channels_of(samples),
        "samples": int(samples.shape[-1]),
    }


def channels_of(samples: Samples) -> int:
    """Of [samples] one, of [channels, samples] the first axis."""
    return 1 if samples.ndim == 1 else int(samples.shape[0])


def wav_header(
    sample_rate: int, channels: int, nbytes: int | None = None, behind: int = 0
) -> bytes:
    """The 44 bytes in front of the 16-bit samples of a WAV file.

    Args:
        sample_rate: hertz.
        channels: interleaved.
        nbytes: of the samples; None: not known yet (a stream).
        behind: bytes of chunks behind the samples.
    """
    frame = channels * WIDTH
    size = UNKNOWN if nbytes is None else nbytes
    riff = UNKNOWN if nbytes is None else 36 + nbytes + nbytes % 2 + behind
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", riff, b"WAVE", b"fmt ", 16, _PCM, channels, sample_rate, sample_rate * frame),
        *(frame, 8 * WIDTH, b"data", size),
    )


def wav_file(samples: Integers, sample_rate: int, info: dict[str, str]) -> bytes:
    """A WAV file of int16 [samples] or [channels, samples].

    Args:
        info: texts of a ``LIST INFO`` chunk by RIFF name (``ICMT``, ``ISFT``), UTF-8.
    """
    channels = 1 if samples.ndim == 1 else samples.shape[0]
    data = interleaved(samples)
    behind = _info_chunk(info)
    return wav_header(sample_rate, channels, len(data), len(behind)) + data + behind


def _info_chunk(info: dict[str, str]) -> bytes:
    if not info:
        return b""
    body = b"INFO"
    for name, text in info.items():
        body += _chunk(name.encode("ascii"), text.encode() + b"\0")
    return _chunk(b"LIST", body)


def _chunk(name: bytes, body: bytes) -> bytes:
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)

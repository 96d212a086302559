"""Waveforms as sound files."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from omniq.config import OutputConfig
from omniq.outputs.base import (
    EncodedArtifact,
    OutputContext,
    OutputError,
    OutputHandler,
    ProcessedOutput,
    check_pyav,
    only_tensor,
    several,
)
from omniq.outputs.sound import Integers, Samples, channels_of, pcm16_message, to_int16
from omniq.outputs.sound_files import encoded

Form = Literal["wav", "flac", "mp3", "opus", "aac"]
CONTENT_TYPES = {
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
MOST_CHANNELS = 2
#: Of one chunk, which is one event: 87 s at 48 kHz.
MOST_CHUNK_SAMPLES = 1 << 22


class AudioHandler(OutputHandler):
    """A waveform, float32 [samples] or [channels, samples] in -1..1, becomes a sound file;
    [n, channels, samples] become n of them.

    ``wav`` is 16-bit PCM and needs nothing; ``flac`` (16 bits), ``mp3``, ``opus`` (in Ogg) and
    ``aac`` (ADTS) need PyAV (``omniq[media]``). What is beyond -1..1 is clipped and counted in
    ``meta``; NaN is an error. Samples a second are the output's ``sample_rate``; an encoder that
    lacks it gets the next higher rate it has. Files carry how they were made as JSON in their
    comment, ADTS excepted.

    A chunk (:meth:`piece`) is 16-bit PCM in an inline value, whatever the format: see
    :func:`omniq.outputs.sound.pcm16_message`.
    """

    formats = get_args(Form)

    def encode(self, name: str, form: str, data: Any, context: OutputContext) -> ProcessedOutput:
        """Encode the waveforms; ``meta`` has format, sample_rate, channels, samples, seconds."""
        waves = _waves(name, data)
        rate = _rate(name, context)

        def encode(name: str, context: OutputContext, samples: Samples) -> EncodedArtifact:
            integers = _integers(name, samples)
            count = samples.shape[-1]
            meta: dict[str, Any] = {
                "format": form,
                "sample_rate": rate,
                "channels": channels_of(samples),
                "samples": count,
                "seconds": round(count / rate, 6),
            }
            if clipped := int((np.abs(samples) > 1.0).sum()):
                meta["clipped"] = clipped
            file = encoded(integers, rate, form, context)
            return EncodedArtifact(name, CONTENT_TYPES[form], file, meta)

        return several(encode, name, waves, context)

    def piece(self, name: str, form: str, data: Any, context: OutputContext) -> ProcessedOutput:
        """A chunk as an inline value that any client can append to the ones before."""
        (samples, *more) = _waves(name, data)
        if more:
            raise OutputError(f"output {name!r}: a chunk is one waveform, not {1 + len(more)}")
        if samples.size > MOST_CHUNK_SAMPLES:
            raise OutputError(
                f"output {name!r}: a chunk has at most {MOST_CHUNK_SAMPLES} samples, "
                f"not {samples.size}"
            )
        try:
            return ProcessedOutput(value=pcm16_message(samples, _rate(name, context)))
        except ValueError as exc:
            raise OutputError(f"output {name!r}: a waveform {exc}") from exc

    def format_of(self, name: str, config: OutputConfig) -> str:
        """As of any handler; and whether the format can be written here.

        Raises:
            ConfigError: it cannot, or there is no such format.
        """
        form = super().format_of(name, config)
        if form != "wav":
            check_pyav(name, form, plain="wav")
        return form


def _waves(name: str, data: Any) -> list[Samples]:
    tensor = only_tensor(name, data).detach().cpu()
    dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    channels = shape[-2] if len(shape) > 1 else 1
    if dtype != "float32" or not 1 <= len(shape) <= 3 or 0 in shape or channels > MOST_CHANNELS:
        raise OutputError(
            f"output {name!r}: a waveform is float32 [samples] or [channels, samples] with at most "
            f"{MOST_CHANNELS} channels, not {dtype} {shape}"
        )
    array = tensor.numpy()
    return list(array) if array.ndim == 3 else [array]


def _integers(name: str, samples: Samples) -> Integers:
    try:
        return to_int16(samples)
    except ValueError as exc:
        raise OutputError(f"output {name!r}: a waveform {exc}") from exc


def _rate(name: str, context: OutputContext) -> int:
    if context.sample_rate is None:
        raise OutputError(f"output {name!r}: its sample_rate is not known")
    return context.sample_rate

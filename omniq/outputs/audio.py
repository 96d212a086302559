"""Waveforms as sound files."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import Any, Literal, get_args

import numpy as np

from omniq.config import OutputConfig
from omniq.errors import ConfigError
from omniq.outputs.base import (
    EncodedArtifact,
    OutputContext,
    OutputError,
    OutputHandler,
    ProcessedOutput,
    only_tensor,
    several,
)
from omniq.outputs.image import SOFTWARE, comment_of
from omniq.outputs.sound import Integers, Samples, channels_of, pcm16_message, to_int16, wav_file

Form = Literal["wav", "flac", "mp3", "opus", "aac"]
CONTENT_TYPES = {
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}
#: Container and encoder of FFmpeg, and bits a second of a channel where the format loses any.
ENCODERS: dict[str, tuple[str, str, int | None]] = {
    "flac": ("flac", "flac", None),
    "mp3": ("mp3", "libmp3lame", 96_000),
    "opus": ("ogg", "libopus", 64_000),
    "aac": ("adts", "aac", 96_000),
}
MOST_CHANNELS = 2
#: Of one chunk, which is one event: 87 s at 48 kHz.
MOST_CHUNK_SAMPLES = 1 << 22
#: Samples handed to an encoder at once.
BLOCK = 1 << 16


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
        if form != "wav" and find_spec("av") is None:
            raise ConfigError(
                f"output {name!r}: format {form!r} needs PyAV, which is not installed",
                hint="pip install 'omniq[media]', or set format: wav",
            )
        return form


def encoded(samples: Integers, sample_rate: int, form: str, context: OutputContext) -> bytes:
    """int16 [samples] or [channels, samples] as a file of a format of :class:`AudioHandler`."""
    comment = comment_of(context)
    if form == "wav":
        return wav_file(samples, sample_rate, {"ISFT": SOFTWARE, "ICMT": comment})
    return _by_av(np.atleast_2d(samples), sample_rate, form, comment)


def _by_av(samples: Integers, sample_rate: int, form: str, comment: str) -> bytes:
    import av  # noqa: PLC0415 - an extra

    container_format, encoder, bits = ENCODERS[form]
    layout = "mono" if len(samples) == 1 else "stereo"
    file = io.BytesIO()
    with av.open(file, "w", format=container_format) as container:
        rates = av.codec.Codec(encoder, "w").audio_rates
        stream = container.add_stream(encoder, rate=_rate_for(sample_rate, rates), layout=layout)
        if bits is not None:
            stream.bit_rate = bits * len(samples)
        # Ogg keeps its tags with the stream, the others with the file.
        (stream if form == "opus" else container).metadata["comment"] = comment
        resampler = av.AudioResampler(
            format=stream.format, layout=layout, rate=stream.rate, frame_size=stream.frame_size
        )
        for begin in range(0, samples.shape[1], BLOCK):
            block = np.ascontiguousarray(samples[:, begin : begin + BLOCK].T).reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(block, format="s16", layout=layout)
            frame.sample_rate, frame.pts = sample_rate, begin
            for ready in resampler.resample(frame):
                container.mux(stream.encode(ready))
        for ready in resampler.resample(None):
            container.mux(stream.encode(ready))
        container.mux(stream.encode())
    return file.getvalue()


def _rate_for(wanted: int, rates: list[int] | None) -> int:
    """The rate itself if the encoder has it, else the next higher one, else its highest."""
    if not rates or wanted in rates:
        return wanted
    return min((r for r in rates if r > wanted), default=max(rates))


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

"""Sound files written and read: whole, or while their samples come."""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np

from omniq.outputs.base import OutputContext
from omniq.outputs.image import SOFTWARE, comment_of
from omniq.outputs.sound import Integers, interleaved, wav_file, wav_header

#: Container and encoder of FFmpeg, and bits a second of a channel where the format loses any.
ENCODERS: dict[str, tuple[str, str, int | None]] = {
    "flac": ("flac", "flac", None),
    "mp3": ("mp3", "libmp3lame", 96_000),
    "opus": ("ogg", "libopus", 64_000),
    "aac": ("adts", "aac", 96_000),
}
#: FFmpeg's readers of what those muxers write.
READERS = {"flac": "flac", "mp3": "mp3", "opus": "ogg", "aac": "aac"}
#: Options of muxers for streams: what is ready goes out at once; pages of Ogg are short; and an MP3
#: has no frame in front that tells its length.
STREAMED = {
    "flac": {"flush_packets": "1"},
    "mp3": {"flush_packets": "1", "write_xing": "0"},
    "opus": {"flush_packets": "1", "page_duration": "100000"},
    "aac": {"flush_packets": "1"},
}
#: Of a second: what is shorter is filled up to that, if it would become nothing.
PADDED_BELOW = 100
#: Samples handed to an encoder at once.
BLOCK = 1 << 16


def encoded(samples: Integers, sample_rate: int, form: str, context: OutputContext) -> bytes:
    """int16 [samples] or [channels, samples] as a file of a format of :class:`AudioHandler`."""
    comment = comment_of(context)
    if form == "wav":
        return wav_file(samples, sample_rate, {"ISFT": SOFTWARE, "ICMT": comment})
    planes = np.atleast_2d(samples)
    file = io.BytesIO()
    encoder = _Encoder(file, form, sample_rate, len(planes), comment=comment)
    for begin in range(0, planes.shape[1], BLOCK):
        encoder.feed(planes[:, begin : begin + BLOCK])
    encoder.finish()
    return file.getvalue()


class SoundStream:
    """A sound file that is made while its samples come, front to back.

    Args:
        form: a format of :class:`AudioHandler`, or ``pcm``: the bare samples.
        sample_rate: hertz.
        channels: 1 or 2.
        comment: as in whole files; WAV has none here.
    """

    def __init__(self, form: str, sample_rate: int, channels: int, comment: str = "") -> None:
        self._sink = _Sink()
        self._encoder: _Encoder | None = None
        if form == "wav":
            self._sink.write(wav_header(sample_rate, channels))
        elif form != "pcm":
            options = STREAMED.get(form, {})
            self._encoder = _Encoder(
                self._sink, form, sample_rate, channels, comment=comment, options=options
            )

    def feed(self, samples: Integers) -> bytes:
        """What is ready of the file after these int16 [channels, samples]; may be nothing."""
        if self._encoder is None:
            self._sink.write(interleaved(samples))
        else:
            self._encoder.feed(np.atleast_2d(samples))
        return self._sink.take()

    def finish(self) -> bytes:
        """The rest of the file."""
        if self._encoder is not None:
            self._encoder.finish()
        return self._sink.take()


class _Sink:
    """A file that can only be written on; FFmpeg then leaves out what it would come back for."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


class _Encoder:
    """FFmpeg's encoder and muxer of one format."""

    def __init__(
        self,
        file: Any,
        form: str,
        sample_rate: int,
        channels: int,
        *,
        comment: str,
        options: dict[str, str] | None = None,
    ) -> None:
        import av  # noqa: PLC0415 - an extra

        self._av, self._sample_rate, self._at = av, sample_rate, 0
        self._begun = False
        container_format, encoder, bits = ENCODERS[form]
        self._layout = "mono" if channels == 1 else "stereo"
        self._container = av.open(file, "w", format=container_format, options=options or {})
        rate = _rate_for(sample_rate, av.codec.Codec(encoder, "w").audio_rates)
        self._stream = self._container.add_stream(encoder, rate=rate, layout=self._layout)
        if bits is not None:
            self._stream.bit_rate = bits * channels
        # Ogg keeps its tags with the stream, the others with the file.
        (self._stream if form == "opus" else self._container).metadata["comment"] = comment
        self._resampler = av.AudioResampler(
            format=self._stream.format,
            layout=self._layout,
            rate=rate,
            frame_size=self._stream.frame_size,
        )

    def feed(self, samples: Integers) -> None:
        """int16 [channels, samples]."""
        if not samples.size:  # FFmpeg makes no frame of none
            return
        block = np.ascontiguousarray(samples.T).reshape(1, -1)
        frame = self._av.AudioFrame.from_ndarray(block, format="s16", layout=self._layout)
        frame.sample_rate, frame.pts = self._sample_rate, self._at
        self._at += samples.shape[1]
        self._mux(frame)

    def finish(self) -> None:
        """Write what is left, and the file's end.

        What is too short for the resampler to give anything, nothing included, becomes a moment of
        silence: no encoder but FLAC's makes a file of nothing that can be read.
        """
        if not self._begun and self._at < self._sample_rate // PADDED_BELOW:
            missing = self._sample_rate // PADDED_BELOW - self._at
            self.feed(np.zeros((1 if self._layout == "mono" else 2, missing), np.int16))
        self._mux(None)
        self._container.mux(self._stream.encode())
        self._container.close()

    def _mux(self, frame: Any) -> None:
        for ready in self._resampler.resample(frame):
            self._begun = True
            self._container.mux(self._stream.encode(ready))


def _rate_for(wanted: int, rates: list[int] | None) -> int:
    """The rate itself if the encoder has it, else the next higher one, else its highest."""
    if not rates or wanted in rates:
        return wanted
    return min((r for r in rates if r > wanted), default=max(rates))


def integers_of(data: bytes, form: str) -> tuple[Integers, int]:
    """A file that :func:`encoded` has made as int16 [channels, samples], and its rate in hertz.

    Raises:
        ValueError: it is no such file.
    """
    if form == "wav":
        try:
            with wave.open(io.BytesIO(data)) as file:
                channels, rate = file.getnchannels(), file.getframerate()
                frames = file.readframes(file.getnframes())
        except (wave.Error, EOFError) as exc:
            raise ValueError(f"no WAV file: {exc}") from exc
        return np.frombuffer(frames, "<i2").reshape(-1, channels).T, rate
    import av  # noqa: PLC0415 - an extra

    # By name: of a short file FFmpeg cannot tell what it is.
    try:
        with av.open(io.BytesIO(data), format=READERS[form]) as container:
            stream = container.streams.audio[0]
            if not stream.channels:
                raise ValueError(f"no {form} file that can be read: it has no channels")
            resampler = av.AudioResampler(format="s16", layout=stream.layout)
            parts = [f for frame in container.decode(stream) for f in resampler.resample(frame)]
            packed = [part.to_ndarray().reshape(-1) for part in parts]
            joined = np.concatenate(packed) if packed else np.zeros(0, np.int16)
            return joined.reshape(-1, stream.channels).T, stream.rate
    except (av.FFmpegError, IndexError) as exc:
        raise ValueError(f"no {form} file that can be read: {exc}") from exc

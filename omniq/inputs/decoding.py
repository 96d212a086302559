"""Sound and video files of strangers, opened by FFmpeg within bounds."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from omniq.errors import ConfigError, OmniqError
from omniq.inputs.faults import invalid, too_large, unsupported
from omniq.settings import get_settings

#: FFmpeg's readers that are used. Few, because each is a parser that strangers feed, and none that
#: opens other files or addresses (hls, concat, dash, image sequences).
FORMATS = {
    "sound": ("wav", "flac", "mp3", "ogg", "aac", "mov", "matroska"),
    "video": ("mov", "matroska"),
}
#: How errors call them.
NAMES = {
    "sound": "WAV, FLAC, MP3, Ogg, AAC, MP4 or WebM",
    "video": "MP4, WebM or Matroska",
}
#: FFmpeg's decoders that are used.
CODECS = {
    "sound": (
        *("pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le", "pcm_u8"),
        *("flac", "mp3", "mp3float", "opus", "libopus", "vorbis", "aac", "alac"),
        *("pcm_alaw", "pcm_mulaw"),
    ),
    "video": ("h264", "hevc", "vp8", "vp9", "libvpx", "libvpx-vp9", "av1", "libdav1d", "mpeg4"),
}
MOST_CHANNELS = 8
#: Hertz; others are no sound, but resamplers would make room for them.
RATES = range(1_000, 384_001)
#: Pixels that decoders may add around a frame of their own.
PADDING = 1 << 22


class Clock:
    """How long a file may take to decode, and how long what it holds may last."""

    def __init__(self, field: str, most_seconds: float) -> None:
        settings = get_settings()
        self._field, self._allowed = field, settings.max_decode_seconds
        self._until = time.monotonic() + self._allowed
        self.most_seconds = min(most_seconds, settings.max_media_seconds)

    def stop(self) -> None:
        """There is no time left, as nobody wants the outcome."""
        self._until = float("-inf")

    def check(self, seconds: float) -> None:
        """Called for each piece that has been decoded, which ends ``seconds`` from the start.

        Raises:
            InputTooLarge: it lasts too long, or decoding it does.
        """
        if seconds > self.most_seconds:
            raise too_large(self._field, f"must last at most {self.most_seconds:g} s")
        if time.monotonic() > self._until:
            raise too_large(self._field, f"takes longer than {self._allowed:g} s to decode")


@contextmanager
def opened(data: bytes, field: str, kind: str, most_pixels: int = 1) -> Iterator[tuple[Any, Any]]:
    """The file's container and its first stream of ``kind`` (``sound`` or ``video``).

    What goes wrong within is an error of the input.

    Args:
        most_pixels: of a frame; decoders refuse larger ones before they make room for them.

    Raises:
        ConfigError: PyAV is not installed.
        UnsupportedInput: no file of a format that is read, or a codec that is not.
        InputTooLarge: frames of too many pixels.
        InvalidRequest: no such stream, or a broken file.
    """
    try:
        import av  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise ConfigError(
            f"{field}: {kind} needs PyAV, which is not installed", hint="pip install 'omniq[media]'"
        ) from exc
    codecs = ",".join((*CODECS["sound"], *CODECS["video"]))
    options = {"codec_whitelist": codecs, "max_pixels": str(most_pixels + PADDING)}
    try:
        container = av.open(
            io.BytesIO(data),
            format=_format_of(data) if kind == "sound" else None,
            options=options,
            container_options={"format_whitelist": ",".join(FORMATS[kind])},
            io_open=_refuse_to_open,
        )
    except Exception as exc:  # a format that is not read, or a head that is broken in any way
        if _is_ours(exc):
            raise
        reason = getattr(exc, "strerror", None) or exc
        raise unsupported(field, f"must be {NAMES[kind]} that can be read: {reason}") from exc
    try:
        with container:
            yield container, _stream_of(container, field, kind, most_pixels)
    except OmniqError:
        raise
    except Exception as exc:  # broken files take FFmpeg's readers anywhere
        if _is_ours(exc):
            raise
        raise invalid(field, f"the {kind} cannot be decoded: {exc}") from exc


def _format_of(data: bytes) -> str | None:
    """FFmpeg's name of a format without a head, by its first frame: of a file of one or two frames
    FFmpeg itself cannot tell. None: it can.
    """
    if len(data) < 2 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return None
    if data[1] & 0x06 == 0x02:  # layer III
        return "mp3"
    return "aac" if data[1] & 0xF6 == 0xF0 else None


def _is_ours(exc: Exception) -> bool:
    """Whether this process lacks memory. FFmpeg says so of files, too, that claim absurd sizes."""
    return isinstance(exc, MemoryError) and not hasattr(exc, "errno")


def _stream_of(container: Any, field: str, kind: str, most_pixels: int) -> Any:
    streams = container.streams.audio if kind == "sound" else container.streams.video
    if not streams or (kind == "sound" and not streams[0].channels):
        raise invalid(field, f"the file holds no {kind}")
    stream = streams[0]
    context = stream.codec_context
    if context is None or context.name not in CODECS[kind]:
        name = "an unknown codec" if context is None else context.name
        raise unsupported(field, f"{kind} in {name} is not read")
    if kind == "sound":
        check_sound(stream.channels, stream.rate or 0, field)
    if kind == "video":
        check_frame(context.width, context.height, field, most_pixels)
        context.options = {"max_pixels": str(most_pixels + PADDING)}
    return stream


def check_sound(channels: int, rate: int, field: str) -> None:
    """Whether a sound, or a frame of one, has no more channels and no other rate than are read.

    Raises:
        InvalidRequest: it has.
    """
    if not 1 <= channels <= MOST_CHANNELS:
        raise invalid(field, f"must have 1 to {MOST_CHANNELS} channels, has {channels}")
    if rate not in RATES:
        raise invalid(field, f"must have {RATES[0]} to {RATES[-1]} samples a second, has {rate}")


def check_frame(width: int, height: int, field: str, most: int) -> None:
    """Whether a frame has no more pixels than are allowed.

    Raises:
        InputTooLarge: it has.
    """
    if width * height > most:
        raise too_large(
            field,
            f"must have at most {most} pixels a frame, has {width} x {height} = {width * height}",
        )


def _refuse_to_open(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    raise PermissionError("a file that opens others is not read")

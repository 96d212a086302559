"""Sound of a request as samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omniq.inputs.decoding import Clock, check_sound, opened
from omniq.inputs.faults import invalid

if TYPE_CHECKING:
    import numpy as np

    Samples = np.ndarray[Any, np.dtype[np.float32]]


def samples_of(value: Any, field: str, sample_rate: int, most_seconds: float) -> Samples:
    """Sound as float32 [samples] in -1..1: all channels averaged, at ``sample_rate``.

    A file whose rate that is keeps its samples, 16-bit ones as n / 32768.

    Args:
        value: a file's bytes, or an array float32 [samples] at ``sample_rate`` already.
        field: names the input in errors.
        sample_rate: hertz.
        most_seconds: of the pipeline; the setting's bound holds too.

    Raises:
        InputTooLarge: it lasts too long, or decoding it does.
        UnsupportedInput: the bytes are no sound file that is read.
        InvalidRequest: something else, a broken file, NaN or infinity.
    """
    import numpy as np  # noqa: PLC0415 - only requests with sound need it

    clock = Clock(field, most_seconds)
    if isinstance(value, bytes):
        samples, _ = _decoded(value, field, sample_rate, clock)
    elif hasattr(value, "__array__"):
        samples = np.asarray(value)
        if samples.dtype != np.float32 or samples.ndim != 1:
            form = f"{samples.dtype} {list(samples.shape)}"
            raise invalid(field, f"an array must be float32 [samples], is {form}")
        clock.check(len(samples) / sample_rate)
    else:
        raise invalid(field, f"must be sound, not {type(value).__name__}")
    _check_any(samples, field)
    if not np.isfinite(samples).all():
        raise invalid(field, "has samples that are NaN or infinite")
    return samples


def sound_of(data: bytes, field: str) -> tuple[Samples, int]:
    """A sound file as float32 [samples] at its own rate, and that rate in hertz.

    Raises:
        InputTooLarge, UnsupportedInput, InvalidRequest: as :func:`samples_of`.
    """
    samples, rate = _decoded(data, field, None, Clock(field, float("inf")))
    _check_any(samples, field)
    return samples, rate


def _check_any(samples: Samples, field: str) -> None:
    if not samples.size:
        raise invalid(field, "the sound holds no samples")


def _decoded(data: bytes, field: str, sample_rate: int | None, clock: Clock) -> tuple[Samples, int]:
    """At ``sample_rate``, or if that is None at the file's own."""
    import numpy as np  # noqa: PLC0415 - as above

    if _is_empty_wav(data):
        raise invalid(field, "the sound holds no samples")
    pieces: list[Samples] = []
    rate, count = 0, 0
    with opened(data, field, "sound") as (container, stream):
        import av  # noqa: PLC0415 - an extra

        # FFmpeg's own mixing differs between integers and floats: channels are averaged here. Not
        # as planes: PyAV reads beyond the memory of many of them.
        floats = av.AudioResampler(format="flt")
        to_rate = av.AudioResampler(format="flt", layout="mono", rate=sample_rate)

        def take(frame: Any) -> None:
            nonlocal rate, count
            if frame is not None:
                check_sound(frame.layout.nb_channels, frame.sample_rate, field)
                clock.check((count + frame.samples) / frame.sample_rate)
            for part in floats.resample(frame):
                if rate not in (0, part.sample_rate):
                    raise invalid(field, "the sound changes its sample rate")
                rate = part.sample_rate
                packed = part.to_ndarray().reshape(-1, part.layout.nb_channels)
                mixed = packed.mean(axis=1, dtype=np.float32)
                if sample_rate in (None, rate):
                    pieces.append(mixed)
                else:
                    one = av.AudioFrame.from_ndarray(mixed[None], format="flt", layout="mono")
                    one.sample_rate, one.pts = rate, count
                    pieces.extend(f.to_ndarray().reshape(-1) for f in to_rate.resample(one))
                count += len(mixed)

        for frame in container.decode(stream):
            take(frame)
        take(None)
        if count and sample_rate not in (None, rate):
            pieces.extend(f.to_ndarray().reshape(-1) for f in to_rate.resample(None))
            if not sum(len(piece) for piece in pieces):
                raise invalid(field, f"the sound is too short: {count} samples at {rate} hertz")
    samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    return samples, sample_rate or rate


def _is_empty_wav(data: bytes) -> bool:
    """Whether a WAV file's samples are none, and more chunks behind them fill it to its end.

    FFmpeg takes a length of 0 for one that nobody knew, and would make sound of those chunks.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return False
    at, empty = 12, False
    while at + 8 <= len(data):
        name, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        empty = empty or (name == b"data" and not length)
        at += 8 + length + length % 2
    return empty and at - 1 <= len(data) <= at

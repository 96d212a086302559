"""Sound of a request as samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omniq.inputs.decoding import Clock, opened
from omniq.inputs.faults import invalid

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        pieces = list(_decoded(value, field, sample_rate, clock))
        samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    elif hasattr(value, "__array__"):
        samples = np.asarray(value)
        if samples.dtype != np.float32 or samples.ndim != 1:
            form = f"{samples.dtype} {list(samples.shape)}"
            raise invalid(field, f"an array must be float32 [samples], is {form}")
        clock.check(len(samples) / sample_rate)
    else:
        raise invalid(field, f"must be sound, not {type(value).__name__}")
    if not samples.size:
        raise invalid(field, "the sound holds no samples")
    if not np.isfinite(samples).all():
        raise invalid(field, "has samples that are NaN or infinite")
    return samples


def _decoded(data: bytes, field: str, sample_rate: int, clock: Clock) -> Iterator[Samples]:
    import numpy as np  # noqa: PLC0415 - as above

    with opened(data, field, "sound") as (container, stream):
        import av  # noqa: PLC0415 - an extra

        # FFmpeg's own mixing differs between integers and floats: channels are averaged here.
        planes = av.AudioResampler(format="fltp")
        to_rate = av.AudioResampler(format="flt", layout="mono", rate=sample_rate)
        rate, seconds, at = 0, 0.0, 0

        def mono(frame: Any) -> Iterator[Samples]:
            nonlocal rate, seconds, at
            for part in planes.resample(frame):
                if rate not in (0, part.sample_rate):
                    raise invalid(field, "the sound changes its sample rate")
                rate = part.sample_rate
                seconds += part.samples / rate
                clock.check(seconds)
                mixed = part.to_ndarray().mean(axis=0, dtype=np.float32)
                if rate == sample_rate:
                    yield mixed
                    continue
                one = av.AudioFrame.from_ndarray(mixed[None], format="flt", layout="mono")
                one.sample_rate, one.pts = rate, at
                at += len(mixed)
                for ready in to_rate.resample(one):
                    yield ready.to_ndarray().reshape(-1)

        for frame in container.decode(stream):
            yield from mono(frame)
        yield from mono(None)
        if rate not in (0, sample_rate):
            for ready in to_rate.resample(None):
                yield ready.to_ndarray().reshape(-1)

"""Videos of a request as frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omniq.inputs.decoding import Clock, check_frame, opened
from omniq.inputs.faults import invalid, too_large
from omniq.settings import get_settings

if TYPE_CHECKING:
    import numpy as np

    from omniq.config.pipeline import InputConfig

    Frames = np.ndarray[Any, np.dtype[np.uint8]]


def frames_of(
    value: Any, field: str, spec: InputConfig, most_bytes: int
) -> tuple[Frames, float | None]:
    """A video as uint8 [frames, H, W, 3], turned as the file says, and frames a second.

    With ``spec.fps`` there is at most one frame for each tick of that clock, the first at or behind
    it; without, every frame of the file.

    Args:
        value: a file's bytes, or an array uint8 [frames, H, W, 3].
        field: names the input in errors.
        spec: has the bounds; those of the settings hold too.
        most_bytes: of all frames.

    Raises:
        InputTooLarge: too many frames, pixels, bytes or seconds, or it takes too long to decode.
        UnsupportedInput: the bytes are no video file that is read.
        InvalidRequest: something else, or a broken file.
    """
    import numpy as np  # noqa: PLC0415 - only requests with videos need it

    most = min(spec.max_pixels, get_settings().max_image_pixels)
    if isinstance(value, bytes):
        return _decoded(value, field, spec, most, most_bytes)
    if not hasattr(value, "__array__"):
        raise invalid(field, f"must be a video, not {type(value).__name__}")
    array = np.asarray(value)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or 0 in array.shape:
        form = f"{array.dtype} {list(array.shape)}"
        raise invalid(field, f"an array must be uint8 [frames, H, W, 3], is {form}")
    check_frame(array.shape[2], array.shape[1], field, most)
    _check_count(len(array), array.nbytes, field, spec, most_bytes)
    return array, spec.fps


def _decoded(
    data: bytes, field: str, spec: InputConfig, most: int, most_bytes: int
) -> tuple[Frames, float | None]:
    import numpy as np  # noqa: PLC0415 - as above

    clock = Clock(field, spec.max_seconds)
    frames: list[Frames] = []
    nbytes, tick = 0, 0.0
    with opened(data, field, "video", most) as (container, stream):
        start = None
        for frame in container.decode(stream):
            check_frame(frame.width, frame.height, field, most)
            start = frame.time if start is None else start
            seconds = max(0.0, (frame.time or 0.0) - (start or 0.0))
            clock.check(seconds)
            if spec.fps is not None:
                # Times are rounded to the file's own clock.
                if seconds < tick - 1e-3:
                    continue
                tick = max(tick + 1 / spec.fps, seconds)
            pixels = frame.to_ndarray(format="rgb24")
            if quarters := round(frame.rotation / 90) % 4:
                pixels = np.rot90(pixels, quarters)
            if frames and pixels.shape != frames[0].shape:
                raise invalid(field, "the video changes its size")
            nbytes += pixels.nbytes
            _check_count(len(frames) + 1, nbytes, field, spec, most_bytes)
            frames.append(pixels)
        rate = stream.average_rate
    if not frames:
        raise invalid(field, "the video holds no frames")
    fps = spec.fps if spec.fps is not None else (float(rate) if rate else None)
    return np.stack(frames), fps


def _check_count(count: int, nbytes: int, field: str, spec: InputConfig, most_bytes: int) -> None:
    if count > spec.max_frames:
        raise too_large(field, f"must have at most {spec.max_frames} frames")
    if nbytes > most_bytes:
        raise too_large(field, f"has more than {most_bytes} bytes decoded, which are allowed")

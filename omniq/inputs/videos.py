"""Videos of a request as frames."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omniq.inputs.decoding import Clock, check_frame, opened
from omniq.inputs.faults import invalid, too_large
from omniq.settings import get_settings

if TYPE_CHECKING:
    import numpy as np

    from omniq.config.pipeline import InputConfig

    Frames = np.ndarray[Any, np.dtype[np.uint8]]
    File = np.ndarray[Any, np.dtype[np.uint8]]

#: Which frames of so many, at so many a second, are taken: their places, from 0.
Choose = Callable[[int, float], Collection[int]]


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


def file_of(value: Any, field: str, spec: InputConfig) -> tuple[File, dict[str, Any]]:
    """A video file as uint8 [bytes], not decoded, and the width and height that its head says.

    Raises:
        InputTooLarge, UnsupportedInput, InvalidRequest: as :func:`frames_of`, as far as the head
            tells.
    """
    import numpy as np  # noqa: PLC0415 - as above

    if not isinstance(value, bytes):
        raise invalid(field, f"must be a video file, not {type(value).__name__}")
    most = min(spec.max_pixels, get_settings().max_image_pixels)
    with opened(value, field, "video", most) as (_, stream):
        shown = {"width": stream.codec_context.width, "height": stream.codec_context.height}
    return np.frombuffer(value, np.uint8), {**shown, "bytes": len(value)}


@dataclass(frozen=True, slots=True)
class ChosenFrames:
    """Some frames of a video file."""

    pixels: Frames = field(repr=False)
    """uint8 [frames, H, W, 3], turned as the file says."""
    places: list[int]
    """Of these frames among all, from 0."""
    total: int
    """Frames of the whole file."""
    rate: float
    """Frames a second of the whole file."""


def chosen_frames(
    data: bytes, name: str, choose: Choose, most_bytes: int, clock: Clock | None = None
) -> ChosenFrames:
    """Those frames of a video file that ``choose`` wants.

    How many frames a file has is counted, not read from its head. Those that are not wanted are
    not kept, so that a long video takes no more memory than what is taken of it.

    Args:
        data: the file.
        name: of the input, in errors.
        choose: is asked once, or twice where decoding gives another number than the file holds.
        most_bytes: of all frames that are taken.
        clock: bounds the time; several files may share one.

    Raises:
        InputTooLarge, UnsupportedInput, InvalidRequest: as :func:`frames_of`; or what ``choose``
            raises.
    """
    most = get_settings().max_image_pixels
    clock = clock or Clock(name, float("inf"))
    with opened(data, name, "video", most) as (container, stream):
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        total = 0
        for packet in container.demux(stream):
            clock.check(0.0)
            total += packet.size > 0
    if not rate > 0:
        raise invalid(name, "the video does not say how many frames a second it has")
    while total:
        places = sorted(set(choose(total, rate)))
        taken = _Taken(places, name, most_bytes)
        seen = 0
        with opened(data, name, "video", most) as (container, stream):
            for _, frame in _shown(container, stream, name, most, clock):
                taken.offer(seen, frame)
                seen += 1
        if seen == total:
            return ChosenFrames(taken.frames, places, total, rate)
        total = seen  # some packets show nothing, others more than one frame
    raise invalid(name, "the video holds no frames")


class _Taken:
    """Frames of some places, put into memory that is there once."""

    def __init__(self, places: Sequence[int], name: str, most_bytes: int) -> None:
        self._places, self._name, self._most = places, name, most_bytes
        self._count = 0
        self.frames: Any = None

    def offer(self, place: int, frame: Any) -> None:
        """The frame of that place; they come in order."""
        if self._count == len(self._places) or self._places[self._count] != place:
            return
        import numpy as np  # noqa: PLC0415 - as above

        pixels = _pixels(frame, self.frames, self._name)
        if self.frames is None:
            _check_bytes(pixels.nbytes * len(self._places), self._name, self._most)
            self.frames = np.empty((len(self._places), *pixels.shape), np.uint8)
        self.frames[self._count] = pixels
        self._count += 1


def _decoded(
    data: bytes, field: str, spec: InputConfig, most: int, most_bytes: int
) -> tuple[Frames, float | None]:
    import numpy as np  # noqa: PLC0415 - as above

    clock = Clock(field, spec.max_seconds)
    frames: list[Frames] = []
    nbytes, tick = 0, 0.0
    with opened(data, field, "video", most) as (container, stream):
        for seconds, frame in _shown(container, stream, field, most, clock):
            if spec.fps is not None:
                # Times are rounded to the file's own clock.
                if seconds < tick - 1e-3:
                    continue
                tick = max(tick + 1 / spec.fps, seconds)
            pixels = _pixels(frame, frames, field)
            nbytes += pixels.nbytes
            _check_count(len(frames) + 1, nbytes, field, spec, most_bytes)
            frames.append(pixels)
        rate = stream.average_rate
    if not frames:
        raise invalid(field, "the video holds no frames")
    fps = spec.fps if spec.fps is not None else (float(rate) if rate else None)
    return np.stack(frames), fps


def _shown(
    container: Any, stream: Any, field: str, most: int, clock: Clock
) -> Iterator[tuple[float, Any]]:
    """Each frame within bounds, and when it is shown, in seconds from the first."""
    start = None
    for frame in container.decode(stream):
        check_frame(frame.width, frame.height, field, most)
        start = frame.time if start is None else start
        seconds = max(0.0, (frame.time or 0.0) - (start or 0.0))
        clock.check(seconds)
        yield seconds, frame


def _pixels(frame: Any, before: Sequence[Frames] | Frames | None, field: str) -> Frames:
    """uint8 [H, W, 3], turned as the file says; as large as the first one ``before`` it."""
    import numpy as np  # noqa: PLC0415 - as above

    pixels: Frames = frame.to_ndarray(format="rgb24")
    if quarters := round(frame.rotation / 90) % 4:
        pixels = np.rot90(pixels, quarters)
    if before is not None and len(before) and pixels.shape != before[0].shape:
        raise invalid(field, "the video changes its size")
    return pixels


def _check_count(count: int, nbytes: int, field: str, spec: InputConfig, most_bytes: int) -> None:
    if count > spec.max_frames:
        raise too_large(field, f"must have at most {spec.max_frames} frames")
    _check_bytes(nbytes, field, most_bytes)


def _check_bytes(nbytes: int, field: str, most_bytes: int) -> None:
    if nbytes > most_bytes:
        raise too_large(field, f"has more than {most_bytes} bytes decoded, which are allowed")

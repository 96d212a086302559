"""Frames as video files."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image

from omniq.config import OutputConfig
from omniq.outputs.base import (
    EncodedArtifact,
    OutputContext,
    OutputHandler,
    ProcessedOutput,
    check_pyav,
    rgb_items,
    several,
)
from omniq.outputs.image import comment_of, exif_of, facts_of

#: Frames a second where neither the request nor a stage's defaults say.
FPS = 16.0
CONTENT_TYPES = {"mp4": "video/mp4", "webp": "image/webp", "gif": "image/gif"}
#: x264's constant rate factor: 18 is hardly to be told from the frames themselves.
CRF = "18"

Frames = np.ndarray[Any, np.dtype[np.uint8]]


class VideoHandler(OutputHandler):
    """Frames, uint8 [F, H, W, 3] RGB, become a video file; [n, F, H, W, 3] become n of them.

    ``mp4`` is H.264 and needs PyAV (``omniq[media]``); ``webp`` and ``gif`` are animations and need
    nothing. Frames a second are the parameter ``fps`` of the decode stage, else 16. MP4 and
    GIF files carry how they were made as JSON in their comment, WebP files in EXIF.
    """

    formats = ("mp4", "webp", "gif")

    def encode(self, name: str, form: str, data: Any, context: OutputContext) -> ProcessedOutput:
        """Encode the videos; ``meta`` has width, height, frames, fps and format."""
        videos = rgb_items(name, data, "a video", "F, H, W, 3")

        def encode(name: str, context: OutputContext, frames: Frames) -> EncodedArtifact:
            fps = context.fps or FPS
            encoded = (
                _mp4(frames, fps, context)
                if form == "mp4"
                else _animation(frames, fps, form, context)
            )
            count, height, width = frames.shape[:3]
            meta = {"width": width, "height": height, "frames": count, "fps": fps, "format": form}
            return EncodedArtifact(name, CONTENT_TYPES[form], encoded, meta)

        return several(encode, name, videos, context)

    def format_of(self, name: str, config: OutputConfig) -> str:
        """As of any handler; and whether the format can be written here.

        Raises:
            ConfigError: it cannot, or there is no such format.
        """
        form = super().format_of(name, config)
        if form == "mp4":
            check_pyav(name, form, plain="webp")
        return form


def _mp4(frames: Frames, fps: float, context: OutputContext) -> bytes:
    import av  # noqa: PLC0415 - an extra

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        container.metadata["comment"] = comment_of(context)
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        # Halved colour, which browsers ask for, needs even sides.
        odd = stream.height % 2 or stream.width % 2
        stream.pix_fmt = "yuv444p" if odd else "yuv420p"
        stream.options = {"crf": CRF}
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def _animation(frames: Frames, fps: float, form: str, context: OutputContext) -> bytes:
    file = io.BytesIO()
    first, *rest = (Image.fromarray(pixels) for pixels in frames)
    more: dict[str, Any] = {"comment": comment_of(context).encode("ascii")}
    if form == "webp":
        more = {"quality": 90, "exif": exif_of(facts_of(context))}
    # Milliseconds; PIL drops frames that equal the one before and makes that one last longer.
    duration = max(1, round(1000 / fps))
    first.save(file, form, save_all=True, append_images=rest, duration=duration, loop=0, **more)
    return file.getvalue()

"""Video files made and read by PyAV itself, for comparing with what omniq reads."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np

SOUND_RATE = 16_000


def clip(
    seed: int,
    frames: int = 12,
    fps: Fraction | int = 4,
    size: tuple[int, int] = (64, 48),
    *,
    sound: np.ndarray | None = None,
    form: str = "matroska",
) -> bytes:
    """A video file of squares that wander; with a sound, float32 [samples] at 16 kHz.

    Args:
        seed: another video for each.
        frames: how many.
        fps: of them a second.
        size: width, height.
        sound: stored without loss (PCM) in Matroska, as AAC in MP4.
        form: FFmpeg's name of the container.
    """
    random = np.random.default_rng(seed)
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream("h264", rate=Fraction(fps))
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        audio = None
        if sound is not None:
            audio = container.add_stream(
                "pcm_s16le" if form == "matroska" else "aac", rate=SOUND_RATE
            )
            audio.layout = "mono"
        colours = random.integers(0, 256, (frames, 2, 3), dtype=np.uint8)
        for i in range(frames):
            pixels = np.full((size[1], size[0], 3), colours[i, 0])
            left = int(random.integers(0, size[0] // 2))
            pixels[: size[1] // 2, left : left + size[0] // 2] = colours[i, 1]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
        if audio is not None and sound is not None:
            samples = (sound * 32_767).astype(np.int16)[None]
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate, frame.pts = SOUND_RATE, 0
            container.mux(audio.encode(frame))
            container.mux(audio.encode(None))
    return file.getvalue()


def all_frames(data: bytes) -> tuple[np.ndarray, float]:
    """uint8 [frames, H, W, 3], and how many a second."""
    with av.open(io.BytesIO(data)) as container:
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
        return np.stack(frames), float(container.streams.video[0].average_rate)


def its_sound(data: bytes) -> np.ndarray:
    """float32 [samples] at 16 kHz."""
    resampler = av.AudioResampler(format="flt", layout="mono", rate=SOUND_RATE)
    with av.open(io.BytesIO(data)) as container:
        made = [p for f in container.decode(audio=0) for p in resampler.resample(f)]
        made += resampler.resample(None)
    return np.concatenate([p.to_ndarray()[0] for p in made])

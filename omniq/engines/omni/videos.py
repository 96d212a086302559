"""Videos of a request as the omni models' processors take them: which frames, and the sound."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from omniq.engines.vllm import media
from omniq.errors import InvalidRequest
from omniq.inputs.decoding import Clock
from omniq.inputs.sounds import sound_of
from omniq.inputs.videos import chosen_frames
from omniq.settings import get_settings

#: The request's parameter with what is below; vLLM's name for it.
PARAMETER = "mm_processor_kwargs"
#: Frames of a second that are taken, as in Qwen's own tools.
FPS = 2.0
#: Of one request.
MOST_VIDEOS = 16


class VideoReader:
    """Reads the videos of one request, which have its bounds on time and memory together.

    Frames are those that the processor's own ``sample_frames`` chooses (transformers
    ``Qwen2VLVideoProcessor``): ``fps`` a second, evenly from the first on, an even number, within
    ``min_frames`` and ``max_frames``. May be called on any thread.

    Args:
        processor: the model's video processor; None: torchvision, which it needs, is missing.
        params: of the request.
    """

    def __init__(self, processor: Any, params: Mapping[str, Any]) -> None:
        asked: Mapping[str, Any] = params.get(PARAMETER) or {}
        self._processor = processor
        self._bounds = {n: asked.get(n) for n in ("min_frames", "max_frames")}
        self.fps = float(asked.get("fps") or FPS)
        self.with_sound = bool(asked.get("use_audio_in_video"))
        self._clock = Clock("its videos", float("inf"))
        self._left = get_settings().redis_blob_max_bytes
        self._count = 0

    def __call__(self, data: bytes, name: str) -> tuple[Any, media.Sound | None]:
        """Frames uint8 [frames, H, W, 3] with what vLLM is told of them; the sound if it is wanted.

        Raises:
            InvalidRequest: no video that can be read, one of too few frames, too many or too large
                ones; or it has no sound and ``use_audio_in_video`` asks for it.
        """
        self.check(name)
        self._count += 1
        if self._count > MOST_VIDEOS:
            raise _refused(name, f"must have at most {MOST_VIDEOS} videos")
        chosen = chosen_frames(data, name, partial(self._choose, name), self._left, self._clock)
        self._left -= chosen.pixels.nbytes
        about = {
            "fps": chosen.rate,
            "duration": chosen.total / chosen.rate,
            "total_num_frames": chosen.total,
            "frames_indices": chosen.places,
            "video_backend": "pyav",
            "do_sample_frames": False,
        }
        return (chosen.pixels, about), self._sound(data, name) if self.with_sound else None

    def stop(self) -> None:
        """Nobody wants them any more: what is being read ends with an error."""
        self._clock.stop()

    def check(self, name: str) -> None:
        """Whether the model takes videos here.

        Raises:
            InvalidRequest: it does not.
        """
        if self._processor is None:
            raise _refused(
                name, "video needs torchvision, which is not installed where the model runs"
            )

    def _choose(self, name: str, total: int, rate: float) -> list[int]:
        from transformers.video_utils import VideoMetadata  # noqa: PLC0415 - slow import

        least = self._processor.temporal_patch_size
        if total < least:
            raise _refused(name, f"a video must have at least {least} frames, has {total}")
        about = VideoMetadata(total_num_frames=total, fps=rate)
        found = self._processor.sample_frames(about, fps=self.fps, **self._bounds)
        return [int(place) for place in found]

    def _sound(self, data: bytes, name: str) -> media.Sound:
        try:
            samples, rate = sound_of(data, name)
        except InvalidRequest as exc:
            message = f"use_audio_in_video: {exc.fields[0]['message']}"
            field = f"parameters.{PARAMETER}"
            raise InvalidRequest(
                f"{field}: {message}", fields=[{"field": field, "message": message}]
            ) from exc
        return samples, float(rate)


def _refused(name: str, message: str) -> InvalidRequest:
    """Of an input of its own, or of a part of messages."""
    return media.bad(name.removeprefix("input.") if "." in name else "messages", message)

"""What a Python caller gets back for one request."""

from __future__ import annotations

import base64
import io
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniq.config import Modality, PipelineConfig
from omniq.errors import JobFailed
from omniq.jobs.model import JobEvent, JobRecord, JobState, MissingOutput, StageRecord

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Artifact:
    """One result file."""

    name: str
    content_type: str
    data: bytes = field(repr=False)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def is_video(self) -> bool:
        """Whether it holds frames, as a video or as an animated picture."""
        return self.content_type.startswith("video/") or "frames" in self.meta

    @property
    def order(self) -> tuple[str, int]:
        """Sorts by output, then by number where a request asked for several."""
        index = self.meta.get("index", 0)
        return self.name.removesuffix(f"-{index}"), index

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file as it is."""
        Path(path).write_bytes(self.data)


@dataclass(frozen=True, slots=True)
class Preview:
    """A small, rough picture of one that is not finished, after ``step`` steps of ``stage``."""

    stage: str
    step: int
    width: int
    height: int
    content_type: str
    data: bytes = field(repr=False)

    @classmethod
    def from_event(cls, event: JobEvent) -> Preview:
        """From a ``stage.preview`` event."""
        found = {n: event.data[n] for n in ("step", "width", "height", "content_type")}
        encoded = event.data["url"].partition(",")[2]
        return cls(stage=event.stage or "", data=base64.b64decode(encoded), **found)

    @property
    def image(self) -> Image:
        """As a PIL image."""
        from PIL import Image as PILImage  # noqa: PLC0415 - only callers that look at images

        return PILImage.open(io.BytesIO(self.data))


@dataclass
class OmniRequestOutput:
    """One request's result, or what is known of it so far (``finished`` is False)."""

    job_id: str
    pipeline: str
    prompt: str
    state: JobState
    stages: dict[str, StageRecord]
    """State, worker, times (Unix seconds), progress and metrics by stage."""
    values: dict[str, Any] = field(default_factory=dict)
    """Small results by pipeline output name."""
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    """Result files by name; there once the job has succeeded."""
    error: dict[str, Any] | None = None
    """``code``, ``message``, maybe ``hint`` and ``details``, of a job that failed."""
    missing: dict[str, MissingOutput] = field(default_factory=dict)
    """Pipeline outputs that the job goes on or has succeeded without: ``stage`` and ``error``."""
    previews: dict[int, Preview] = field(default_factory=dict)
    """The newest look at each picture that is being made, by its number; see ``preview_every``."""
    text_sources: dict[str, str] = field(default_factory=dict)
    """Pipeline outputs that are text: name -> ``stage.output`` they come from."""

    @classmethod
    def from_record(
        cls, record: JobRecord, config: PipelineConfig, artifacts: dict[str, Artifact]
    ) -> OmniRequestOutput:
        """The state of a job as the job store knows it."""
        prompts = [v for v in record.spec.inputs.values() if isinstance(v, str)]
        return cls(
            job_id=record.id,
            pipeline=record.spec.pipeline,
            prompt=prompts[0] if prompts else "",
            state=record.state,
            stages=record.stages,
            values=dict(record.values),
            artifacts=artifacts,
            error=record.error,
            missing=record.missing,
            text_sources={
                name: output.source
                for name, output in config.outputs.items()
                if output.type is Modality.TEXT
            },
        )

    @property
    def finished(self) -> bool:
        """Whether the job has ended, well or not."""
        return self.state.final

    @property
    def partial(self) -> bool:
        """Whether the job has succeeded without some of its outputs; see ``allow_partial``."""
        return self.state is JobState.SUCCEEDED and bool(self.missing)

    @property
    def text(self) -> str | None:
        """The pipeline's (first) text output; while it runs, as much of it as there is."""
        for name in self.text_sources:
            value = self.values.get(name)
            if isinstance(value, dict):
                value = value.get("text")
            if isinstance(value, str):
                return value
        return None

    @cached_property
    def images(self) -> list[Image]:
        """All pictures as PIL images, by output and number."""
        from PIL import Image as PILImage  # noqa: PLC0415 - only callers that look at images

        return [
            PILImage.open(io.BytesIO(a.data))
            for a in self.files
            if a.content_type.startswith("image/") and not a.is_video
        ]

    @property
    def videos(self) -> list[Artifact]:
        """All videos as files, by output and number."""
        return [a for a in self.files if a.is_video]

    @property
    def audios(self) -> list[Artifact]:
        """All sounds as files, by output and number."""
        return [a for a in self.files if a.content_type.startswith("audio/")]

    @property
    def files(self) -> list[Artifact]:
        """All result files, by output and number."""
        return sorted(self.artifacts.values(), key=lambda a: a.order)

    @cached_property
    def latents(self) -> dict[str, np.ndarray[Any, Any]]:
        """All tensors of safetensors artifacts by name, as numpy arrays.

        Raises:
            ValueError: bfloat16, which numpy lacks; use :meth:`torch_latents`.
        """
        from safetensors.numpy import load  # noqa: PLC0415 - only callers that look at tensors

        return {name: t for a in self._tensor_files() for name, t in load(a.data).items()}

    def torch_latents(self) -> dict[str, Any]:
        """The same as CPU torch tensors; needs torch."""
        from safetensors.torch import load  # noqa: PLC0415 - imports torch

        return {name: t for a in self._tensor_files() for name, t in load(a.data).items()}

    def _tensor_files(self) -> list[Artifact]:
        return [a for a in self.files if "safetensors" in a.content_type]

    def raise_for_state(self) -> None:
        """Raise JobFailed for a job that ended in another way than success."""
        if not self.finished or self.state is JobState.SUCCEEDED:
            return
        error = self.error or {}
        message = error.get("message") or f"the job is {self.state.value}"
        raise JobFailed(
            f"job {self.job_id} {self.state.value}: {message}",
            hint=error.get("hint"),
            job_id=self.job_id,
            state=self.state.value,
            error=error,
        )

    def apply(self, event: JobEvent) -> bool:
        """Bring a partial output up to date with one event; False if nothing visible changed."""
        stage = self.stages.get(event.stage or "")
        if event.type == "job.started":
            self.state = JobState.RUNNING
        elif event.type == "stage.started" and event.stage is not None:
            self._forget(event.stage)
        elif event.type == "stage.progress" and stage is not None:
            stage.step, stage.total = event.data["step"], event.data["total"]
        elif event.type == "stage.preview":
            self.previews[event.data["image"]] = Preview.from_event(event)
        elif event.type == "stage.delta":
            return self._append(f"{event.stage}.{event.data['output']}", event.data["value"])
        else:
            return False
        return True

    def _forget(self, stage: str) -> None:
        """A run starts (perhaps again): what an earlier run of the stage said does not count."""
        self.previews = {i: p for i, p in self.previews.items() if p.stage != stage}
        for name, source in self.text_sources.items():
            if source.partition(".")[0] == stage:
                self.values.pop(name, None)

    def _append(self, source: str, value: Any) -> bool:
        piece = value.get("text") if isinstance(value, dict) else value
        if isinstance(value, dict) and value.get("index"):  # of another choice than the first
            return False
        names = [n for n, s in self.text_sources.items() if s == source]
        if not isinstance(piece, str) or not names:
            return False
        for name in names:
            self.values[name] = self.values.get(name, "") + piece
        return True

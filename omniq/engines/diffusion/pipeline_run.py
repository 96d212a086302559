"""One picture's run of the stock pipeline, and what happens after each of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from omniq.engines.base import Emit, StageOutput
from omniq.engines.diffusion.scheduler import Ticket
from omniq.engines.diffusion.session import Ask, TransformerCalls, for_request
from omniq.engines.families.base import Family
from omniq.engines.seeds import seeded_generator
from omniq.errors import EngineError, InvalidRequest

#: Steps between looks for NaN on an accelerator, where each look waits for the device.
NAN_EVERY = 8

Preview = Callable[[int, torch.Tensor], None]


@dataclass(slots=True)
class Progress:
    """Progress of all pictures of one request together."""

    emit: Emit
    pictures: int
    done: int = 0

    def step(self, total: int) -> None:
        """One more step of one picture, which has ``total``."""
        self.done += 1
        self.emit.progress(self.done, total * self.pictures)


@dataclass(slots=True)
class PipelineRun:
    """Runs a pipeline from noise to latents; ``__call__`` is the ``work`` of a session.

    ``arguments`` are those of the pipeline's ``__call__``, ``accepted`` its parameters by name.
    ``size`` is the picture's (height, width) in pixels. ``pairs``: foresee the second call of a
    guidance pair.
    """

    family: Family
    pipeline: Any
    scheduler: Any
    arguments: Mapping[str, Any]
    accepted: Mapping[str, Any]
    seed: int | None
    size: tuple[int, int]
    ticket: Ticket
    progress: Progress
    preview: Preview | None = None
    pairs: bool = True
    _done: int = field(default=0, init=False)

    def __call__(self, ask: Ask) -> StageOutput:
        """Denoise.

        Raises:
            InvalidRequest: the pipeline refused its arguments.
            EngineError: the latents hold NaN or infinity.
        """
        started = time.perf_counter()
        calls = TransformerCalls(self.family, ask, pairs=self.pairs)
        own = for_request(self.pipeline, self.scheduler, calls)
        more: dict[str, Any] = {}
        if "callback_on_step_end" in self.accepted:
            more["callback_on_step_end"] = self._step
        try:
            output = own(
                **self.family.prepared(own, self.arguments),
                generator=seeded_generator(self.seed),
                output_type="latent",
                return_dict=False,
                **more,
            )[0]
        except (ValueError, TypeError) as exc:
            if calls.made:
                raise
            # Pipelines check their arguments before the first step, and say what is wrong.
            raise InvalidRequest(str(exc)) from exc
        self._check(output)
        return StageOutput(
            tensors={"latents": {"latents": self.family.latents(own, output, self.size).cpu()}},
            metrics={"steps": self._done, "denoise_seconds": time.perf_counter() - started},
        )

    def _step(
        self, pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        self._done = step + 1
        self.ticket.steps_done = self._done
        self.ticket.steps_total = int(pipeline.num_timesteps)
        latents = tensors["latents"]
        if latents.device.type == "cpu" or self._done % NAN_EVERY == 0:
            self._check(latents)
        self.progress.step(self.ticket.steps_total)
        if self.preview is not None:
            self.preview(self._done, latents)
        return {}

    def _check(self, latents: torch.Tensor) -> None:
        if not torch.isfinite(latents).all():
            raise EngineError(f"the latents hold NaN or infinity after {self._done} steps")

"""Building and asking engines in tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from omniq.config import OmniStageConfig
from omniq.engines import create_engine
from omniq.engines.base import Engine, NullEmit, StageInput, StageOutput, StageRequest


def stage(model: Path, stage_id: str, **more: Any) -> OmniStageConfig:
    """Configuration of a stage ``ar``, ``encode``, ``dit`` or ``decode`` on the tiny model."""
    common: dict[str, dict[str, Any]] = {
        "ar": {
            "engine_type": "AR",
            "subfolder": "text_encoder",
            "output_modalities": ["text", "hidden_states"],
        },
        "dit": {
            "engine_type": "DiT",
            "defaults": {"height": 32, "width": 32, "num_inference_steps": 4},
            "dit": {"null_condition": "zeros"},
        },
        "encode": {"engine_type": "encode"},
        "decode": {"engine_type": "decode"},
    }
    settings = {"stage_id": stage_id, "model": str(model), "dtype": "float32", "max_in_flight": 8}
    return OmniStageConfig.model_validate({**settings, **common[stage_id], **more})


async def loaded(config: OmniStageConfig) -> Engine:
    """A loaded engine."""
    engine = create_engine(config)
    await engine.load()
    return engine


async def ask(
    engine: Engine, params: Mapping[str, Any], emit: Any = None, **inputs: Any
) -> StageOutput:
    """Run one request; an input is text, or a tensor."""
    given = {
        name: StageInput(tensors={name: value})
        if isinstance(value, torch.Tensor)
        else StageInput(value)
        for name, value in inputs.items()
    }
    return await engine.run(StageRequest("test", params), given, emit or NullEmit())


async def until(predicate: Callable[[], bool], task: asyncio.Task[Any] | None = None) -> None:
    """Let the loop run until ``predicate()``; fails after 30 s, or when ``task`` ends before."""
    deadline = time.monotonic() + 30
    while not predicate():
        assert time.monotonic() < deadline, "not within 30 s"
        assert task is None or not task.done(), f"ended early: {task}"
        await asyncio.sleep(0)


class Recorder(NullEmit):
    """Keeps what a stage says."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.pieces: list[str] = []
        #: One tensor of each chunk.
        self.chunks: list[torch.Tensor] = []

    def progress(self, step: int, total: int) -> None:
        self.steps.append((step, total))

    def delta(self, output: str, value: Any) -> None:
        assert output == "text"
        self.pieces.append(value["text"])

    async def achunk(
        self, output: str, value: Any = None, tensors: Any = None, *, last: bool = False
    ) -> None:
        self.chunks.append(tensors[output])

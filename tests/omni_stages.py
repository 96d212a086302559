"""The stages of an omni model as engines, one after the other or streaming to each other."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from omniq.config import OmniStageConfig
from omniq.engines import create_engine
from omniq.engines.base import Chunk, Engine, NullEmit, StageInput, StageOutput, StageRequest

#: Of modules whose thinkers run on vLLM, loaded once.
MARKS_OF_VLLM = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("vllm", "torchvision"))),
        reason="needs vllm and torchvision",
    ),
]
#: What each stage hands on.
OUTPUTS = ("reply", "codes", "audio")
TYPES: dict[str, dict[str, Any]] = {
    "thinker": {
        "engine_type": "AR",
        "engine": "omni-thinker",
        "output_modalities": ["text", "hidden_states"],
    },
    "talker": {"engine_type": "talk"},
}


def omni_stage(
    folder: Path, stage_id: str, engine: str | None = None, **more: Any
) -> OmniStageConfig:
    """Configuration of a stage ``thinker`` or ``talker``, or of a vocoder by any other name."""
    settings: dict[str, Any] = {"stage_id": stage_id, "model": str(folder), "dtype": "float32"}
    settings |= {"max_in_flight": 8}
    settings |= TYPES.get(stage_id, {"engine_type": "vocode"})
    if engine is not None:
        settings["engine"] = engine
    return OmniStageConfig.model_validate({**settings, **more})


class Chunks(NullEmit):
    """Hands on the chunks of one output to the next engine, and keeps what was said."""

    def __init__(self, output: str) -> None:
        self.output, self.texts = output, []
        self.queue: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self.tensors: list[torch.Tensor] = []

    def delta(self, output: str, value: Any) -> None:
        self.texts.append(value["text"])

    async def achunk(
        self, output: str, value: Any = None, tensors: Any = None, *, last: bool = False
    ) -> None:
        assert output == self.output
        self.tensors.append(next(iter(tensors.values())))
        self.queue.put_nowait(Chunk(len(self.tensors) - 1, value, tensors, last))

    async def read(self) -> AsyncIterator[Chunk]:
        while (chunk := await self.queue.get()) is not None:
            yield chunk


class OmniStages:
    """The engines of thinker, talker and vocoder."""

    def __init__(self, engines: dict[str, Engine]) -> None:
        self.engines = engines

    @classmethod
    @asynccontextmanager
    async def loaded(
        cls,
        folder: Path,
        stages: Sequence[str],
        engines: Mapping[str, str] | None = None,
        **engine_args: Mapping[str, Any],
    ) -> AsyncIterator[OmniStages]:
        """Loaded, and unloaded in the end.

        Args:
            folder: of the model.
            stages: by id.
            engines: by stage, where it is not the usual one.
            engine_args: by stage.
        """
        made = {}
        for i in stages:
            args = dict(engine_args.get(i, {}))
            made[i] = create_engine(omni_stage(folder, i, (engines or {}).get(i), engine_args=args))
        for engine in made.values():
            await engine.load()
        yield cls(made)
        for engine in made.values():
            await engine.unload()

    async def whole(
        self, params: dict[str, dict[str, Any]], **inputs: Any
    ) -> dict[str, StageOutput]:
        """One stage after the other, nothing streamed."""
        given = {name: StageInput(value) for name, value in inputs.items()}
        made: dict[str, StageOutput] = {}
        passed = given
        for stage_id, output in zip(self.engines, OUTPUTS, strict=True):
            request = StageRequest("whole", params.get(stage_id, {}), stream=False)
            done = await self.engines[stage_id].run(request, passed, NullEmit())
            made[stage_id] = done
            passed = {output: StageInput(tensors=done.tensors[output])}
        return made

    async def streamed(
        self, params: dict[str, dict[str, Any]], **inputs: Any
    ) -> tuple[dict[str, StageOutput], dict[str, Chunks]]:
        """All stages at once, each fed by the chunks of the one before."""
        emits = {i: Chunks(o) for i, o in zip(self.engines, OUTPUTS, strict=True)}
        passed: dict[str, StageInput] = {n: StageInput(v) for n, v in inputs.items()}
        runs = {}
        for stage_id, emit in emits.items():
            request = StageRequest("streamed", params.get(stage_id, {}), stream=True)
            run = asyncio.ensure_future(self.engines[stage_id].run(request, passed, emit))
            run.add_done_callback(lambda _, e=emit: e.queue.put_nowait(None))
            runs[stage_id] = run
            passed = {emit.output: StageInput(chunks=emit.read())}
        await asyncio.gather(*runs.values())
        return {i: r.result() for i, r in runs.items()}, emits

"""The vLLM engine, watched, and an engine that reads its streams, to drive workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from stage_engines import NOTES, note

from omniq.engines.ar_vllm import VLLMAREngine
from omniq.engines.base import Emit, Engine, StageInput, StageOutput, StageRequest


class Counted(VLLMAREngine):
    """Notes how many requests it has at most, and how many of them vLLM runs (needs in_process)."""

    _held = _most_held = _most_run = 0

    async def load(self) -> None:
        await super().load()
        core = self._engine.engine_core._core
        step = core.step_fn

        def counted() -> Any:
            made = step()
            running = len(core.scheduler.running)
            if running > self._most_run:
                self._most_run = running
                note("vllm runs", running)
            return made

        core.step_fn = counted

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        self._held += 1
        if self._held > self._most_held:
            self._most_held = self._held
            note("engine holds", self._held)
        try:
            return await super().run(request, inputs, emit)
        finally:
            self._held -= 1


class Listener(Engine):
    """Reads ``token_ids`` and ``hidden_states`` side by side, as a talker would.

    Outputs the ids and the sizes of the chunks; the states go to a file beside the notes.
    """

    name = "listener"

    async def load(self) -> None:
        pass

    async def warmup(self) -> None:
        pass

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        tokens, states = inputs["token_ids"].chunks, inputs["states"].chunks
        assert tokens is not None
        assert states is not None
        ids: list[int] = []
        rows: list[torch.Tensor] = []
        sizes: list[int] = []
        async for chunk in tokens:
            (new,) = chunk.tensors.values()
            (seen,) = (await anext(states)).tensors.values()
            assert len(new) == len(seen)
            ids += new.tolist()
            rows.append(seen.clone())
            sizes.append(len(new))
            note("heard", chunk.sequence)
        async for _ in states:
            raise AssertionError("states without tokens")
        torch.save(torch.cat(rows), NOTES.with_name("heard.pt"))
        return StageOutput(values={"heard": {"ids": ids, "sizes": sizes}})

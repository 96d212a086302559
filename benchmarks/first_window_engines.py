"""The stages of ``first_window.py``: one makes chunks, one works through them, at the same pace.

``engine_args``: ``chunks``, ``pace`` (seconds a chunk), ``kb`` (of tensor a chunk), ``window``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import torch

from omniq.engines.base import Emit, Engine, StageInput, StageOutput, StageRequest


class Paced(Engine):
    """What both have in common."""

    async def load(self) -> None:
        self.args = self.stage.engine_args

    async def warmup(self) -> None:
        pass

    async def step(self) -> None:
        await asyncio.sleep(self.args["pace"])


class Produce(Paced):
    """Emits its chunks as they are made, or hands all on at its end."""

    name = "produce"

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        made = []
        for number in range(self.args["chunks"]):
            await self.step()
            made.append(torch.full((self.args["kb"] << 8,), float(number)))
            if "window" in self.args:
                await emit.achunk("chunks", tensors={"t": made[-1]})
        if "window" in self.args:
            return StageOutput()
        return StageOutput(tensors={"chunks": {"t": torch.stack(made)}})


class Consume(Paced):
    """Says when it has worked through its first window, and what it got."""

    name = "consume"

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        total, count = 0.0, 0
        async for chunk in self._chunks(inputs["chunks"]):
            await self.step()
            total += float(chunk.mean())
            count += 1
            if count == self.args["first"]:
                emit.delta("sum", {"text": "first window"})
        return StageOutput(values={"sum": str(total)})

    async def _chunks(self, given: StageInput) -> AsyncIterator[torch.Tensor]:
        if given.chunks is None:
            for row in given.tensor:
                yield row
            return
        async for chunk in given.chunks:
            yield chunk.tensors["t"]

"""Engines that do nothing but make, pass on and read one tensor, for ``chain.py``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from chain_work import first, last, middle

from omniq.engines.base import Emit, Engine, StageInput, StageOutput, StageRequest


class NoOp(Engine):
    """Base: nothing to load."""

    name = "no-op"

    async def load(self) -> None:
        torch.set_num_threads(1)

    async def warmup(self) -> None:
        pass


class First(NoOp):
    """Makes the tensor that says the request's number."""

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        return StageOutput(tensors={"t": {"t": first(int(inputs["number"].value))}})


class Middle(NoOp):
    """Hands the tensor on."""

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        return StageOutput(tensors={"t": {"t": middle(inputs["t"].tensor)}})


class Last(NoOp):
    """Reads the tensor, answers its number."""

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        return StageOutput(values={"number": str(last(inputs["t"].tensor))})

"""Engines of ``pool_memory.py``: one fills a tensor with the request's number, one reads it all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import torch
from chain_engines import NoOp

from omniq.engines.base import Emit, StageInput, StageOutput, StageRequest
from omniq.errors import EngineError

#: Bytes of a tensor.
NBYTES = int(os.environ.get("POOL_MEMORY_BYTES", f"{16 << 20}"))


class Make(NoOp):
    """``t``: int64[NBYTES / 8], every element the request's number."""

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        number = int(inputs["number"].value)
        made = await asyncio.to_thread(torch.full, (NBYTES // 8,), number, dtype=torch.int64)
        return StageOutput(tensors={"t": {"t": made}})


class Check(NoOp):
    """Answers the number that every element is."""

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        low, high = await asyncio.to_thread(torch.aminmax, inputs["t"].tensor)
        if low.item() != high.item():
            raise EngineError(f"the blob holds {low.item()} and {high.item()}: it was overwritten")
        return StageOutput(values={"number": str(low.item())})

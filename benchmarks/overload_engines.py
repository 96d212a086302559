"""Engines that wait, as for a device, for ``overload.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from chain_engines import NoOp

from omniq.engines.base import Emit, StageInput, StageOutput, StageRequest


class Quick(NoOp):
    """5 ms a request."""

    seconds = 0.005

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        await asyncio.sleep(self.seconds)
        return StageOutput(values={"number": inputs["number"].value})


class Slow(Quick):
    """50 ms a request: 160 a second at most, eight at a time."""

    seconds = 0.05

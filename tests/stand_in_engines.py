"""Engines without a model, for tests of the system around them. The prompt says what to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from omniq.engines.base import Emit, Engine, StageInput, StageOutput, StageRequest
from omniq.errors import ConfigError, EngineError


class Words(Engine):
    """Repeats its prompt in capitals, a word at a time.

    ``fail`` fails, ``die`` ends the process, ``slow`` takes ``engine_args.slow`` seconds.
    """

    name = "words"

    async def load(self) -> None:
        if reason := self.stage.engine_args.get("broken"):
            raise ConfigError(reason)
        await asyncio.sleep(self.stage.engine_args.get("load", 0.0))

    async def warmup(self) -> None:
        pass

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        words = str(inputs["prompt"].value).split()
        pause = self.stage.engine_args.get("slow", 30.0) if "slow" in words else 0.02
        if "die" in words:
            os._exit(9)
        if "fail" in words:
            raise EngineError("told to fail")
        for index, word in enumerate(words):
            await asyncio.sleep(pause)
            emit.progress(index + 1, len(words))
            emit.delta("text", {"text": (" " if index else "") + word.upper()})
        return StageOutput(values={"text": " ".join(words).upper()})

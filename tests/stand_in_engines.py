"""Engines without a model, for tests of the system around them. The prompt says what to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sounds import tone

from omniq.engines.base import Emit, Engine, StageInput, StageOutput, StageRequest
from omniq.errors import ConfigError, EngineError


class WithoutModel(Engine):
    """One that is ready at once."""

    async def load(self) -> None:
        pass

    async def warmup(self) -> None:
        pass


class Words(WithoutModel):
    """Repeats its prompt in capitals, a word at a time.

    ``fail`` fails, ``die`` ends the process, ``slow`` takes ``engine_args.slow`` seconds.
    """

    name = "words"

    async def load(self) -> None:
        if reason := self.stage.engine_args.get("broken"):
            raise ConfigError(reason)
        await asyncio.sleep(self.stage.engine_args.get("load", 0.0))

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


class Tones(WithoutModel):
    """Speaks each word of its prompt as 0.1 s of a tone, a chunk each.

    ``quiet``: hands on no chunks, only the whole; ``fail``: fails there; ``gate``: waits until the
    file ``engine_args.gate`` exists. A voice other than ``low`` is an octave higher.
    """

    name = "tones"

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        import torch

        words = str(inputs["text"].value).split()
        low = "voice" not in inputs or inputs["voice"].value == "low"
        said = [torch.from_numpy(tone_of(i, low=low)) for i in range(len(words))]
        for word, samples in zip(words, said, strict=True):
            if word == "fail":
                raise EngineError("told to fail")
            while word == "gate" and not Path(self.stage.engine_args["gate"]).exists():
                await asyncio.sleep(0.02)
            if "quiet" not in words:
                await emit.achunk("audio", tensors={"audio": samples})
        return StageOutput(
            tensors={"audio": {"audio": torch.cat(said)}},
            metrics={"prompt_tokens": len(words), "completion_tokens": 10 * len(words)},
        )


def tone_of(number: int, *, low: bool = True) -> Any:
    """What :class:`Tones` says for word ``number``: float32 [2400], 24 kHz."""
    return tone(24_000, 0.1, (220 + 40 * number) * (1 if low else 2))


class Everything(WithoutModel):
    """Makes, of whatever it is given, something small of each kind that its stage puts out.

    The prompt ``fail`` fails.
    """

    name = "everything"

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        if "prompt" in inputs and inputs["prompt"].value == "fail":
            raise EngineError("told to fail")
        made = StageOutput(metrics={"prompt_tokens": 1, "completion_tokens": 1})
        for kind in self.stage.output_modalities:
            if kind == "text":
                made.values |= {"text": "YES", "finish_reason": "stop"}
                emit.delta("text", {"text": "YES"})
                continue
            import torch

            count = request.params.get("num_images_per_prompt") or 1
            tensor = {
                "image": torch.zeros(count, 8, 8, 3, dtype=torch.uint8),
                "audio": torch.zeros(2400),
                "pooling": torch.ones(4),
            }[kind]
            made.tensors[kind] = {kind: tensor}
        return made

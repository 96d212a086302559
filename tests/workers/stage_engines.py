"""An engine whose prompt says what each stage does, to drive workers without a model.

The prompt is a list of ``STAGE:COMMAND=ARGUMENT`` words, which every stage passes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from omniq.engines.base import Emit, Engine, StageInput, StageOutput, StageRequest
from omniq.errors import ConfigError, EngineDead, EngineError, EngineOutOfMemory, InvalidRequest

NOTES = Path(os.environ.get("POOL_NOTES", "notes"))


def note(*words: object) -> None:
    with NOTES.open("a") as file:
        file.write(f"{time.time():.3f} {os.getpid()} {' '.join(map(str, words))}\n")


class Scripted(Engine):
    """``sleep=S``, ``until=NOTE`` (waits for that note), ``retry=N`` (fail N times), ``die=N``
    (exit N times), ``invalid``, ``error``, ``dead=N`` (the engine dies N times), ``assert=N``
    (loses a real CUDA device N times), ``stuck=N`` (does not stop, N times), ``tensors`` (sends
    one), ``bytes=N`` (one of so many bytes), ``say=TEXT`` (streams it).
    """

    name = "scripted"

    async def load(self) -> None:
        if reason := self.stage.engine_args.get("broken"):
            raise ConfigError(reason)
        if reason := self.stage.engine_args.get("crash"):
            raise RuntimeError(reason)
        await asyncio.sleep(self.stage.engine_args.get("load", 0.0))
        note("loaded", self.stage.stage_id)

    async def warmup(self) -> None:
        pass

    async def run(  # noqa: PLR0912 - one branch a command
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        me = self.stage.stage_id
        job = request.request_id.partition(".")[0]
        before = NOTES.read_text().count(f"run {me} {job}\n")
        note("run", me, job)
        if request.deadline is not None:
            note("deadline", me, job, round(request.deadline - time.monotonic(), 3))
        texts = [str(i.value) for i in inputs.values() if i.value is not None]
        prompt = texts[0]
        tensors = {}
        for word in prompt.split():
            stage, _, command = word.partition(":")
            if stage != me:
                continue
            verb, _, argument = command.partition("=")
            if verb == "sleep":
                await self._sleep(float(argument), emit, job)
            elif verb == "until":
                while argument not in NOTES.read_text():
                    await asyncio.sleep(0.02)
            elif verb == "retry" and before < int(argument):
                raise EngineOutOfMemory("not this time")
            elif verb == "die" and before < int(argument):
                os._exit(9)
            elif verb == "dead" and before < int(argument):
                raise EngineDead("the device fell off the bus")
            elif verb == "assert" and before < int(argument):
                _lose_the_device()
            elif verb == "stuck" and before < int(argument):
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(3600)
            elif verb == "invalid":
                raise InvalidRequest("never")
            elif verb == "error":
                raise EngineError("broken by request")
            elif verb == "say":
                for letter in argument:
                    emit.delta("text", {"text": letter})
            elif verb == "tensors":
                import torch

                tensors = {"text": {"t": torch.arange(6).reshape(2, 3)}}
            elif verb == "bytes":
                import torch

                tensors = {"text": {"t": torch.zeros(int(argument), dtype=torch.uint8)}}
                note("bytes", me, job)
        for name, item in inputs.items():
            if item.tensors:
                few = item.tensor.numel() < 1000
                note("tensors", me, name, item.tensor.tolist() if few else item.tensor.shape)
        note("done", me, job)
        return StageOutput(
            values={"text": prompt}, tensors=tensors, metrics={"inputs": len(inputs)}
        )

    async def _sleep(self, seconds: float, emit: Emit, job: str) -> None:
        steps = max(1, round(seconds / 0.1))
        try:
            for step in range(steps):
                await asyncio.sleep(seconds / steps)
                emit.progress(step + 1, steps)
        except asyncio.CancelledError:
            note("stopped", self.stage.stage_id, job)
            raise


def _lose_the_device() -> None:
    import torch

    from omniq.engines.faults import engine_faults

    table = torch.zeros(4, 4, device="cuda")
    with engine_faults("run"):
        torch.nn.functional.embedding(torch.tensor([9], device="cuda"), table)
        torch.cuda.synchronize()

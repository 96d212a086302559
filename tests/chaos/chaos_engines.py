"""Stages whose outcome is a function of the prompt, by way of tensors: what must come out whatever
happens to the processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from omniq.engines.base import Emit, Engine, StageInput, StageOutput, StageRequest

#: Bytes of the tensors; of every eighth job 16 times as much.
SIZE = 64 << 10


def made(prompt: str) -> torch.Tensor:
    digest = hashlib.sha256(prompt.encode()).digest()
    size = SIZE * (16 if digest[0] % 8 == 0 else 1)
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def changed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0).roll(7) ^ 0x5A


def summed(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def expected(prompt: str) -> str:
    """What a job with this prompt gives."""
    return summed(changed(made(prompt)))


class Link(Engine):
    """``make``, ``change`` or ``sum`` by its stage's id. A prompt with ``die=N`` ends the process
    of its second stage N times.
    """

    name = "link"

    async def load(self) -> None:
        torch.set_num_threads(1)

    async def warmup(self) -> None:
        pass

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        stage = self.stage.stage_id
        (given,) = inputs.values()
        prompt = str(given.value)
        if stage == "change":
            self._die(prompt, request.request_id.partition(".")[0])
        steps = 1 + hashlib.sha256(f"{stage} {prompt}".encode()).digest()[0] % 6
        for step in range(steps):
            await asyncio.sleep(0.02)
            emit.progress(step + 1, steps)
        if stage == "sum":
            return StageOutput(values={"text": summed(given.tensor)})
        tensor = made(prompt) if stage == "make" else changed(given.tensor)
        return StageOutput(values={"text": prompt}, tensors={"text": {"t": tensor}})

    def _die(self, prompt: str, job: str) -> None:
        _, found, times = prompt.partition("die=")
        if found:
            with Path(os.environ["CHAOS_FOLDER"], f"died-{job}").open("a+") as file:
                file.write(".")
                if file.tell() <= int(times.split()[0]):
                    os._exit(9)

"""Stages whose outcome is a function of the prompt, by way of tensors: what must come out whatever
happens to the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import chaos_child
import torch

from omniq.engines.base import Emit, Engine, StageInput, StageOutput, StageRequest
from omniq.errors import EngineDead, EngineError, EngineOutOfMemory, InvalidRequest

#: Bytes of the tensors; of every eighth job 16 times as much.
SIZE = 64 << 10


def made(prompt: str) -> torch.Tensor:
    digest = hashlib.sha256(prompt.encode()).digest()
    size = SIZE * (16 if digest[0] % 8 == 0 else 1)
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def summed(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def expected(prompt: str) -> str:
    """What a job with this prompt gives."""
    return summed(made(prompt).flip(0).roll(7) ^ 0x5A)


class EngineProcess:
    """The model of a stage in a process of its own; dead once that is."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        # By the loop's thread, which lives as long as this process.
        command = [sys.executable, chaos_child.__file__, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._count = 0
        self._dead: EngineDead | None = None
        self._sending = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    async def change(self, data: bytes) -> bytes:
        """What the process makes of ``data``.

        Raises:
            EngineDead: it has died.
        """
        if self._dead is not None:
            raise self._dead
        self._count += 1
        number, answer = self._count, self._loop.create_future()
        self._waiting[number] = answer
        try:
            await asyncio.to_thread(self._send, number, data)
            return await answer
        finally:
            self._waiting.pop(number, None)

    def _send(self, number: int, data: bytes) -> None:
        assert self._process.stdin is not None
        # The thread that reads says so if it is dead.
        with self._sending, contextlib.suppress(OSError, ValueError):
            chaos_child.write(self._process.stdin, number, data)

    def _read(self) -> None:
        assert self._process.stdout is not None
        while (frame := chaos_child.read(self._process.stdout)) is not None:
            self._loop.call_soon_threadsafe(self._answered, *frame)
        code = self._process.wait()
        self._loop.call_soon_threadsafe(self._died, code)

    def _answered(self, number: int, data: bytes) -> None:
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            answer.set_result(data)

    def _died(self, code: int) -> None:
        self._dead = EngineDead(f"the engine process ended with {code}")
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._dead)

    def close(self) -> None:
        """End it and wait for that."""
        assert self._process.stdin is not None
        with self._sending:
            self._process.stdin.close()
        self._process.wait()


class Link(Engine):
    """``make``, ``change`` or ``sum`` by its stage's id; ``change`` in an engine process.

    A prompt may have one of these, all of them for ``change``: ``die=N`` ends the worker N times,
    ``dead=N`` the engine process, ``oom=N`` fails N times; ``poison=kill`` ends the engine process
    every time, ``poison=invalid`` and ``poison=error`` are refused and fail.
    """

    name = "link"
    _process: EngineProcess | None = None

    async def load(self) -> None:
        torch.set_num_threads(1)
        if self.stage.stage_id == "change":
            self._process = EngineProcess()

    async def warmup(self) -> None:
        pass

    async def unload(self) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        await super().unload()

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        stage = self.stage.stage_id
        (given,) = inputs.values()
        prompt = str(given.value)
        job = request.request_id.partition(".")[0]
        steps = 1 + hashlib.sha256(f"{stage} {prompt}".encode()).digest()[0] % 6
        for step in range(steps):
            await asyncio.sleep(0.02)
            emit.progress(step + 1, steps)
        if stage == "sum":
            return StageOutput(values={"text": summed(given.tensor)})
        if stage == "make":
            tensor = made(prompt)
        else:
            assert self._process is not None
            data = given.tensor.numpy().tobytes()
            if self._troubled(prompt, job):
                data = chaos_child.DIE
            tensor = torch.frombuffer(
                bytearray(await self._process.change(data)), dtype=torch.uint8
            )
        return StageOutput(values={"text": prompt}, tensors={"text": {"t": tensor}})

    def _troubled(self, prompt: str, job: str) -> bool:
        """Do what the prompt asks for; True: the engine process is to die."""
        words = dict(word.split("=") for word in prompt.split() if "=" in word)
        poison = words.get("poison")
        if poison == "invalid":
            raise InvalidRequest("this input can never be served")
        if poison == "error":
            raise EngineError("this input breaks the model")
        for verb in ("die", "dead", "oom"):
            if verb in words and self._times(job) <= int(words[verb]):
                if verb == "die":
                    os._exit(9)
                if verb == "oom":
                    raise EngineOutOfMemory("not this time")
                return True
        return poison == "kill"

    def _times(self, job: str) -> int:
        """How often this has been asked for the job, over all processes."""
        with Path(os.environ["CHAOS_FOLDER"], f"trouble-{job}").open("a+") as file:
            file.write(".")
            return file.tell()

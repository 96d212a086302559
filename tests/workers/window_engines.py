"""Engines that stream chunks to each other, steered by the prompt, to drive workers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping

from stage_engines import NOTES, note

from omniq.engines.base import Cancelled, Emit, Engine, StageInput, StageOutput, StageRequest
from omniq.errors import EngineError, EngineOutOfMemory


class Streaming(Engine):
    """Emits a chunk for each chunk it reads, or ``chunks=N`` of its own.

    ``pace=S`` seconds a chunk; ``tensors`` adds one to each; ``thread`` emits from the model
    thread; ``whole`` emits none; ``silent=S`` stops emitting after the first two for so long;
    ``most=N`` reads no more; ``die=I``, ``fail=I``, ``retry=I``: at chunk I, the last two in the
    first run only.
    """

    name = "streaming"

    async def load(self) -> None:
        note("loaded", self.stage.stage_id)

    async def warmup(self) -> None:
        pass

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        me, job = self.stage.stage_id, request.request_id.partition(".")[0]
        first = f"run {me} {job}\n" not in NOTES.read_text()
        note("run", me, job)
        orders = dict(
            word.partition(":")[2].partition("=")[::2]
            for word in str(inputs["prompt"].value).split()
            if word.startswith(f"{me}:")
        )
        said: list[str] = []
        try:
            async for text in self._pieces(orders, inputs, first):
                number = len(said)
                self._trouble(orders, number, first)
                said.append(text)
                note("chunk", me, job, number)
                if "whole" not in orders:
                    await self._emit(emit, orders, text, number)
        except (asyncio.CancelledError, Cancelled):
            note("stopped", me, job)
            raise
        note("done", me, job)
        values = {"text": " ".join(said)}
        return StageOutput(
            values=values if "whole" not in orders else {**values, "words": " ".join(said)},
            metrics={"chunks": len(said)},
        )

    async def _pieces(self, orders: dict[str, str], inputs: Mapping[str, StageInput], first: bool):
        pace = float(orders.get("pace", 0))
        streams = [i for i in inputs.values() if i.chunks is not None]
        if not streams:
            for number in range(int(orders.get("chunks", 3))):
                await asyncio.sleep(pace)
                if number == 2 and "silent" in orders:
                    time.sleep(float(orders["silent"]))  # the whole loop stands still
                yield f"w{number}"
            return
        (stream,) = streams
        count = 0
        async for chunk in stream.chunks:
            assert chunk.sequence == count, f"{chunk.sequence} is not {count}"
            for tensor in chunk.tensors.values():
                assert tensor.sum().item() == 1000 * chunk.sequence
            await asyncio.sleep(pace)
            yield chunk.value
            count += 1
            if count == int(orders.get("most", -1)):
                return

    def _trouble(self, orders: dict[str, str], number: int, first: bool) -> None:
        if str(number) == orders.get("fail"):
            raise EngineError("broken by request")
        if first and str(number) == orders.get("retry"):
            raise EngineOutOfMemory("not this time")
        if first and str(number) == orders.get("die"):
            os._exit(9)

    async def _emit(self, emit: Emit, orders: dict[str, str], text: str, number: int) -> None:
        tensors = None
        if "tensors" in orders:
            import torch

            tensors = {"t": torch.full((1000,), number)}
        if "thread" in orders:
            await self.in_thread(lambda: emit.chunk("words", text, tensors))
        else:
            await emit.achunk("words", text, tensors)
        note("emitted", self.stage.stage_id, number)


class Painter(Engine):
    """Streams three previews of its picture, words about it, and a rising tone."""

    name = "painter"

    async def load(self) -> None:
        pass

    async def warmup(self) -> None:
        pass

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        import torch

        def picture(shade: int) -> dict[str, torch.Tensor]:
            return {"image": torch.full((4, 6, 3), shade, dtype=torch.uint8)}

        tone = torch.linspace(-1, 1, 1200)
        for number in range(3):
            await emit.achunk("image", tensors=picture(10 * number))
            emit.chunk("text", {"text": f"{number} "})
            await emit.achunk("audio", tensors={"audio": tone[400 * number : 400 * number + 400]})
        return StageOutput(
            values={"text": "0 1 2 "},
            tensors={"image": picture(200), "audio": {"audio": tone}},
        )

"""What engines share that make sound of codes."""

from __future__ import annotations

import abc
import asyncio
import threading
import time
from collections.abc import Iterator, Mapping

import torch

from omniq.engines.base import Emit, Engine, StageInput, StageOutput, StageRequest
from omniq.engines.inputs import codes_input, refuse_input


class Utterance(abc.ABC):
    """One utterance in progress.

    Attributes:
        cancel: set when nobody wants it any more.
        borrowed: seconds that others' turns on the model thread computed for it, less those that
            its own turns computed for others.
    """

    def __init__(self, groups: int) -> None:
        self.cancel = threading.Event()
        self.borrowed = 0.0
        self._groups = groups
        self.codes = torch.zeros((0, groups) if groups > 1 else 0, dtype=torch.int64)

    def push(self, codes: torch.Tensor) -> None:
        """Codes that have come: int64 [n], or [n, groups].

        Raises:
            InvalidRequest: they are something else.
        """
        wanted = "[n]" if self._groups == 1 else f"[n, {self._groups}]"
        if codes.shape[1:] != self.codes.shape[1:] or codes.is_floating_point() or not codes.ndim:
            refuse_input("codes", f"must be integers {wanted}, is {codes.dtype} {[*codes.shape]}")
        self.codes = torch.cat([self.codes, codes.to("cpu", torch.int64)])

    @abc.abstractmethod
    def sounds(self, *, ended: bool) -> Iterator[torch.Tensor] | None:
        """What can be heard now that could not before: float32 [samples] each, in order.

        Called on the loop and gone through on the model thread, while more codes may come. None:
        there is nothing to compute.
        """

    def close(self) -> None:
        """Nobody asks for more; what was kept for it goes."""
        self.cancel.set()


class VocoderEngine(Engine):
    """Speech codes to a waveform: the course of a request."""

    sample_rate: int
    silence: int
    """Samples of an answer without a word: a file of sound is never empty."""

    @abc.abstractmethod
    def utterance(self, request: StageRequest) -> Utterance:
        """A new one.

        Raises:
            InvalidRequest: a parameter is wrong.
        """

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Decode one utterance: by windows if it is streamed, else as a whole."""
        started = time.perf_counter()
        utterance = self.utterance(request)
        said: list[torch.Tensor] = []
        first = busy = 0.0

        async def say(*, ended: bool) -> None:
            nonlocal first
            sounds = utterance.sounds(ended=ended)
            if sounds is None:  # no turn on the model thread, which others keep busy
                return

            def compute() -> torch.Tensor | None:  # not how long it waits for others' windows
                nonlocal busy
                begun = time.perf_counter()
                try:
                    return next(sounds, None)
                finally:
                    busy += time.perf_counter() - begun

            while (sound := await self.in_thread(compute, cancel=utterance.cancel)) is not None:
                first = first or time.perf_counter() - started
                said.append(sound)
                if request.stream:
                    await emit.achunk("audio", tensors={"audio": sound})

        news = asyncio.Event()

        async def read() -> None:  # also while windows are computed
            async for codes in codes_input(inputs):
                utterance.push(codes)
                news.set()

        reading = asyncio.create_task(read())
        reading.add_done_callback(lambda _: news.set())
        try:
            read_all = False
            while not read_all:
                await news.wait()
                news.clear()
                read_all = reading.done()
                if request.stream:  # before the end is: its packets do not depend on the time
                    await say(ended=False)
            await reading
            await say(ended=True)
        finally:
            reading.cancel()
            utterance.close()
            await asyncio.gather(reading, return_exceptions=True)
        busy += utterance.borrowed
        audio = torch.cat(said) if said else torch.zeros(self.silence)
        length = sum(map(len, said)) / self.sample_rate
        metrics: dict[str, float | int] = {
            "audio_seconds": length,
            "first_packet_seconds": first,
            "decode_seconds": busy,
            "generation_seconds": time.perf_counter() - started,
        }
        if length:
            metrics["real_time_factor"] = busy / length
        return StageOutput(tensors={"audio": {"audio": audio}}, metrics=metrics)

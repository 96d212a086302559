"""Qwen3-Omni's code2wav: frames of codes to sound by a causal transformer and convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from omniq.engines.base import Cancelled, NullEmit, StageInput, StageRequest
from omniq.engines.faults import engine_faults
from omniq.engines.loading import check_engine_args, loading, part_folder, torch_dtype, whole_arg
from omniq.engines.omni.vocoder import Utterance, VocoderEngine
from omniq.engines.omni.weights import part_of
from omniq.engines.omni.windows import growing

#: Of ``chunked_decode`` in transformers, for what nobody streams.
WHOLE_FRAMES, CONTEXT_FRAMES = 300, 25
#: Windows of what is streamed: the first, and up to two seconds.
FIRST_FRAMES, WINDOW_FRAMES = 5, 25
#: Before a window on a GPU, where they cost nothing (docs/benchmarks/omni-gpu.md): all that one
#: layer of the published model sees.
GPU_CONTEXT_FRAMES = 72
SAMPLE_RATE = 24_000
WARMUP_FRAMES = 2


class Code2WavEngine(VocoderEngine):
    """Frames of codes to a waveform.

    Input ``codes``: int64 [n, groups], whole or by chunks. Output: tensor ``audio``, float32
    [samples] in -1..1 at 24 kHz.

    A request that nobody streams is decoded as ``chunked_decode`` of transformers does it: 300
    frames at once with the 25 before them. One that is streamed is decoded by windows with
    ``context_frames`` before them: the first of ``first_frames``, each twice as long as the one
    before, up to ``window_frames``. The convolutions give a few samples less than the frames are
    long; a window begins where the sound of the one before has ended, so that a stream lacks them
    once, at its end.

    Engine arguments: ``first_frames`` (5), ``window_frames`` (25), ``context_frames`` (25, on a GPU
    72).
    """

    name = "omni-code2wav"
    sample_rate = SAMPLE_RATE

    async def load(self) -> None:
        """Load the decoder.

        Raises:
            ConfigError: folder or engine arguments are wrong.
        """
        await self.in_thread(self._load)

    def _load(self) -> None:
        from transformers import Qwen3OmniMoeConfig  # noqa: PLC0415 - slow import
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (  # noqa: PLC0415
            Qwen3OmniMoeCode2Wav,
        )

        on_gpu = torch.device(self.device).type == "cuda"
        defaults = {
            "first_frames": FIRST_FRAMES,
            "window_frames": WINDOW_FRAMES,
            "context_frames": GPU_CONTEXT_FRAMES if on_gpu else CONTEXT_FRAMES,
        }
        check_engine_args(self.stage, defaults)
        args = {
            name: whole_arg(self.stage, name, value, least=int(name != "context_frames"))
            for name, value in defaults.items()
        }
        self.first, self.window = args["first_frames"], args["window_frames"]
        self.context = args["context_frames"]
        folder = part_folder(self.stage)
        with loading(self.stage, folder):
            config = Qwen3OmniMoeConfig.from_pretrained(folder).code2wav_config
            weights = part_of(folder, "code2wav.")
            dtype = torch_dtype(self.stage)
            if isinstance(dtype, str):  # the checkpoint's
                dtype = next(iter(weights.values())).dtype
            model = Qwen3OmniMoeCode2Wav._from_config(config).to(dtype).eval()
            model.load_state_dict(weights)
        with engine_faults(f"loading {folder}"):
            self._model: Any = model.to(self.device)
        self.groups = int(config.num_quantizers)
        self.silence = self.samples_a_frame = int(model.total_upsample)

    async def warmup(self) -> None:
        """Decode a few frames."""
        codes = torch.zeros(WARMUP_FRAMES, self.groups, dtype=torch.int64)
        inputs = {"codes": StageInput(tensors={"codes": codes})}
        await self.run(StageRequest("warmup", {}), inputs, NullEmit())

    async def unload(self) -> None:
        """Free the model."""
        await super().unload()
        self._model = None

    def utterance(self, request: StageRequest) -> Utterance:
        """See :class:`VocoderEngine`; there are no parameters."""
        return _Windows(self) if request.stream else _Whole(self)

    @torch.no_grad()
    def sound(self, codes: torch.Tensor) -> torch.Tensor:
        """float32 [samples] of frames [n, groups]; a few less than n times those of a frame."""
        with engine_faults(f"stage {self.stage.stage_id!r}"):
            made: torch.Tensor = self._model(codes.T[None].to(self.device))
            return made.reshape(-1).float().cpu()


class _Whole(Utterance):
    """As ``chunked_decode``: each chunk lacks its last samples."""

    def __init__(self, engine: Code2WavEngine) -> None:
        super().__init__(engine.groups)
        self._engine = engine

    def sounds(self, *, ended: bool) -> Iterator[torch.Tensor]:
        """See :class:`Utterance`."""
        for begin in range(0, len(self.codes) if ended else 0, WHOLE_FRAMES):
            if self.cancel.is_set():
                raise Cancelled("nobody wants this run's outcome")
            start = max(begin - CONTEXT_FRAMES, 0)
            sound = self._engine.sound(self.codes[start : begin + WHOLE_FRAMES])
            yield sound[(begin - start) * self._engine.samples_a_frame :].clone()


class _Windows(Utterance):
    """Windows that go on where the sound before them has ended."""

    def __init__(self, engine: Code2WavEngine) -> None:
        super().__init__(engine.groups)
        self._engine = engine
        self._begin = 0
        self._heard = 0
        self._lengths = growing(engine.first, engine.window)
        self._next = next(self._lengths)

    def sounds(self, *, ended: bool) -> Iterator[torch.Tensor] | None:
        """See :class:`Utterance`."""
        left = len(self.codes) - self._begin
        return self._said(ended) if left >= self._next or (ended and left) else None

    def _said(self, ended: bool) -> Iterator[torch.Tensor]:
        engine = self._engine
        while (left := len(self.codes) - self._begin) >= self._next or (ended and left):
            if self.cancel.is_set():
                raise Cancelled("nobody wants this run's outcome")
            # The frame before is looked at in any case: its last samples are still to be heard.
            start = max(self._begin - max(engine.context, 1), 0)
            self._begin, self._next = self._begin + min(left, self._next), next(self._lengths)
            sound = engine.sound(self.codes[start : self._begin])
            new = sound[self._heard - start * engine.samples_a_frame :].clone()
            self._heard += len(new)
            if len(new):
                yield new

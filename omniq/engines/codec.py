"""Decode engine of neural audio codecs: frames of codes to a waveform, as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from omniq.engines.base import (
    Cancelled,
    Emit,
    Engine,
    NullEmit,
    StageInput,
    StageOutput,
    StageRequest,
)
from omniq.engines.faults import engine_faults
from omniq.engines.inputs import codes_input
from omniq.engines.loading import check_engine_args, loading, part_folder, torch_dtype
from omniq.engines.mimi_stream import MimiStream
from omniq.errors import ConfigError, EngineError
from omniq.json_file import read_json

#: Where a speech model keeps its codec's weights, and what its configuration calls it.
PREFIX, CODEC_CONFIG = "codec_model.", "codec_config"
MIMI = "mimi"
WARMUP_FRAMES = 4


class CodecEngine(Engine):
    """Decodes the codes of a speech model with its codec (Mimi).

    Input ``codes``: int64 [frames, codebooks], whole or by chunks (``trigger: window``). Output
    ``audio``: float32 [samples], or [channels, samples] of a codec with several; for each chunk
    that comes, a chunk ``audio`` goes out at once. The chunks together are the whole, and equal
    what the codec's own ``decode`` makes of all codes but for rounding.

    The stage's ``model`` is a codec's folder, or that of a model with a codec in it, of which
    nothing else is loaded. Requests in flight take turns chunk by chunk.
    """

    name = "codec"

    async def load(self) -> None:
        """Load the codec.

        Raises:
            ConfigError: there is none in the folder, or it is none that can be decoded by chunks.
        """
        check_engine_args(self.stage, ())
        await self.in_thread(self._load)

    def _load(self) -> None:
        folder = part_folder(self.stage, ["config.json", "*.safetensors*"])
        with loading(self.stage, folder):
            codec = load_codec(folder, torch_dtype(self.stage))
        with engine_faults(f"loading {folder}"):
            self._codec: Any = codec.to(self.device).eval()

    async def warmup(self) -> None:
        """Decode a few frames of zeros."""
        codes = torch.zeros(WARMUP_FRAMES, self._codec.config.num_quantizers, dtype=torch.int64)
        inputs = {"codes": StageInput(tensors={"codes": codes})}
        await self.run(StageRequest("warmup", {}), inputs, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Decode; cancelled between chunks, and within one at its end."""
        started, first = time.perf_counter(), 0.0
        pieces: list[torch.Tensor] = []
        stream, cancel = MimiStream(self._codec), threading.Event()
        async for codes in codes_input(inputs):
            piece = await self.in_thread(self._piece, stream, codes, cancel, cancel=cancel)
            if not pieces:
                first = time.perf_counter() - started
            pieces.append(piece)
            await emit.achunk("audio", tensors={"audio": piece})
        if not pieces:
            raise EngineError("no codes came: the model ended before it said anything")
        audio = torch.cat(pieces, dim=-1)
        return StageOutput(
            tensors={"audio": {"audio": audio}},
            metrics={
                "frames": stream.frames,
                "audio_seconds": audio.shape[-1] / self._codec.config.sampling_rate,
                "first_audio_seconds": first,
                "decode_seconds": time.perf_counter() - started,
            },
        )

    def _piece(
        self, stream: MimiStream, codes: torch.Tensor, cancel: threading.Event
    ) -> torch.Tensor:
        if cancel.is_set():
            raise Cancelled
        with engine_faults(f"stage {self.stage.stage_id!r}"):
            samples = stream.push(codes).float().cpu()
        if not torch.isfinite(samples).all():
            raise EngineError("the decoded sound holds NaN or infinity")
        return samples[0] if len(samples) == 1 else samples

    async def unload(self) -> None:
        """Free the codec."""
        await super().unload()
        self._codec = None


def load_codec(folder: Path, dtype: torch.dtype | str) -> Any:
    """The codec in ``folder``, or in the speech model there, on the CPU.

    Raises:
        ConfigError: there is none, it is no Mimi, or weights are missing.
    """
    from transformers import MimiConfig, MimiModel  # noqa: PLC0415 - slow import

    config = read_json(folder / "config.json")
    if config.get("model_type") == MIMI:
        codec = MimiModel.from_pretrained(folder, dtype=dtype)
    else:
        found = config.get(CODEC_CONFIG)
        kind = found.get("model_type") if isinstance(found, dict) else None
        if kind != MIMI:
            raise ConfigError(
                f"{folder / 'config.json'}: {config.get('model_type')} with the codec {kind}; "
                f"allowed: {MIMI}, or a model with a {CODEC_CONFIG} of that type"
            )
        weights = _weights(folder)
        codec = MimiModel(MimiConfig.from_dict(found))
        missing = codec.load_state_dict(weights, strict=False).missing_keys
        if missing:
            raise ConfigError(f"{folder}: no weights {PREFIX}{missing[0]} of the codec")
        own = next(iter(weights.values())).dtype
        codec = codec.to(own if isinstance(dtype, str) else dtype)
    if not codec.config.use_causal_conv:
        raise ConfigError(f"{folder}: a codec that looks ahead cannot be decoded by chunks")
    return codec


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """The codec's weights out of all files of a model, by the codec's own names."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            names = [n for n in weights.keys() if n.startswith(PREFIX)]  # noqa: SIM118
            found |= {n.removeprefix(PREFIX): weights.get_tensor(n) for n in names}
    if not found:
        raise ConfigError(f"{folder}: no weights {PREFIX}* in *.safetensors")
    return found

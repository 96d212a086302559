"""Decode engine: latents to pixels with a diffusers AutoencoderKL."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

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
from omniq.engines.inputs import tensor_input
from omniq.engines.loading import check_engine_args, diffusers_dtype, loading, part_folder
from omniq.errors import ConfigError, EngineError, InvalidRequest

WARMUP_SIZE = 8


class AutoencoderEngine(Engine):
    """Decodes pictures with an ``AutoencoderKL``, pixel for pixel as its pipeline would.

    Input: ``latents`` [1, C, h, w] or [C, h, w], as a diffusers pipeline returns them for
    ``output_type="latent"``. Output: tensor ``image``, uint8 [H, W, 3].
    """

    name = "autoencoder"

    async def load(self) -> None:
        """Load the autoencoder.

        Raises:
            ConfigError: the folder holds no AutoencoderKL.
        """
        await self.in_thread(self._load)

    def _load(self) -> None:
        from diffusers import AutoencoderKL, AutoModel  # noqa: PLC0415 - slow import
        from diffusers.image_processor import VaeImageProcessor  # noqa: PLC0415

        check_engine_args(self.stage, ())
        patterns = [f"{self.stage.subfolder}/*"] if self.stage.subfolder else None
        folder = part_folder(self.stage, patterns)
        with loading(self.stage, folder):
            model = AutoModel.from_pretrained(
                str(folder), dtype=diffusers_dtype(self.stage, folder)
            )
        if not isinstance(model, AutoencoderKL):
            raise ConfigError(
                f"stage {self.stage.stage_id!r}: {folder} holds a {type(model).__name__}; "
                f"engine {self.name!r} decodes AutoencoderKL"
            )
        with engine_faults(f"loading {folder}"):
            self._vae: Any = model.to(self.device).eval()
        self._processor = VaeImageProcessor()

    async def warmup(self) -> None:
        """Decode a small empty latent."""
        latents = torch.zeros(1, self._vae.config.latent_channels, WARMUP_SIZE, WARMUP_SIZE)
        inputs = {"latents": StageInput(tensors={"latents": latents})}
        await self.run(StageRequest("warmup", {}), inputs, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Decode one picture; a decode that has begun runs to its end."""
        cancel = threading.Event()
        return await self.in_thread(self._decode, inputs, emit, cancel, cancel=cancel)

    async def unload(self) -> None:
        """Free the model."""
        await super().unload()
        self._vae = None

    @torch.no_grad()
    def _decode(
        self, inputs: Mapping[str, StageInput], emit: Emit, cancel: threading.Event
    ) -> StageOutput:
        with engine_faults(f"stage {self.stage.stage_id!r}"):
            latents = self._latents(inputs)
            started = time.perf_counter()
            sample = self._vae.decode(self._unscale(latents), return_dict=False)[0]
            if cancel.is_set():
                raise Cancelled
            if not torch.isfinite(sample).all():
                raise EngineError("the decoded picture holds NaN or infinity")
            pixels = self._processor.postprocess(sample, output_type="np")[0]
            # As VaeImageProcessor.numpy_to_pil rounds.
            image = torch.from_numpy((pixels * 255).round().astype("uint8"))
            emit.progress(1, 1)
            seconds = time.perf_counter() - started
            return StageOutput(
                tensors={"image": {"image": image}}, metrics={"decode_seconds": seconds}
            )

    def _latents(self, inputs: Mapping[str, StageInput]) -> torch.Tensor:
        given = tensor_input(inputs, "latents")
        latents = given.unsqueeze(0) if given.ndim == 3 else given
        channels = self._vae.config.latent_channels
        if latents.ndim != 4 or latents.shape[:2] != (1, channels) or 0 in latents.shape:
            raise InvalidRequest(
                f"stage input 'latents': must be [1, {channels}, h, w], is {list(given.shape)}"
            )
        return latents.to(self.device, self._vae.dtype)

    def _unscale(self, latents: torch.Tensor) -> torch.Tensor:
        """Undo the pipelines' ``(latents - shift_factor) * scaling_factor``."""
        config = self._vae.config
        latents = latents / config.scaling_factor
        return latents if config.shift_factor is None else latents + config.shift_factor

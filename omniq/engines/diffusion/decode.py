"""The decode part: latents to pixels with the pipeline's VAE."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from omniq.engines.base import Cancelled, Emit, StageInput, StageOutput, StageRequest
from omniq.engines.diffusion.loading import INDEX, read_index
from omniq.engines.diffusion.memory import MEMORY_ARGS, Weights
from omniq.engines.families import Family
from omniq.engines.faults import engine_faults
from omniq.engines.inputs import tensor_input
from omniq.engines.loading import check_engine_args, diffusers_dtype, loading, model_folder
from omniq.errors import ConfigError, EngineError, EngineOutOfMemory, InvalidRequest

if TYPE_CHECKING:
    from omniq.engines.base import Engine

WARMUP_SIZE = 8
#: Latent positions (h × w × frames) above which decoding is tiled by default: 2048² at factor 8.
TILED_ABOVE = 65_536


class Decoder:
    """Decodes as the pipeline's own end does, pixel for pixel.

    Input ``latents`` [n, C, h, w] or [C, h, w], for videos with frames behind C, as the DiT part
    hands them on. Output ``image``: uint8 [H, W, 3], or [n, H, W, 3] for several; or ``video``:
    uint8 [F, H, W, 3] or [n, F, H, W, 3].

    The stage's ``model`` is a pipeline folder, or with ``subfolder`` one of its parts; its family
    comes from the pipeline's index. Engine argument ``tiling``: ``auto`` (default) tiles what has
    more than 65,536 latent positions, and whatever ran out of memory untiled; or true, false.
    """

    def __init__(self, engine: Engine) -> None:
        from diffusers import AutoModel  # noqa: PLC0415 - slow import
        from diffusers.video_processor import VideoProcessor  # noqa: PLC0415

        self._engine, stage = engine, engine.stage
        args = check_engine_args(stage, MEMORY_ARGS | {"tiling"})
        self._tiling = args.get("tiling", "auto")
        if self._tiling not in ("auto", True, False):
            raise ConfigError(
                f"stage {stage.stage_id!r}: engine_args tiling: must be auto, true or false"
            )
        part = stage.subfolder or "vae"
        root = model_folder(stage, [INDEX, f"{part}/*"])
        folder = root / part
        if not folder.is_dir():
            raise ConfigError(f"stage {stage.stage_id!r}: no folder {folder}")
        self._family = read_index(root).family if (root / INDEX).is_file() else Family()
        with loading(stage, folder):
            model = AutoModel.from_pretrained(str(folder), dtype=diffusers_dtype(stage, folder))
        if not (hasattr(model, "decode") and hasattr(model, "encode")):
            raise ConfigError(
                f"stage {stage.stage_id!r}: {folder} holds a {type(model).__name__}; "
                f"engine {engine.name!r} decodes with autoencoders"
            )
        self.vae: Any = model.eval()
        self.weights = Weights(stage, engine.device, {"vae": model})
        config = self.vae.config
        self._channels = int(config.get("latent_channels") or config.get("z_dim") or 0)
        #: Whether latents have a frame axis.
        self._frames = "latent_channels" not in config
        self._processor = VideoProcessor()

    def close(self) -> None:
        """Remove what lies outside this process."""
        self.weights.close()

    def example(self) -> tuple[dict[str, Any], dict[str, StageInput]]:
        """Parameters and inputs to warm up with."""
        frames = (1,) if self._frames else ()
        latents = torch.zeros(1, self._channels, *frames, WARMUP_SIZE, WARMUP_SIZE)
        return {}, {"latents": StageInput(tensors={"latents": latents})}

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Decode; a decode that has begun runs to its end."""
        cancel = threading.Event()
        exact = bool(request.params.get("deterministic"))
        return await self._engine.in_thread(self._run, inputs, exact, emit, cancel, cancel=cancel)

    @torch.no_grad()
    def _run(
        self, inputs: Mapping[str, StageInput], exact: bool, emit: Emit, cancel: threading.Event
    ) -> StageOutput:
        with engine_faults(f"stage {self._engine.stage.stage_id!r}"):
            latents = self._latents(inputs)
            started = time.perf_counter()
            shots = []
            for i in range(len(latents)):
                if cancel.is_set():
                    raise Cancelled
                shots.append(self._decode(latents[i : i + 1], exact=exact))
                emit.progress(i + 1, len(latents))
            name = "video" if shots[0].ndim == 4 else "image"
            pixels = shots[0] if len(shots) == 1 else torch.stack(shots)
            seconds = time.perf_counter() - started
            return StageOutput(tensors={name: {name: pixels}}, metrics={"decode_seconds": seconds})

    def _decode(self, latents: torch.Tensor, *, exact: bool) -> torch.Tensor:
        """Pixels uint8 [H, W, 3] or [F, H, W, 3] of one latent.

        ``exact``: whether it is tiled does not depend on the memory that is free now.
        """
        large = latents[0, 0].numel() > TILED_ABOVE
        tiled = self._tiling is True or (self._tiling == "auto" and large)
        try:
            sample = self._sample(latents, tiled=tiled)
        except EngineOutOfMemory:
            if tiled or exact or self._tiling is False:
                raise
            sample = self._sample(latents, tiled=True)
        if not torch.isfinite(sample).all():
            raise EngineError("the decoded picture holds NaN or infinity")
        if sample.ndim == 5:
            pixels = self._processor.postprocess_video(sample, output_type="np")[0]
        else:
            pixels = self._processor.postprocess(sample, output_type="np")[0]
        # As VaeImageProcessor.numpy_to_pil rounds.
        return torch.from_numpy((pixels * 255).round().astype("uint8"))

    def _sample(self, latents: torch.Tensor, *, tiled: bool) -> torch.Tensor:
        with engine_faults("decoding tiled" if tiled else "decoding"):
            if tiled:
                self.vae.enable_tiling()
            try:
                return self._family.decode(self.vae, latents)
            finally:
                if tiled:
                    self.vae.disable_tiling()

    def _latents(self, inputs: Mapping[str, StageInput]) -> torch.Tensor:
        given = tensor_input(inputs, "latents")
        axes = 5 if self._frames else 4
        latents = given.unsqueeze(0) if given.ndim == axes - 1 else given
        wrong = latents.ndim != axes or latents.shape[1] != self._channels or 0 in latents.shape
        if wrong:
            form = f"n, {self._channels}, " + ("frames, h, w" if self._frames else "h, w")
            raise InvalidRequest(f"stage input 'latents': must be [{form}], is {list(given.shape)}")
        return latents.to(self._engine.device)

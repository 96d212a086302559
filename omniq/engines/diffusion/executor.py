"""DiffusersPipelineExecutor: any diffusers pipeline as stages encode, DiT and decode."""

from __future__ import annotations

from collections.abc import Mapping

from omniq.config import EngineType
from omniq.engines.base import Emit, Engine, NullEmit, StageInput, StageOutput, StageRequest
from omniq.engines.diffusion.decode import Decoder
from omniq.engines.diffusion.denoise import Denoiser
from omniq.engines.diffusion.encode import Encoder
from omniq.errors import ConfigError

Part = Encoder | Denoiser | Decoder


class DiffusersPipelineExecutor(Engine):
    """One part of a stock diffusers pipeline; the stage's engine type says which.

    ``encode``: input ``prompt``, and ``image`` where the family's encoder looks at pictures;
    output ``condition``. ``DiT``: input ``condition``, or ``prompt_embeds`` of another stage, and
    ``image``, ``latents`` where wanted; output ``latents``. ``decode``: input ``latents``; output
    ``image``, or ``video``. Staged results equal the whole pipeline's on the same weights and seed.
    """

    name = "diffusers"

    async def load(self) -> None:
        """Load only this part's components.

        Raises:
            ConfigError: the folder is no diffusers pipeline, or the stage asks for what this
                engine cannot do.
        """
        parts: dict[EngineType, type[Encoder] | type[Denoiser] | type[Decoder]] = {
            EngineType.ENCODE: Encoder,
            EngineType.DIT: Denoiser,
            EngineType.DECODE: Decoder,
        }
        if (kind := parts.get(self.stage.engine_type)) is None:
            raise ConfigError(
                f"stage {self.stage.stage_id!r}: engine {self.name!r} is of type "
                f"{', '.join(parts)}, not {self.stage.engine_type}"
            )
        self.part: Part | None = await self.in_thread(kind, self)

    async def warmup(self) -> None:
        """Run once on made-up input."""
        params, inputs = self._loaded.example()
        await self.run(StageRequest("warmup", params), inputs, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Serve one request."""
        return await self._loaded.run(request, inputs, emit)

    async def unload(self) -> None:
        """Free the model."""
        await super().unload()
        self.part = None

    @property
    def _loaded(self) -> Part:
        assert self.part is not None, "the engine is loaded"
        return self.part

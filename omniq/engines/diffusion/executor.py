"""DiffusersPipelineExecutor: any diffusers pipeline as stages encode, DiT and decode."""

from __future__ import annotations

import gc
from collections.abc import Mapping

from omniq.config import EngineType
from omniq.engines.base import Emit, Engine, NullEmit, StageInput, StageOutput, StageRequest
from omniq.engines.diffusion.decode import Decoder
from omniq.engines.diffusion.denoise import Denoiser
from omniq.engines.diffusion.encode import Encoder
from omniq.engines.diffusion.sleeper import Sleeper
from omniq.errors import ConfigError

Part = Encoder | Denoiser | Decoder


class DiffusersPipelineExecutor(Engine):
    """One part of a stock diffusers pipeline; the stage's engine type says which.

    ``encode``: input ``prompt``, and ``image`` where the family's encoder looks at pictures;
    output ``condition``. ``DiT``: input ``condition``, or ``prompt_embeds`` of another stage, and
    ``image``, ``latents`` where wanted; output ``latents``. ``decode``: input ``latents``; output
    ``image``, or ``video``. Staged results equal the whole pipeline's on the same weights and seed.

    Engine arguments of all three are those of
    :class:`~omniq.engines.diffusion.memory.MemoryArgs`.
    """

    name = "diffusers"
    part: Part | None = None

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
        part: Part = await self.in_thread(kind, self)
        self.part, self._sleeper = part, Sleeper(self, part.weights)

    async def warmup(self) -> None:
        """Run once on made-up input."""
        params, inputs = self._loaded.example()
        await self.run(StageRequest("warmup", params), inputs, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Serve one request; a stage that sleeps wakes for it."""
        async with self._sleeper.awake() as seconds:
            output = await self._loaded.run(request, inputs, emit)
        if seconds:
            output.metrics["wake_seconds"] = seconds
        return output

    async def sleep(self) -> bool:
        """Move the weights to the CPU until :meth:`wake` or the next request.

        Returns:
            Whether it sleeps; not while requests are in flight.

        Raises:
            EngineOutOfMemory: the machine's memory has no room for the weights.
        """
        return await self._sleeper.sleep()

    async def wake(self) -> float:
        """Move the weights back; the seconds that it took, 0 if they were there.

        Raises:
            EngineOutOfMemory: the device has no room for them now.
        """
        return await self._sleeper.wake()

    async def unload(self) -> None:
        """Free the model."""
        if self.part is not None:
            await self._sleeper.close()
        await super().unload()
        if self.part is not None:
            self.part.close()
            del self._sleeper  # it holds the weights
        self.part = None
        # Modules and their hooks refer to each other: without this the device's memory would be
        # free only when the collector comes by.
        gc.collect()

    @property
    def _loaded(self) -> Part:
        assert self.part is not None, "the engine is loaded"
        return self.part

"""DiT engine: the denoising loop of a stock diffusers pipeline, without encoders and decoder."""

from __future__ import annotations

import copy
import inspect
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from omniq.config import DiTConfig
from omniq.engines.base import (
    Cancelled,
    Emit,
    Engine,
    NullEmit,
    StageInput,
    StageOutput,
    StageRequest,
)
from omniq.engines.families import family_of
from omniq.engines.faults import engine_faults
from omniq.engines.inputs import tensor_input
from omniq.engines.loading import check_engine_args, diffusers_dtype, loading, part_folder
from omniq.errors import ConfigError, EngineError, InvalidRequest

RESIDENT = ("transformer", "transformer_2", "scheduler")
# All a DiT stage needs of a model on a hub: not the encoders, of the VAE only its geometry.
FILES = (
    "model_index.json", "transformer/*", "transformer_2/*", "scheduler/*", "vae/config.json",
)  # fmt: skip
PASSED_ON = ("height", "width", "num_inference_steps", "guidance_scale")
WARMUP_TOKENS = 8


class DiffusersPipelineExecutor(Engine):
    """Denoises with only transformer(s) and scheduler resident.

    Inputs: ``prompt_embeds`` and optionally ``negative_prompt_embeds``, tensors [tokens, dim] or
    [1, tokens, dim], any float dtype. Output: tensor ``latents`` [1, C, h, w] on the CPU, in the
    dtype the pipeline computes latents in, scaled as the pipeline leaves them.

    The initial noise comes from a CPU generator per request, so that a seed means the same on every
    device and beside any other request. Whole requests run one after the other on the model thread,
    in the order they came; a cancelled one stops after the denoise step that is running.
    """

    name = "diffusers"

    async def load(self) -> None:
        """Load the transformer and the scheduler.

        Raises:
            ConfigError: the folder is no diffusers pipeline, or the stage asks for what this engine
                cannot do.
        """
        await self.in_thread(self._load)

    def _load(self) -> None:
        from diffusers import DiffusionPipeline  # noqa: PLC0415 - slow import

        check_engine_args(self.stage, ())
        self._dit = self.stage.dit or DiTConfig()
        if self._dit.cache.method != "none":
            raise ConfigError(
                f"stage {self.stage.stage_id!r}: engine {self.name!r} has no cache "
                f"{self._dit.cache.method!r}; allowed: none"
            )
        folder = part_folder(self.stage, FILES)
        index = _read_json(folder / "model_index.json")
        self._family = family_of(str(index.get("_class_name")))
        # Absent components are named None one by one: left out, pipelines load or refuse them.
        components: dict[str, Any] = {
            name: None
            for name, value in index.items()
            if isinstance(value, list) and name not in RESIDENT
        }
        if "transformer" not in index:
            raise ConfigError(f"{folder} is no pipeline with a transformer: {', '.join(index)}")
        if "vae" in components:
            components["vae"] = _vae_without_weights(folder, index["vae"])
        dtype = diffusers_dtype(self.stage, folder / "transformer")
        with loading(self.stage, folder):
            pipeline: Any = DiffusionPipeline.from_pretrained(
                str(folder), dtype=dtype, **components
            )
        if "vae" in components:
            pipeline.vae = None  # its geometry is in the pipeline's own attributes now
        pipeline.set_progress_bar_config(disable=True)
        with engine_faults(f"loading {folder}"):
            for component in pipeline.components.values():
                if isinstance(component, torch.nn.Module):
                    component.to(self.device).eval()
        self._pipeline = pipeline
        self._scheduler = pipeline.scheduler
        self._signature = inspect.signature(pipeline.__call__).parameters
        self._embed_dim = self._family.embed_dim(pipeline.transformer.config)

    async def warmup(self) -> None:
        """Denoise a picture of the default size for one step."""
        params = {**self.stage.defaults, "num_inference_steps": 1, "seed": 0}
        embeds = StageInput(tensors={"embeds": torch.zeros(WARMUP_TOKENS, self._embed_dim or 1)})
        inputs = {"prompt_embeds": embeds, "negative_prompt_embeds": embeds}
        await self.run(StageRequest("warmup", params), inputs, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Denoise one picture."""
        cancel = threading.Event()
        return await self.in_thread(
            self._denoise, request.params, inputs, emit, cancel, cancel=cancel
        )

    async def unload(self) -> None:
        """Free the model."""
        await super().unload()
        self._pipeline = None

    def _denoise(
        self,
        params: Mapping[str, Any],
        inputs: Mapping[str, StageInput],
        emit: Emit,
        cancel: threading.Event,
    ) -> StageOutput:
        pipeline = self._pipeline
        with engine_faults(f"stage {self.stage.stage_id!r}"):
            arguments = {k: params[k] for k in PASSED_ON if params.get(k) is not None}
            guidance = arguments.get("guidance_scale", self._default_guidance())
            conditions = self._conditions(inputs, guidance)
            steps = _Steps(emit, cancel)
            # Schedulers keep state over the steps, and an aborted run leaves it half way.
            pipeline.scheduler = copy.deepcopy(self._scheduler)
            started = time.perf_counter()
            try:
                latents = pipeline(
                    **arguments,
                    **conditions,
                    generator=_generator(params.get("seed")),
                    output_type="latent",
                    return_dict=False,
                    callback_on_step_end=steps,
                )[0]
            except ValueError as exc:
                if steps.done:
                    raise
                # Pipelines check their arguments before the first step, and say what is wrong.
                raise InvalidRequest(str(exc)) from exc
            finally:
                # A run that ends by an exception leaves hook state to the next one otherwise.
                pipeline.maybe_free_model_hooks()
            latents = self._family.latents(pipeline, latents, arguments).cpu()
            if not torch.isfinite(latents).all():
                raise EngineError(f"the latents hold NaN or infinity after {steps.done} steps")
            return StageOutput(
                tensors={"latents": {"latents": latents}},
                metrics={
                    "steps": steps.done,
                    "denoise_seconds": time.perf_counter() - started,
                },
            )

    def _default_guidance(self) -> float:
        parameter = self._signature.get("guidance_scale")
        return float(parameter.default) if parameter is not None else 0.0

    def _conditions(self, inputs: Mapping[str, StageInput], guidance: float) -> dict[str, Any]:
        prompt = self._embeds(inputs, "prompt_embeds")
        negative = None
        if self._family.needs_negative(guidance):
            if "negative_prompt_embeds" in inputs:
                negative = self._embeds(inputs, "negative_prompt_embeds")
            elif self._dit.null_condition == "zeros":
                negative = torch.zeros_like(prompt[:1])
            else:
                raise InvalidRequest(
                    f"guidance_scale {guidance:g} needs negative_prompt_embeds: no stage sends "
                    "them, and the stage's dit.null_condition is 'none'",
                    fields=[{"field": "parameters.guidance_scale", "message": "must be 0"}],
                )
        return self._family.conditions(prompt, negative)

    def _embeds(self, inputs: Mapping[str, StageInput], name: str) -> torch.Tensor:
        """Input ``name`` as [tokens, dim] in the transformer's dtype, on its device."""
        given = tensor_input(inputs, name)
        embeds = given[0] if given.ndim == 3 and given.shape[0] == 1 else given
        dim = self._embed_dim or embeds.shape[-1]
        if embeds.ndim != 2 or embeds.shape[0] == 0 or embeds.shape[1] != dim:
            raise InvalidRequest(
                f"stage input {name!r}: must be [tokens, {dim}] or [1, tokens, {dim}], "
                f"is {list(given.shape)}"
            )
        return embeds.to(self.device, self._pipeline.transformer.dtype)


class _Steps:
    """Pipeline callback: counts and reports steps, and stops a cancelled request."""

    def __init__(self, emit: Emit, cancel: threading.Event) -> None:
        self._emit, self._cancel = emit, cancel
        self.done = 0

    def __call__(
        self, pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]
    ) -> dict[str, Any]:
        self.done = step + 1
        if self._cancel.is_set():
            raise Cancelled
        self._emit.progress(self.done, int(pipeline.num_timesteps))
        return {}


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator("cpu")
    if seed is None:
        generator.seed()
        return generator
    return generator.manual_seed(seed)


def _vae_without_weights(folder: Path, entry: list[str | None]) -> Any:
    """The pipeline's VAE on the meta device: its whole geometry in no memory.

    Pipelines read scale factor and channel count from ``vae`` in ``__init__`` and silently assume
    8 without one.
    """
    import diffusers  # noqa: PLC0415 - slow import, already loaded here

    config = _read_json(folder / "vae" / "config.json")
    name = str(entry[1] or config.get("_class_name"))
    if not hasattr(diffusers, name):
        raise ConfigError(f"{folder / 'model_index.json'}: diffusers has no VAE class {name!r}")
    with torch.device("meta"):
        return getattr(diffusers, name).from_config(config)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return found

"""The DiT part: requests become jobs of the denoising loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from omniq.config import DiTConfig, Modality
from omniq.engines.base import Cancelled, Emit, StageInput, StageOutput, StageRequest
from omniq.engines.diffusion.acceleration import ACCELERATION_ARGS, accelerate, quantization
from omniq.engines.diffusion.arguments import call_arguments, named_scheduler, refuse
from omniq.engines.diffusion.cache import DiTCacheManager
from omniq.engines.diffusion.devices import OneDevice
from omniq.engines.diffusion.inputs import black_picture, condition_input
from omniq.engines.diffusion.loading import load_pipeline, pipeline_folder, read_index
from omniq.engines.diffusion.loop import DenoiseJob, DenoiseLoop
from omniq.engines.diffusion.memory import MEMORY_ARGS, Weights, component_modules
from omniq.engines.diffusion.parallel import ARGUMENT, Parallel
from omniq.engines.diffusion.pipeline_run import PipelineRun, Preview, Progress
from omniq.engines.diffusion.preview import MOST as MOST_PREVIEWS
from omniq.engines.diffusion.preview import Previewer
from omniq.engines.diffusion.ranks import Group
from omniq.engines.diffusion.runner import Lora, OmniDiffusionModelRunner
from omniq.engines.diffusion.scheduler import Ticket, create_scheduler
from omniq.engines.diffusion.session import TRANSFORMERS
from omniq.engines.diffusion.step_times import StepTimes
from omniq.engines.diffusion.tasks import Task, Tasks
from omniq.engines.families.base import NEGATIVE
from omniq.engines.inputs import refuse_input, tensor_input
from omniq.engines.loading import check_engine_args, loading
from omniq.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from omniq.engines.base import Engine

#: What pipelines take (Z-Image) that name no default size.
FALLBACK_SIZE = 1024


class Denoiser:
    """Denoises with only transformer(s) and scheduler resident; the VAE too if pictures come in.

    Inputs: ``condition`` of an encode stage, or ``prompt_embeds`` [tokens, dim] of any other stage
    (and the family's further tensors by name, each with an optional ``negative_`` twin); ``image``
    and ``mask_image`` (uint8 [H, W, 3]; white is made anew) where the stage's input modalities have
    images; ``latents`` to start from.
    Output: ``latents`` [n, C, h, w] or [n, C, f, h, w] on the CPU, as the pipeline computes them.

    The pipeline's own ``__call__`` runs for every request; requests in flight share transformer
    forwards step by step (:mod:`omniq.engines.diffusion.loop`). The initial noise comes from a CPU
    generator per picture, so that a seed means the same on every device and beside any others.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, stage = engine, engine.stage
        check_engine_args(stage, MEMORY_ARGS | ACCELERATION_ARGS | {ARGUMENT})
        self._parallel = parallel = Parallel.of(stage)
        self._config = stage.dit or DiTConfig()
        self._index = read_index(pipeline_folder(stage, (*TRANSFORMERS, "scheduler", "vae")))
        folder = self._index.folder
        self.family = self._index.family
        if "transformer" not in self._index.components:
            names = ", ".join(self._index.components)
            raise ConfigError(f"{folder} is no pipeline with a transformer: {names}")
        pictures = Modality.IMAGE in stage.input_modalities
        with_vae = pictures or self.family.denoises_with_vae
        resident = {*TRANSFORMERS, "scheduler", *(["vae"] if with_vae else [])}
        self.pipeline = load_pipeline(
            stage, self._index, resident.__contains__, "cpu", quantization(stage)
        )
        self._tasks = Tasks(self.pipeline, self.family, pictures=pictures)
        self._embed_dim = self.family.embed_dim(self.pipeline.transformer.config)
        self._load_loras()
        models = [m for n in TRANSFORMERS if (m := getattr(self.pipeline, n, None)) is not None]
        accelerate(stage, models)
        self.cache = DiTCacheManager(self._config.cache, self.family)
        self.cache.install(models)
        self.weights = Weights(
            stage, engine.device, component_modules(self.pipeline), in_blocks=TRANSFORMERS
        )
        self._fitting = asyncio.Lock()
        self._previewer = self._fit_previews() if self._config.preview_every else None
        batching = self._config.batching
        rows = batching.max_rows
        if parallel is not None:
            parallel.check(stage, engine.device, models, self.family)
            # Text that is padded to share a forward needs a mask, which split attention does not
            # take: a row for each branch.
            rows = parallel.cfg_degree if parallel.splits else rows
        times = StepTimes(rows, always=batching.when == "always")
        scheduler = create_scheduler(batching.scheduler, times)
        # Last: what is started here is ended by close().
        self._group = (
            Group(stage, parallel, engine.device, models, self.cache) if parallel else None
        )
        self.runner = OmniDiffusionModelRunner(
            self.family,
            times,
            self._group or OneDevice(self.cache),
            self._use_lora,
            rows_decide=self.cache.decides_by_rows,
        )
        self.loop = DenoiseLoop(engine._executor, scheduler, self.runner)

    def close(self) -> None:
        """End what lives outside this process; the engine's thread has stopped."""
        if self._group is not None:
            self._group.close()
        self.weights.close()

    def example(self) -> tuple[dict[str, Any], dict[str, StageInput]]:
        """Parameters and inputs to warm up with: one step of the default size."""
        params = {**self._engine.stage.defaults, "num_inference_steps": 1, "seed": 0}
        params.pop("sigmas", None)
        tensors = self.family.example(self.pipeline.transformer.config)
        tensors |= {NEGATIVE + n: t for n, t in tensors.items() if n not in self.family.beside}
        tensors |= self.family.example_tokens(self.pipeline, _size(self.pipeline, params, {}))
        inputs = {"condition": StageInput(tensors=tensors)}
        if not self._tasks.text:
            inputs["image"] = black_picture(params.get("height", 64), params.get("width", 64))
        return params, inputs

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Denoise one request's pictures or video; its pictures are jobs of their own."""
        if self._preview_every(request.params) and self._previewer is None:
            async with self._fitting:
                if self._previewer is None:
                    fitted = self.loop.between(self._fit_previews)
                    self._previewer = await asyncio.wrap_future(fitted)
        jobs = self._jobs(request, inputs, emit)
        self.loop.submit(jobs)
        ended = [asyncio.wrap_future(job.outcome) for job in jobs]
        together = asyncio.gather(*ended)
        together.add_done_callback(_retrieved)  # a shield that is cancelled forgets what it covers
        try:
            outputs = await asyncio.shield(together)
        except BaseException as exc:
            stopping = exc if isinstance(exc, Exception) else Cancelled()
            for job in jobs:
                job.stopping = job.stopping or stopping
            # A cancelled request must not compute beside the next one.
            while not all(f.done() for f in ended):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait(ended)
            for future in ended:
                future.exception()  # retrieved: one outcome stands for all
            raise
        return _joined(outputs)

    def _jobs(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> list[DenoiseJob]:
        """One job for each picture; wrong requests are refused here."""
        params = request.params
        task, pictures = self._tasks.pick(inputs)
        pipeline, accepted = task.pipeline, task.accepted
        arguments = call_arguments(params, pipeline, accepted, self.family)
        arguments |= self._condition(inputs, arguments, accepted)
        arguments |= self.family.pictures(pipeline, pictures, arguments)
        scheduler = named_scheduler(params.get("scheduler"), self.pipeline.scheduler)
        lora = self._lora(params.get("lora") or {})
        deterministic = bool(params.get("deterministic"))
        cached = not deterministic and self._cached(params, arguments)
        count = int(params.get("num_images_per_prompt") or 1)
        total = int(
            arguments.get("num_inference_steps") or _default(accepted, "num_inference_steps")
        )
        size = self.family.picture_size(pipeline, arguments) or _size(pipeline, arguments, accepted)
        self.family.check(pipeline, arguments, size)
        progress = Progress(emit, count)
        every = self._preview_every(params)
        every = every and max(every, math.ceil(total * count / MOST_PREVIEWS))
        jobs = []
        for i in range(count):
            name = f"{request.request_id}/{i}"
            ticket = Ticket(name, request.priority, request.deadline, steps_total=total)
            seed = params.get("seed")
            run = PipelineRun(
                family=self.family,
                pipeline=pipeline,
                scheduler=scheduler,
                arguments={**arguments, **self._latents(inputs, (i, count), task, size, arguments)},
                accepted=accepted,
                seed=None if seed is None else (int(seed) + i) % 2**63,
                size=size,
                ticket=ticket,
                progress=progress,
                preview=self._preview(pipeline, emit, size, i, every),
                pairs=self._pairs(alone=cached or deterministic),
            )
            jobs.append(DenoiseJob(ticket, run, lora, cached, deterministic))
        return jobs

    def _pairs(self, *, alone: bool) -> bool:
        """Whether the two calls of a guided step go out together."""
        if self._parallel is None:
            return not alone
        # One to each branch, where there are two.
        return self._parallel.cfg_degree > 1 or not (alone or self._parallel.splits)

    def _cached(self, params: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
        if not self.cache.enabled or params.get("use_cache") is False:
            return False
        steps = arguments.get("num_inference_steps")
        config = self._config.cache
        return config.method != "magcache" or steps == config.num_inference_steps

    # -- conditions ---------------------------------------------------------------------------

    def _condition(
        self,
        inputs: Mapping[str, StageInput],
        arguments: Mapping[str, Any],
        accepted: Mapping[str, Any],
    ) -> dict[str, Any]:
        found = condition_input(inputs, self.family, self._embed_dim)
        positive = {n: t for n, t in found.items() if not n.startswith(NEGATIVE)}
        negative = {n: t for n, t in found.items() if n.startswith(NEGATIVE)}
        needed = self.family.needed(self.pipeline.transformer.config)
        missing = [n for n in needed if n not in positive and n in accepted]
        if missing:
            refuse_input(missing[0], f"missing; {self._index.class_name} needs it")
        scale = accepted.get(self.family.cfg_argument)
        default = float(scale.default) if scale is not None and scale.default else 0.0
        if not self.family.needs_negative(arguments, default):
            negative = {}
        elif not negative:
            negative = self._null(positive, arguments)
        dtype = self.pipeline.transformer.dtype
        given = {
            n: t.to(self._engine.device, dtype if t.is_floating_point() else t.dtype)
            for n, t in {**positive, **negative}.items()
        }
        return self.family.arguments(given)

    def _null(
        self, positive: Mapping[str, torch.Tensor], arguments: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """The negative condition of a request that brings none."""
        if self._config.null_condition == "zeros":
            twinned = {n: t for n, t in positive.items() if n not in self.family.beside}
            return {NEGATIVE + n: t for n, t in self.family.null(twinned).items()}
        if self.family.empty_negative is None and self.family.cfg_argument not in arguments:
            return {}  # the pipeline guides only with a negative prompt, and none was asked for
        name = self.family.cfg_argument
        scale = arguments.get(name, "by default above")
        raise InvalidRequest(
            f"{name} {scale} needs negative_prompt_embeds: no stage sends them, "
            "and the stage's dit.null_condition is 'none'",
            fields=[
                {
                    "field": "parameters.guidance_scale",
                    "message": "no negative condition is there: guidance must be off",
                }
            ],
        )

    def _latents(
        self,
        inputs: Mapping[str, StageInput],
        which: tuple[int, int],
        task: Task,
        size: tuple[int, int],
        arguments: Mapping[str, Any],
    ) -> dict[str, torch.Tensor]:
        """Latents to start from, if the request brings any: [n, ...], one for each picture.

        ``which``: the picture's number, and how many there are.
        """
        if "latents" not in inputs:
            return {}
        given = tensor_input(inputs, "latents")
        i, count = which
        if given.ndim not in (4, 5) or len(given) != count:
            refuse_input(
                "latents",
                f"must be [n, C, h, w] or [n, C, f, h, w] with n = {count}, the pictures to be "
                f"made; is {list(given.shape)}",
            )
        frames = arguments.get("num_frames") or _default(task.accepted, "num_frames") or 1
        form = self.family.latent_form(task.pipeline, size, int(frames))
        if form is not None and tuple(given.shape[1:]) != form:
            wanted = ", ".join(map(str, form))
            refuse_input(
                "latents",
                f"must be [n, {wanted}] for {size[0]} x {size[1]} pixels (height x width), "
                f"is {list(given.shape)}",
            )
        one = given[i : i + 1].to(self._engine.device)
        dtype = self.pipeline.transformer.dtype
        if not torch.isfinite(one.to(dtype)).all():
            refuse_input("latents", f"must be finite, holds NaN or infinity as {dtype}")
        return {"latents": self.family.to_pipeline(self.pipeline, one)}

    # -- LoRA, previews ------------------------------------------------------------------------

    def _load_loras(self) -> None:
        for name, path in self._config.loras.items():
            with loading(self._engine.stage, self._index.folder):
                self.pipeline.load_lora_weights(path, adapter_name=name)
        if self._config.loras:
            self.pipeline.disable_lora()

    def _lora(self, given: Mapping[str, float]) -> Lora:
        if unknown := sorted(set(given) - set(self._config.loras)):
            allowed = ", ".join(self._config.loras) or "none"
            refuse({"lora": f"this stage has no LoRA {unknown[0]!r}; allowed: {allowed}"})
        return tuple(sorted((n, float(w)) for n, w in given.items() if w))

    def _use_lora(self, lora: Lora) -> None:
        if not lora:
            self.pipeline.disable_lora()
            return
        self.pipeline.enable_lora()
        self.pipeline.set_adapters([n for n, _ in lora], [w for _, w in lora])

    def _preview_every(self, params: Mapping[str, Any]) -> int:
        """Steps between a request's previews; 0: none."""
        asked = params.get("preview_every")
        return self._config.preview_every if asked is None else int(asked)

    def _fit_previews(self) -> Previewer:
        """Blocking; for the model thread.

        Raises:
            InvalidRequest: the model has no VAE.
        """
        if "vae" not in self._index.components:
            refuse({"preview_every": f"must be 0: {self._index.class_name} has no VAE to look by"})
        vae = getattr(self.pipeline, "vae", None)
        if vae is None:  # loaded for the fit only
            only = load_pipeline(
                self._engine.stage, self._index, lambda n: n == "vae", self._engine.device
            )
            vae = only.vae
        return Previewer(vae, self._engine.device)

    def _preview(
        self, pipeline: Any, emit: Emit, size: tuple[int, int], i: int, every: int
    ) -> Preview | None:
        """What sends previews of picture ``i``; None if there are none."""
        previewer = self._previewer
        if previewer is None or not every:
            return None

        def show(step: int, latents: torch.Tensor) -> None:
            if step % every == 0:
                plain = self.family.latents(pipeline, latents, size)
                emit.preview({"image": i, **previewer.message(plain, step)})

        return show


def _size(
    pipeline: Any, arguments: Mapping[str, Any], accepted: Mapping[str, Any]
) -> tuple[int, int]:
    """Height and width in pixels of what the pipeline will make."""
    side = getattr(pipeline, "default_sample_size", None)
    default = side * pipeline.vae_scale_factor if side else None
    height, width = (
        arguments.get(name) or _default(accepted, name) or default or FALLBACK_SIZE
        for name in ("height", "width")
    )
    return int(height), int(width)


def _default(accepted: Mapping[str, Any], name: str) -> Any:
    parameter = accepted.get(name)
    return None if parameter is None else parameter.default


def _retrieved(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _joined(outputs: Sequence[StageOutput]) -> StageOutput:
    """The pictures of one request as one output."""
    if len(outputs) == 1:
        return outputs[0]
    latents = torch.cat([o.tensors["latents"]["latents"] for o in outputs])
    metrics: dict[str, float | int] = {
        name: sum(o.metrics[name] for o in outputs) for name in outputs[0].metrics
    }
    metrics["denoise_seconds"] = max(o.metrics["denoise_seconds"] for o in outputs)
    if "cache_hit_ratio" in metrics:
        metrics["cache_hit_ratio"] /= len(outputs)
    return StageOutput(tensors={"latents": {"latents": latents}}, metrics=metrics)

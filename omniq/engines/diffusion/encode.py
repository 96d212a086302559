"""The encode part: prompts to condition tensors, remembered."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections import OrderedDict
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from omniq.engines.base import Emit, StageInput, StageOutput, StageRequest
from omniq.engines.diffusion.inputs import CONDITION, black_picture, image_input
from omniq.engines.diffusion.loading import (
    ModelIndex,
    load_pipeline,
    pipeline_folder,
    read_index,
)
from omniq.engines.diffusion.memory import MEMORY_ARGS, Weights, component_modules
from omniq.engines.families.base import NEGATIVE
from omniq.engines.faults import engine_faults
from omniq.engines.inputs import text_input
from omniq.engines.loading import check_engine_args
from omniq.errors import ConfigError, EngineError, InvalidRequest
from omniq.json_file import read_json

if TYPE_CHECKING:
    from omniq.engines.base import Engine

PARTS = (
    "text_encoder*",
    "tokenizer*",
    "image_encoder",
    "*processor",
    "scheduler",
    "transformer/config.json",
)
NOT_LOADED = ("transformer", "transformer_2", "vae", "unet")
REMEMBERED = 256
WARMUP_PICTURE = 64


class Prompts:
    """Which prompts of a request are encoded, and how long.

    Args:
        index: the model's.
        pipeline: the stock pipeline, for the defaults of its ``__call__``.
    """

    def __init__(self, index: ModelIndex, pipeline: Any) -> None:
        call = inspect.signature(pipeline.__call__).parameters
        self._family = index.family
        scale = call.get(self._family.cfg_argument)
        self._default_scale = float(scale.default) if scale and scale.default else 0.0
        # ``encode_prompt`` has another default, which no run of the pipeline ever uses.
        tokens = call.get("max_sequence_length")
        self._most_tokens = None if tokens is None else tokens.default
        file = index.folder / "transformer" / "config.json"
        self._config = read_json(file) if file.is_file() else {}

    def negative(self, params: Mapping[str, Any]) -> str | None:
        """The negative prompt, if guidance evaluates one."""
        guidance = self._family.guidance(params, self._config)
        negative: str | None = params.get("negative_prompt", self._family.empty_negative)
        needed = self._family.needs_negative(guidance, self._default_scale)
        return negative if needed else None

    def most_tokens(self, params: Mapping[str, Any]) -> int | None:
        """``max_sequence_length``; None: the pipeline has no such argument."""
        return params.get("max_sequence_length") or self._most_tokens


class Encoder:
    """Runs the pipeline's ``encode_prompt``.

    Input ``prompt`` (text), and ``image`` (uint8 [H, W, 3]) for families whose encoder looks at
    it. Output ``condition``: tensors by the pipeline's argument names, without batch axis:
    ``prompt_embeds`` [tokens, dim] and what else the family has, each with a ``negative_`` twin
    when the request's guidance needs one.

    Engine argument ``remember``: how many encoded prompts are kept, by prompt, pictures and
    options (default 256; 0: none).
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, stage = engine, engine.stage
        args = check_engine_args(stage, MEMORY_ARGS | {"remember"})
        self._most = int(args.get("remember", REMEMBERED))
        self._index = read_index(pipeline_folder(stage, PARTS))
        self._family = self._index.family
        if absent := [p for p in self._family.packages if find_spec(p) is None]:
            raise ConfigError(
                f"stage {stage.stage_id!r}: {self._index.class_name} needs {', '.join(absent)}, "
                "which is not installed",
                hint="the extra omniq[diffusion] brings it",
            )
        if not any(n.startswith("text_encoder") for n in self._index.components):
            raise ConfigError(f"{self._index.folder} is no pipeline with a text encoder")
        self._pipeline = load_pipeline(
            stage,
            self._index,
            lambda name: name not in (*NOT_LOADED, *self._family.elsewhere),
            "cpu",
        )
        self.weights = Weights(stage, engine.device, component_modules(self._pipeline))
        self._looks = self._family.sees_pictures(self._pipeline)
        self._prompts = Prompts(self._index, self._pipeline)
        self._kept: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()

    def close(self) -> None:
        """Remove what lies outside this process."""
        self.weights.close()

    def example(self) -> tuple[dict[str, Any], dict[str, StageInput]]:
        """Parameters and inputs to warm up with."""
        inputs = {"prompt": StageInput("a")}
        if self._looks:
            inputs["image"] = black_picture(WARMUP_PICTURE, WARMUP_PICTURE)
        return dict(self._engine.stage.defaults), inputs

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Encode one prompt; an encoding that has begun runs to its end."""
        return await self._engine.in_thread(self._run, request.params, inputs)

    @torch.no_grad()
    def _run(self, params: Mapping[str, Any], inputs: Mapping[str, StageInput]) -> StageOutput:
        with engine_faults(f"stage {self._engine.stage.stage_id!r}"):
            prompt = text_input(inputs, "prompt")
            images = image_input(inputs) if self._looks else []
            if self._looks and not images:
                raise InvalidRequest(
                    "stage input 'image': missing; this model's encoder looks at a picture",
                    fields=[{"field": "input.image", "message": "required, but missing"}],
                )
            options = {
                "device": torch.device(self._engine.device),
                "max_sequence_length": self._prompts.most_tokens(params),
            }
            started = time.perf_counter()
            condition, hits = self._encode(prompt, images, options)
            negative = self._prompts.negative(params)
            if negative is not None:
                made, more = self._encode(negative, images, options)
                twins = {NEGATIVE + n: t for n, t in made.items() if n not in self._family.beside}
                condition = {**condition, **twins}
                hits += more
            return StageOutput(
                tensors={CONDITION: condition},
                metrics={
                    "encode_seconds": time.perf_counter() - started,
                    "remembered_prompts": hits,
                },
            )

    def _encode(
        self, prompt: str, images: list[Any], options: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Condition on the CPU, and whether (1) it was remembered (else 0)."""
        key = _key(prompt, images, options)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept, 1
        accepted = _parameters(self._pipeline.encode_prompt)
        known = {n: v for n, v in options.items() if n in accepted and v is not None}
        made = self._family.encode(self._pipeline, prompt, images, known)
        condition = {name: tensor.cpu() for name, tensor in made.items()}
        for name, tensor in condition.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise EngineError(f"the encoded prompt holds NaN or infinity in {name}")
        if self._most:
            self._kept[key] = condition
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return condition, 0


def _parameters(function: Any) -> Mapping[str, Any]:
    return inspect.signature(function).parameters


def _key(prompt: str, images: list[Any], options: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(repr((prompt, sorted(options.items(), key=str))).encode())
    for image in images:
        digest.update(repr(image.size).encode() + image.tobytes())
    return digest.hexdigest()

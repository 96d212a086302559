"""Diffusion models with random weights made on the device, and the same request bare and by omniq.

Time and memory do not depend on the weights' values. Nothing is read from files, and there is no
text encoder: requests bring random prompt embeds of several lengths.
"""

from __future__ import annotations

import asyncio
import copy
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omniq.config import OmniStageConfig
from omniq.engines.base import NullEmit, StageInput, StageRequest
from omniq.engines.diffusion import denoise
from omniq.engines.diffusion.executor import DiffusersPipelineExecutor

#: Tokens of the prompts, in turn.
TEXT_TOKENS = (40, 64, 96, 50, 80, 33, 71, 120)


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a model is; ``layers`` and ``heads`` None: the published model's.

    ``head``: width of an attention head. ``text``: width of the prompt embeds.
    """

    name: str
    layers: int | None = None
    heads: int | None = None
    head: int = 128
    text: int | None = None


class BareModel:
    """A pipeline without encoder and decoder, and stages of omniq around it.

    Args:
        shape: which model; ``z_image`` (6 billion weights) or ``qwen_image`` (20 billion) in full.
        device: ``cpu`` or ``cuda:0``.
        dtype: of the transformer.
    """

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.name = device, dtype, shape.name
        # One for all requests, as in a worker: a new one for each costs milliseconds.
        self._loop = asyncio.new_event_loop()
        torch.manual_seed(0)
        self.pipeline, self.width = _BUILDERS[shape.name](shape, device, dtype)
        self.pipeline.vae = None
        self.pipeline.set_progress_bar_config(disable=True)
        self._guidance = {"guidance_scale": 0.0 if shape.name == "z_image" else 1.0}

    @property
    def parameters(self) -> int:
        """Weights of the transformer."""
        return sum(p.numel() for p in self.pipeline.transformer.parameters())

    def engine(self, dit: dict[str, Any]) -> Any:
        """A loaded DiT stage on the same weights, with modules of its own for its cache hooks."""
        own = copy.copy(self.pipeline)
        weights = {id(p): p for p in self.pipeline.transformer.parameters()}
        own.__dict__["transformer"] = copy.deepcopy(self.pipeline.transformer, weights)
        index = {n: ["diffusers", "X"] for n in own.components}
        index["_class_name"] = type(own).__name__
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "model_index.json").write_text(json.dumps(index))
            stage = OmniStageConfig.model_validate(
                {"stage_id": "dit", "engine_type": "DiT", "model": folder, "dit": dit}
            )
            load, denoise.load_pipeline = denoise.load_pipeline, lambda *_: own
            try:
                engine = DiffusersPipelineExecutor(stage, self.device)
                self._loop.run_until_complete(engine.load())
            finally:
                denoise.load_pipeline = load
        return engine

    def embeds(self, i: int, tokens: int | None = None) -> torch.Tensor:
        """The prompt of request ``i``, [tokens, width]."""
        generator = torch.Generator().manual_seed(i)
        count = tokens or TEXT_TOKENS[i % len(TEXT_TOKENS)]
        return torch.randn(count, self.width, generator=generator).to(self.dtype)

    @torch.no_grad()
    def bare(self, size: int, steps: int, i: int = 0) -> torch.Tensor:
        """Latents of request ``i`` by the stock pipeline, on the CPU, in the stage's form."""
        embeds = self.embeds(i).to(self.device)
        z_image = self.name == "z_image"
        more = self._guidance if z_image else {"true_cfg_scale": 1.0}
        latents = self.pipeline(
            prompt_embeds=[embeds] if z_image else embeds[None],
            height=size,
            width=size,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(i),
            output_type="latent",
            return_dict=False,
            **({"negative_prompt_embeds": None} if z_image else {}),
            **more,
        )[0]
        if not z_image:
            latents = self.pipeline._unpack_latents(
                latents, size, size, self.pipeline.vae_scale_factor
            )
        return latents.cpu()

    def ask(
        self,
        engine: Any,
        size: int,
        steps: int,
        requests: Sequence[int] = (0,),
        *,
        tokens: int | None = None,
        **params: Any,
    ) -> list[Any]:
        """Outputs of the stage for requests that come at once; latents are on the CPU."""

        async def one(i: int) -> Any:
            given = {
                "height": size, "width": size, "num_inference_steps": steps, "seed": i,
                **self._guidance, **params,
            }  # fmt: skip
            inputs = {"prompt_embeds": StageInput(tensors={"e": self.embeds(i, tokens)})}
            return await engine.run(StageRequest(f"r{i}", given), inputs, NullEmit())

        async def together() -> list[Any]:
            return list(await asyncio.gather(*map(one, requests)))

        return self._loop.run_until_complete(together())


def save(shape: Shape, folder: Path, device: str, dtype: torch.dtype) -> int:
    """Write a pipeline of transformer and scheduler to ``folder``, for processes of their own.

    Made on ``device`` and removed from it; returns the width of the prompt embeds.
    """
    torch.manual_seed(0)
    pipeline, width = _BUILDERS[shape.name](shape, device, dtype)
    index: dict[str, Any] = {"_class_name": type(pipeline).__name__}
    for name, part in pipeline.components.items():
        index[name] = ["diffusers", type(part).__name__] if part is not None else [None, None]
    (folder / "model_index.json").write_text(json.dumps(index))
    pipeline.transformer.save_pretrained(folder / "transformer")
    pipeline.scheduler.save_pretrained(folder / "scheduler")
    pipeline.vae.save_config(folder / "vae")
    del pipeline
    if device != "cpu":
        torch.cuda.empty_cache()
    return width


def latents_of(output: Any) -> torch.Tensor:
    """The latents of a stage's output."""
    latents: torch.Tensor = output.tensors["latents"]["latents"]
    return latents


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest value of ``b``."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def _on(device: str, dtype: torch.dtype, made: type, **config: Any) -> Any:
    """A model with the initial weights of its own ``__init__``, made on the device."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return made(**config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(default)


def _z_image(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Any, int]:
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        ZImagePipeline,
        ZImageTransformer2DModel,
    )

    heads, text = shape.heads or 30, shape.text or 2560
    transformer = _on(
        device, dtype, ZImageTransformer2DModel,
        n_layers=shape.layers or 30, n_heads=heads, n_kv_heads=heads, dim=shape.head * heads,
        cap_feat_dim=text,
        axes_dims=[shape.head // 4, shape.head * 3 // 8, shape.head * 3 // 8],
    )  # fmt: skip
    with torch.device("meta"):
        vae = AutoencoderKL(block_out_channels=(32, 32, 32, 32), latent_channels=16, **_BLOCKS)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return ZImagePipeline(scheduler, vae, None, None, transformer), text


_BLOCKS = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}


def _qwen_image(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Any, int]:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    text = shape.text or 3584
    transformer = _on(
        device, dtype, QwenImageTransformer2DModel,
        num_layers=shape.layers or 60, num_attention_heads=shape.heads or 24,
        attention_head_dim=shape.head, joint_attention_dim=text,
        axes_dims_rope=(shape.head // 8, shape.head * 7 // 16, shape.head * 7 // 16),
    )  # fmt: skip
    with torch.device("meta"):
        vae = AutoencoderKLQwenImage()
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return QwenImagePipeline(scheduler, vae, None, None, transformer), text


_BUILDERS = {"z_image": _z_image, "qwen_image": _qwen_image}
MODELS = tuple(_BUILDERS)

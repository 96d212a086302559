"""Denoising: bare diffusers against omniq's DiT stage, alone and with many requests in flight.

A Qwen-Image transformer of full width with random weights (time and memory do not depend on their
values). Every case runs in turn, ``--repeats`` times, in one process; medians are printed.

    python benchmarks/dit_steps.py --device cuda:0 --layers 60 --sizes 512 1024 --steps 20
    python benchmarks/dit_steps.py --layers 2 --width 2 --sizes 128 --steps 8   # on a CPU
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from omniq.config import OmniStageConfig
from omniq.engines.base import NullEmit, StageInput, StageRequest
from omniq.engines.diffusion import denoise
from omniq.engines.diffusion.executor import DiffusersPipelineExecutor

TEXT_WIDTH = 3584
TEXT_TOKENS = (40, 64, 96, 50, 80, 33, 71, 120)


def build(args: argparse.Namespace) -> Any:
    """The pipeline: transformer and scheduler, no encoder, the VAE's geometry only."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    torch.manual_seed(0)
    torch.set_default_dtype(args.dtype)
    with torch.device(args.device):
        transformer = QwenImageTransformer2DModel(
            num_layers=args.layers, num_attention_heads=args.width, joint_attention_dim=TEXT_WIDTH
        ).eval()
    torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        vae = AutoencoderKLQwenImage()
    pipeline = QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        transformer=transformer,
    )
    pipeline.vae = None
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def engine_for(pipeline: Any, folder: Path, device: str, dit: dict[str, Any]) -> Any:
    """The DiT stage around this very pipeline object."""
    names = {n: ["diffusers", "X"] for n in pipeline.components}
    index = {"_class_name": "QwenImagePipeline", **names}
    (folder / "model_index.json").write_text(json.dumps(index))
    stage = OmniStageConfig.model_validate(
        {"stage_id": "dit", "engine_type": "DiT", "model": str(folder), "dit": dit}
    )
    denoise.load_pipeline = lambda *_: pipeline
    engine = DiffusersPipelineExecutor(stage, device)
    asyncio.run(engine.load())
    return engine


def embeds(i: int, args: argparse.Namespace) -> torch.Tensor:
    generator = torch.Generator().manual_seed(i)
    tokens = TEXT_TOKENS[i % len(TEXT_TOKENS)]
    return torch.randn(tokens, TEXT_WIDTH, generator=generator).to(args.dtype)


def bare(pipeline: Any, size: int, i: int, args: argparse.Namespace) -> torch.Tensor:
    """One request by the stock pipeline."""
    latents: torch.Tensor = pipeline(
        prompt_embeds=embeds(i, args)[None].to(args.device),
        height=size,
        width=size,
        num_inference_steps=args.steps,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(i),
        output_type="latent",
        return_dict=False,
    )[0]
    return latents.cpu()


async def one(engine: Any, size: int, i: int, args: argparse.Namespace) -> torch.Tensor:
    params = {
        "height": size, "width": size, "num_inference_steps": args.steps, "seed": i,
        "guidance_scale": 1.0,
    }  # fmt: skip
    inputs = {"prompt_embeds": StageInput(tensors={"e": embeds(i, args)})}
    out = await engine.run(StageRequest(f"r{i}", params), inputs, NullEmit())
    latents: torch.Tensor = out.tensors["latents"]["latents"]
    return latents


async def many(engine: Any, size: int, n: int, args: argparse.Namespace) -> list[torch.Tensor]:
    return list(await asyncio.gather(*[one(engine, size, i, args) for i in range(n)]))


def timed(run: Callable[[], Any], seconds: list[float]) -> Any:
    started = time.perf_counter()
    made = run()
    seconds.append(time.perf_counter() - started)
    return made


def report(pipeline: Any, engines: dict[str, Any], size: int, args: argparse.Namespace) -> None:
    """One table row a case: seconds, throughput against bare, largest difference."""
    runs: dict[str, tuple[int, Callable[[], Any]]] = {
        "bare diffusers": (1, lambda: [bare(pipeline, size, 0, args)]),
        "omniq alone": (1, lambda: asyncio.run(many(engines["always"], size, 1, args))),
    }
    for n in args.batches:
        run = lambda n=n: asyncio.run(many(engines["always"], size, n, args))  # noqa: E731
        runs[f"omniq {n} at once, always"] = (n, run)
    most = max(args.batches)
    runs[f"omniq {most} at once, pays"] = (
        most,
        lambda: asyncio.run(many(engines["pays"], size, most, args)),
    )
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    differences: dict[str, float] = {}
    with torch.no_grad():
        expected = {i: bare(pipeline, size, i, args).float() for i in range(most)}
    family = engines["always"].part.family
    for repeat in range(args.repeats + 1):
        for name, (_, run) in runs.items():
            made = timed(run, seconds[name])
            if repeat == 0:
                seconds[name].clear()  # warm-up
            for i, got in enumerate(made):
                whole = expected[i] if got.ndim == 3 else family.latents(
                    pipeline, expected[i], (size, size)
                )  # fmt: skip
                spread = float((got.float() - whole).abs().max() / whole.abs().max())
                differences[name] = max(differences.get(name, 0.0), spread)
    base = statistics.median(seconds["bare diffusers"])
    print(f"\n{size} x {size}, {args.steps} steps, {args.layers} layers, {args.dtype}")
    print("| case | seconds | requests/s against bare | relative difference |")
    print("|---|---|---|---|")
    for name, (n, _) in runs.items():
        median = statistics.median(seconds[name])
        print(f"| {name} | {median:.3f} | {n * base / median:.3f} | {differences[name]:.1e} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=24, help="attention heads of 128")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    args.dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    pipeline = build(args)
    with tempfile.TemporaryDirectory() as name:
        engines = {
            when: engine_for(pipeline, Path(name), args.device, {"batching": {"when": when}})
            for when in ("always", "pays")
        }
        for size in args.sizes:
            report(pipeline, engines, size, args)
            if args.device.startswith("cuda"):
                print(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()

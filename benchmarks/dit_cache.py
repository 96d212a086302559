"""A cache on tiny-omni's trained weights: speed and PSNR against the uncached run.

Cases take turns within each repeat, all in one process; speeds are ratios of medians.

    python benchmarks/dit_cache.py --steps 30 --repeats 5
    python benchmarks/dit_cache.py --method cache_dit --thresholds 1e-9 0.1 0.2
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

import torch

from omniq.config import get_pipeline
from omniq.config.stage import DiTConfig, OmniStageConfig
from omniq.engines import create_engine
from omniq.engines.base import NullEmit, StageInput, StageOutput, StageRequest

PROMPTS = (
    "a red circle",
    "a blue square above a green star",
    "a yellow triangle left of a red square",
    "a green circle",
)


def loaded(stage: OmniStageConfig) -> Any:
    engine = create_engine(stage)
    asyncio.run(engine.load())
    return engine


def ask(engine: Any, params: dict[str, Any], **inputs: StageInput) -> StageOutput:
    made: StageOutput = asyncio.run(engine.run(StageRequest("r", params), inputs, NullEmit()))
    return made


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of pixels 0 to 255, in dB."""
    return float(10 * torch.log10(255**2 / ((a - b) ** 2).mean().clamp_min(1e-9)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=("first_block", "cache_dit"), default="first_block")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--thresholds", type=float, nargs="+", default=[1e-9, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3]
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    ar, dit, decode = get_pipeline("tiny-omni").stages
    writer, decoder = loaded(ar), loaded(decode)
    texts = [
        ask(writer, {**ar.defaults, "seed": i}, prompt=StageInput(prompt))
        for i, prompt in enumerate(PROMPTS)
    ]
    embeds = [t.tensors["hidden_states"] for t in texts]

    def engine(cache: dict[str, Any]) -> Any:
        config = DiTConfig.model_validate({"null_condition": "zeros", "cache": cache})
        return loaded(dit.model_copy(update={"dit": config}))

    engines = {0.0: engine({})} | {
        t: engine({"method": args.method, "threshold": t, "first_blocks": 1})
        for t in args.thresholds
    }
    seconds: dict[float, list[float]] = {t: [] for t in engines}
    pictures: dict[float, list[torch.Tensor]] = {}
    hits: dict[float, list[float]] = {}
    for repeat in range(args.repeats + 1):
        for threshold, one in engines.items():
            pictures[threshold], hits[threshold] = [], []
            for i, condition in enumerate(embeds):
                params = {**dit.defaults, "num_inference_steps": args.steps, "seed": i}
                out = ask(one, params, prompt_embeds=StageInput(tensors=condition))
                if repeat:  # the first round warms up
                    seconds[threshold].append(float(out.metrics["denoise_seconds"]))
                hits[threshold].append(float(out.metrics.get("cache_hit_ratio", 0.0)))
                latents = StageInput(tensors=out.tensors["latents"])
                image = ask(decoder, {}, latents=latents).tensors["image"]["image"]
                pictures[threshold].append(image.float())
    base = statistics.median(seconds[0.0])
    print(f"{args.method}, {args.steps} steps, {len(PROMPTS)} prompts, {args.repeats} repeats")
    print("| threshold | hit ratio | speed against uncached | PSNR, lowest to highest (dB) |")
    print("|---|---|---|---|")
    for threshold in args.thresholds:
        quality = [psnr(a, b) for a, b in zip(pictures[0.0], pictures[threshold], strict=True)]
        speed = base / statistics.median(seconds[threshold])
        print(
            f"| {threshold:g} | {statistics.mean(hits[threshold]):.2f} | {speed:.2f} "
            f"| {min(quality):.1f} to {max(quality):.1f} |"
        )


if __name__ == "__main__":
    main()

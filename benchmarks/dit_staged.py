"""What stages over Celery add to one request: ``OmniLLM`` against the whole pipeline in one call.

Three stages (encode, denoise, decode) of tiny-omni's weights in three worker processes, against
stock ``pipe(prompt)`` with the same prompt and seed in this process; both take turns, every prompt
is new, and the pictures must be equal. One thread for each process.

    python benchmarks/dit_staged.py --steps 20 --rounds 30
"""

from __future__ import annotations

import json
import os
from pathlib import Path

# Before torch and omniq are imported, here and in the workers.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMNIQ_PIPELINES"] = json.dumps([str(Path(__file__).with_suffix(".yaml"))])

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

import omniq
from omniq import OmniLLM

MODEL = Path(omniq.__file__).parent / "models" / "tiny_omni"
SIDE = 64


def bare(pipeline: Any, prompt: str, seed: int, steps: int) -> np.ndarray:
    image = pipeline(
        prompt=prompt, height=SIDE, width=SIDE, num_inference_steps=steps, guidance_scale=0.0,
        generator=torch.Generator().manual_seed(seed),
    ).images[0]  # fmt: skip
    return np.asarray(image)


def staged(llm: OmniLLM, prompt: str, seed: int, steps: int) -> tuple[np.ndarray, Any]:
    (output,) = llm.generate(
        prompt, height=SIDE, width=SIDE, num_inference_steps=steps, guidance_scale=0.0, seed=seed
    )
    return np.asarray(output.images[0].convert("RGB")), output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(str(MODEL), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    whole, parts, stages = [], [], []
    with OmniLLM("staged") as llm:
        for i in range(-3, args.rounds):  # three to warm up
            prompt = f"a red circle above a blue square, number {i}"
            started = time.perf_counter()
            expected = bare(pipeline, prompt, i + 3, args.steps)
            middle = time.perf_counter()
            got, output = staged(llm, prompt, i + 3, args.steps)
            ended = time.perf_counter()
            if not (got == expected).all():
                raise SystemExit(f"round {i}: the pictures differ")
            if i >= 0:
                whole.append(middle - started)
                parts.append(ended - middle)
                stages.append(
                    sum((s.finished or 0) - (s.started or 0) for s in output.stages.values())
                )
    added = [1000 * (b - a) for a, b in zip(whole, parts, strict=True)]
    low, _, high = statistics.quantiles(added, n=4)
    print(f"{args.rounds} rounds of one request, {args.steps} steps at {SIDE} x {SIDE}")
    print("| | median ms |\n|---|---|")
    print(f"| whole pipeline | {1000 * statistics.median(whole):.1f} |")
    print(f"| three stages | {1000 * statistics.median(parts):.1f} |")
    print(f"| of these within stages | {1000 * statistics.median(stages):.1f} |")
    print(f"| added | {statistics.median(added):.1f} (quartiles {low:.1f} to {high:.1f}) |")


if __name__ == "__main__":
    main()

"""What stages over Celery add to one request: ``OmniLLM`` against the whole pipeline in one call.

Three stages (encode, denoise, decode) of tiny-omni's weights in three worker processes, against
stock ``pipe(prompt)`` with the same prompt and seed in this process; both take turns, every prompt
is new, and the pictures must be equal. One thread for each process. Both are also compared part by
part: a stage's time is that of its run as recorded (fetching inputs, engine, storing outputs); its
engine's own is the metric. The pipeline's parts are its ``encode_prompt``, its VAE's ``decode`` and
what is left, which is the denoising and the few numpy lines that make the picture.

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
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import omniq
from omniq import OmniLLM

MODEL = Path(omniq.__file__).parent / "models" / "tiny_omni"
SIDE = 64


class Timed:
    """A callable that adds up how long it takes; ``spent``: seconds since it was last zeroed."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.spent = call, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return self.call(*args, **kwargs)
        finally:
            self.spent += time.perf_counter() - started


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
    encode = pipeline.encode_prompt = Timed(pipeline.encode_prompt)
    decode = pipeline.vae.decode = Timed(pipeline.vae.decode)
    whole, parts, stages = [], [], []
    by_part: dict[str, list[tuple[float, ...]]] = {"encode": [], "denoise": [], "decode": []}
    with OmniLLM("staged") as llm:
        for i in range(-3, args.rounds):  # three to warm up
            prompt = f"a red circle above a blue square, number {i}"
            encode.spent = decode.spent = 0.0
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
                records = [output.stages[name] for name in ("encode", "dit", "decode")]
                runs = [(r.finished or 0.0) - (r.started or 0.0) for r in records]
                stages.append(sum(runs))
                own = (encode.spent, middle - started - encode.spent - decode.spent, decode.spent)
                for (name, rows), record, of_pipe, run in zip(
                    by_part.items(), records, own, runs, strict=True
                ):
                    rows.append((of_pipe, float(record.metrics[f"{name}_seconds"]), run))
    added = [1000 * (b - a) for a, b in zip(whole, parts, strict=True)]
    low, _, high = statistics.quantiles(added, n=4)
    print(f"{args.rounds} rounds of one request, {args.steps} steps at {SIDE} x {SIDE}")
    print("| | median ms |\n|---|---|")
    print(f"| whole pipeline | {1000 * statistics.median(whole):.1f} |")
    print(f"| three stages | {1000 * statistics.median(parts):.1f} |")
    print(f"| of these within stages | {1000 * statistics.median(stages):.1f} |")
    print(f"| added | {statistics.median(added):.1f} (quartiles {low:.1f} to {high:.1f}) |")
    print("\n| median ms | whole pipeline | engine | stage |\n|---|---|---|---|")
    for name, rows in by_part.items():
        medians = [f"{1000 * statistics.median(column):.1f}" for column in zip(*rows, strict=True)]
        print(f"| {name} | {' | '.join(medians)} |")


if __name__ == "__main__":
    main()

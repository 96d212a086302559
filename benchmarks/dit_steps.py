"""Denoising: bare diffusers against omniq's DiT stage, alone and with many requests in flight.

A Qwen-Image transformer with random weights. Every case runs in turn, ``--repeats`` times, in one
process; medians are printed, and for one request alone the median of each pair's ratio.

    python benchmarks/dit_steps.py --layers 4 --heads 4 --sizes 128 256 --steps 12 --repeats 7
    python benchmarks/dit_steps.py --device cuda:0 --sizes 512 1024 --steps 20
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from dit_models import MODELS, BareModel, Shape, difference, latents_of


def timed(run: Callable[[], Any], seconds: list[float]) -> Any:
    started = time.perf_counter()
    made = run()
    seconds.append(time.perf_counter() - started)
    return made


def report(model: BareModel, engines: dict[str, Any], size: int, args: argparse.Namespace) -> None:
    """One table row a case: seconds, throughput against bare, largest difference."""
    steps, most = args.steps, max(args.batches)

    def ask(when: str, n: int) -> Callable[[], list[torch.Tensor]]:
        return lambda: [latents_of(m) for m in model.ask(engines[when], size, steps, range(n))]

    runs: dict[str, tuple[int, Callable[[], list[torch.Tensor]]]] = {
        "bare diffusers": (1, lambda: [model.bare(size, steps)]),
        "omniq alone": (1, ask("always", 1)),
        **{f"omniq {n} at once, always": (n, ask("always", n)) for n in args.batches},
        f"omniq {most} at once, pays": (most, ask("pays", most)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    differences: dict[str, float] = {}
    expected = [model.bare(size, steps, i) for i in range(most)]
    for repeat in range(args.repeats + 1):
        for name, (_, run) in runs.items():
            made = timed(run, seconds[name])
            if repeat == 0:
                seconds[name].clear()  # warm-up
            spread = max(difference(a, b) for a, b in zip(made, expected, strict=False))
            differences[name] = max(differences.get(name, 0.0), spread)
    base = statistics.median(seconds["bare diffusers"])
    pairs = zip(seconds["bare diffusers"], seconds["omniq alone"], strict=True)
    print(f"\n{size} x {size}, {steps} steps, {model.parameters / 1e6:.0f}M weights, {model.dtype}")
    print(f"alone against bare, median of {args.repeats} pairs:", end=" ")
    print(f"{statistics.median(a / b for a, b in pairs):.3f}")
    print("| case | seconds | requests/s against bare | relative difference |")
    print("|---|---|---|---|")
    for name, (n, _) in runs.items():
        median = statistics.median(seconds[name])
        print(f"| {name} | {median:.3f} | {n * base / median:.3f} | {differences[name]:.1e} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen_image")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--heads", type=int, help="attention heads of 128; fewer than it has")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    model = BareModel(Shape(args.model, args.layers, args.heads), args.device, dtype)
    engines = {when: model.engine({"batching": {"when": when}}) for when in ("always", "pays")}
    for size in args.sizes:
        report(model, engines, size, args)
        if args.device.startswith("cuda"):
            print(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()

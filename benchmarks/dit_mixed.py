"""Mixed open-loop load on the DiT stage, against serial diffusers and waves of equal requests.

A Z-Image transformer with random weights, small enough for batching to pay on a CPU: a table says
first how much it does. Prompts of three lengths, pictures of two sizes, 4 to 30 steps; requests
come at ``--load`` times what serial diffusers can serve, at the same moments for all. One thread.

- serial: the stock pipeline, one request at a time, in the order in which they came;
- waves: the stock pipeline on all that wait with the oldest's size and steps, 8 at most;
- omniq: the DiT stage, all in flight at once; by default, and all of them ``deterministic``.

Latency counts from the moment of arrival. Short requests have up to 8 steps.

    python benchmarks/dit_mixed.py --requests 48 --load 2 --rounds 2
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import percentile
from dit_models import BareModel, Shape

from omniq.engines.base import NullEmit, StageInput, StageRequest

TOKENS, SIZES, STEPS = (8, 40, 72), (64, 96), (4, 8, 15, 30)
SHORT = 8
WIDTH = 128
WAVE = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; ``at``: seconds after the start."""

    number: int
    at: float
    tokens: int
    size: int
    steps: int

    @property
    def embeds(self) -> torch.Tensor:
        """Its prompt, [tokens, width]."""
        generator = torch.Generator().manual_seed(self.number)
        return torch.randn(self.tokens, WIDTH, generator=generator)


def load(count: int, rate: float) -> list[Ask]:
    """Poisson arrivals, ``rate`` a second."""
    draw = random.Random(0)
    at, made = 0.0, []
    for i in range(count):
        at += draw.expovariate(rate)
        made.append(Ask(i, at, draw.choice(TOKENS), draw.choice(SIZES), draw.choice(STEPS)))
    return made


@torch.no_grad()
def bare(pipeline: Any, asks: list[Ask]) -> None:
    """One call of the stock pipeline for requests of one size and step count."""
    pipeline(
        prompt_embeds=[a.embeds for a in asks], negative_prompt_embeds=None, guidance_scale=0.0,
        height=asks[0].size, width=asks[0].size, num_inference_steps=asks[0].steps,
        generator=[torch.Generator().manual_seed(a.number) for a in asks], output_type="latent",
    )  # fmt: skip


def queued(
    pipeline: Any, asks: list[Ask], joins: Callable[[Ask, Ask], bool], most: int
) -> list[float]:
    """Latencies when the oldest goes next, with those waiting that join it."""
    left, latencies, started = list(asks), [0.0] * len(asks), time.perf_counter()
    while left:
        time.sleep(max(0.0, left[0].at - (time.perf_counter() - started)))
        now = time.perf_counter() - started
        wave = [a for a in left if a.at <= now and joins(left[0], a)][:most] or [left[0]]
        bare(pipeline, wave)
        ended = time.perf_counter() - started
        for ask in wave:
            latencies[ask.number] = ended - ask.at
            left.remove(ask)
    return latencies


def by_omniq(engine: Any, asks: list[Ask], **more: Any) -> list[float]:
    """Latencies when every request goes to the stage when it comes."""

    async def one(ask: Ask, started: float) -> float:
        await asyncio.sleep(max(0.0, ask.at - (time.perf_counter() - started)))
        params = {
            "height": ask.size, "width": ask.size, "num_inference_steps": ask.steps,
            "guidance_scale": 0.0, "seed": ask.number, **more,
        }  # fmt: skip
        inputs = {"prompt_embeds": StageInput(tensors={"e": ask.embeds})}
        await engine.run(StageRequest(f"r{ask.number}", params), inputs, NullEmit())
        return time.perf_counter() - started - ask.at

    async def together() -> list[float]:
        started = time.perf_counter()
        return list(await asyncio.gather(*[one(a, started) for a in asks]))

    return asyncio.run(together())


@torch.no_grad()
def forwards(transformer: Any, repeats: int = 15) -> None:
    """How long bare forwards take by batch size, for the shortest and the longest sequence."""
    print("| size, tokens | batch | ms | rows/s against 1 |\n|---|---|---|---|")
    for size, tokens in ((SIZES[0], TOKENS[0]), (SIZES[-1], TOKENS[-1])):
        seconds: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: []}
        for _ in range(repeats):
            for rows, times in seconds.items():
                side = size // 8
                x = [torch.randn(transformer.in_channels, 1, side, side) for _ in range(rows)]
                text = [torch.randn(tokens, WIDTH) for _ in range(rows)]
                started = time.perf_counter()
                transformer(x, torch.full((rows,), 0.5), text, return_dict=False)
                times.append(time.perf_counter() - started)
        medians = {rows: statistics.median(times) for rows, times in seconds.items()}
        for rows, median in medians.items():
            gain = medians[1] * rows / median
            print(f"| {size}, {tokens} | {rows} | {1000 * median:.1f} | {gain:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--load", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--heads", type=int, default=1, help="attention heads")
    parser.add_argument("--head", type=int, default=64, help="width of each")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape("z_image", args.layers, args.heads, args.head, WIDTH)
    model = BareModel(shape, "cpu", torch.float32)
    pipeline, engine = model.pipeline, model.engine({})
    print(f"{model.parameters / 1e6:.1f}M weights")
    forwards(pipeline.transformer)
    probe = load(12, 1e9)
    for ask in probe:
        bare(pipeline, [ask])
    started = time.perf_counter()
    for ask in probe:
        bare(pipeline, [ask])
    rate = args.load * len(probe) / (time.perf_counter() - started)
    asks = load(args.requests, rate)
    by_omniq(engine, load(24, 1e9))  # warms up, and measures which batches pay
    systems: dict[str, Callable[[], list[float]]] = {
        "serial": lambda: queued(pipeline, asks, lambda a, b: a is b, 1),
        "waves": lambda: queued(
            pipeline, asks, lambda a, b: (a.size, a.steps) == (b.size, b.steps), WAVE
        ),
        "omniq": lambda: by_omniq(engine, asks),
        "omniq, deterministic": lambda: by_omniq(engine, asks, deterministic=True),
    }
    made: dict[str, list[list[float]]] = {name: [] for name in systems}
    for _ in range(args.rounds):
        for name, run in systems.items():
            made[name].append(run())
    print(
        f"{args.requests} requests at {rate:.2f}/s, {args.load} times serial; {args.rounds} rounds"
    )
    print("| | requests/s | against serial | p50 s | p95 s | p95 of short s |")
    print("|---|---|---|---|---|---|")
    speeds = {}
    for name, rounds in made.items():
        spans = [max(a.at + x for a, x in zip(asks, lat, strict=True)) for lat in rounds]
        speeds[name] = args.requests * len(rounds) / sum(spans)
        every = [x for lat in rounds for x in lat]
        short = [x for lat in rounds for a, x in zip(asks, lat, strict=True) if a.steps <= SHORT]
        print(
            f"| {name} | {speeds[name]:.2f} | {speeds[name] / speeds['serial']:.2f} "
            f"| {percentile(every, 0.5):.2f} | {percentile(every, 0.95):.2f} "
            f"| {percentile(short, 0.95):.2f} |"
        )


if __name__ == "__main__":
    main()

"""One request on one device, and shared by two: CFG parallel, Ulysses, ring attention.

    python benchmarks/dit_parallel.py                       # two GPUs, Qwen-Image's width, 8 layers
    python benchmarks/dit_parallel.py --layers 60           # the whole Qwen-Image
    python benchmarks/dit_parallel.py --tiny                # two CPU processes over gloo

The transformer has random weights, which are written to a temporary folder, because every rank
loads them by itself. Each way of sharing is a DiT stage of its own; the one device comes first and
last, so that drift shows. "Guided" is true CFG, two forwards a step; "two at once" are two requests
without guidance. Differences are against the one device, relative to the largest latent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from dit_models import Shape, difference, latents_of, save

from omniq.config import OmniStageConfig
from omniq.engines import create_engine
from omniq.engines.base import NullEmit, StageInput, StageRequest

TOKENS = 128
WORKLOADS: dict[str, tuple[int, float]] = {  # requests at once, guidance
    "guided": (1, 4.0),
    "no guidance": (1, 1.0),
    "two at once": (2, 1.0),
}


def ways(devices: int) -> dict[str, dict[str, int]]:
    """Ways to share the work, by name; the first is the one device."""
    found: dict[str, dict[str, int]] = {
        "one device": {},
        "CFG parallel 2": {"cfg_degree": 2},
        f"Ulysses {devices}": {"ulysses_degree": devices},
        f"ring {devices}": {"ring_degree": devices},
    }
    if devices == 4:
        found["CFG 2 x Ulysses 2"] = {"cfg_degree": 2, "ulysses_degree": 2}
        found["ring 2 x Ulysses 2"] = {"ring_degree": 2, "ulysses_degree": 2}
    found["one device again"] = {}
    return found


class Bench:
    """Measures all ways on one model.

    Args:
        args: the command line.
        folder: the model's pipeline folder.
        width: of its prompt embeds.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, width: int) -> None:
        self.args, self.folder, self.width = args, folder, width
        self.dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        self.rows: list[dict[str, Any]] = []
        self._expected: dict[str, list[torch.Tensor]] = {}
        self._loop = asyncio.new_event_loop()

    def run(self) -> None:
        for name, degrees in ways(self.args.devices).items():
            try:
                self._way(name, degrees)
            except Exception as exc:  # one way must not end the others
                self.rows.append({"way": name, "failed": f"{type(exc).__name__}: {exc}"})
                print(f"{name}: failed: {type(exc).__name__}: {exc}", flush=True)
            self._save()

    def _way(self, name: str, degrees: dict[str, int]) -> None:
        engine: Any = create_engine(self._stage(degrees), self.args.device)
        started = time.perf_counter()
        try:
            self._loop.run_until_complete(engine.load())
            print(f"{name}: loaded in {time.perf_counter() - started:.1f} s", flush=True)
            for workload in WORKLOADS:
                self._measure(engine, name, workload)
        finally:
            self._loop.run_until_complete(engine.unload())

    def _measure(self, engine: Any, name: str, workload: str) -> None:
        cuda = self.args.device != "cpu"
        for _ in range(self.args.warmup):  # kernels are chosen, communicators and memory made
            self._ask(engine, workload, 3)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds, made = [], []
        for _ in range(self.args.repeats):
            started = time.perf_counter()
            made = self._ask(engine, workload, self.args.steps)
            seconds.append(time.perf_counter() - started)
        expected = self._expected.setdefault(workload, made)
        row = {
            "way": name,
            "workload": workload,
            "seconds": seconds,
            "difference": max(difference(m, e) for m, e in zip(made, expected, strict=True)),
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        }
        self.rows.append(row)
        print(f"{name}, {workload}: {statistics.median(seconds):.3f} s", flush=True)

    def _ask(self, engine: Any, workload: str, steps: int) -> list[torch.Tensor]:
        count, guidance = WORKLOADS[workload]

        async def one(i: int) -> torch.Tensor:
            params = {
                "height": self.args.size, "width": self.args.size, "num_inference_steps": steps,
                "seed": i, "guidance_scale": guidance,
            }  # fmt: skip
            generator = torch.Generator().manual_seed(i)
            condition = {
                n: torch.randn(TOKENS, self.width, generator=generator).to(self.dtype)
                for n in ("prompt_embeds", "negative_prompt_embeds")
            }
            inputs = {"condition": StageInput(tensors=condition)}
            output = await engine.run(StageRequest(f"r{i}", params), inputs, NullEmit())
            return latents_of(output)

        async def together() -> list[torch.Tensor]:
            return list(await asyncio.gather(*(one(i) for i in range(count))))

        return self._loop.run_until_complete(together())

    def _stage(self, degrees: dict[str, int]) -> OmniStageConfig:
        return OmniStageConfig.model_validate(
            {
                "stage_id": "dit",
                "engine_type": "DiT",
                "model": str(self.folder),
                "dtype": str(self.dtype).removeprefix("torch."),
                "engine_args": {"parallel": degrees} if degrees else {},
                "dit": {"batching": {"when": "always"}},
            }
        )

    @property
    def facts(self) -> dict[str, Any]:
        device = self.args.device
        return {
            "device": "CPU" if device == "cpu" else torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            **{n: getattr(self.args, n) for n in ("layers", "size", "steps", "repeats", "devices")},
        }

    def _save(self) -> None:
        if self.args.json:
            found = json.dumps({**self.facts, "rows": self.rows}, indent=1)
            Path(self.args.json).write_text(found)

    def report(self) -> None:
        """The table."""
        print(f"\n{json.dumps(self.facts)}\n")
        print(
            "| way | workload | seconds | ms a step | speed-up | difference | peak GiB of rank 0 |"
            "\n|---|---|---|---|---|---|---|"
        )
        base: dict[str, float] = {}
        for row in self.rows:
            if "failed" in row:
                print(f"| {row['way']} | {row['failed']} | | | | | |")
                continue
            seconds = statistics.median(row["seconds"])
            alone = base.setdefault(row["workload"], seconds)
            print(
                f"| {row['way']} | {row['workload']} | {seconds:.3f} "
                f"| {1000 * seconds / self.args.steps:.1f} | {alone / seconds:.2f} "
                f"| {row['difference']:.1e} | {row['peak_bytes'] / 2**30:.1f} |"
            )


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="two small layers on the CPU, 64²")
    parser.add_argument("--devices", type=int, choices=(2, 4), default=2)
    parser.add_argument("--layers", type=int, default=8, help="of Qwen-Image's 60")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--json", help="where the measured is written after every way")
    args = parser.parse_args(given)
    args.device = "cpu" if args.tiny else "cuda:0"
    if args.tiny:
        args.layers, args.size, args.steps = 2, 64, min(args.steps, 6)
        torch.set_num_threads(1)
    return args


def main() -> None:
    args = parse()
    small = {"heads": 4, "head": 32, "text": 64} if args.tiny else {}
    shape = Shape("qwen_image", layers=args.layers, **small)
    with tempfile.TemporaryDirectory(prefix="dit-parallel-") as folder:
        dtype = torch.float32 if args.tiny else torch.bfloat16
        width = save(shape, Path(folder), args.device, dtype)
        bench = Bench(args, Path(folder), width)
        try:
            bench.run()
        finally:
            bench.report()


if __name__ == "__main__":
    main()

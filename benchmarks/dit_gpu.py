"""A full-size diffusion transformer on one GPU: bare diffusers against omniq's DiT stage.

Z-Image (6 billion weights) or Qwen-Image (20 billion) with random bf16 weights made on the device.
Cases run in rounds, the most telling first; nothing is begun that may not end within ``--budget-s``
seconds of the process. Every finished run is printed and written to ``--json`` at once, so that
what was measured is kept when the process is stopped. With random weights cached cases have a hit
ratio, but no quality.

    python benchmarks/dit_gpu.py --json dit_gpu.json
    python benchmarks/dit_gpu.py --tiny --device cpu --sizes 64 128 --steps 4 --budget-s 60
"""

from __future__ import annotations

import time

STARTED = time.monotonic()  # before the slow imports: the budget is the process's

import argparse  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from dit_models import MODELS, BareModel, Shape, difference, latents_of  # noqa: E402

#: A run is begun only if this many times its expected seconds are left.
MARGIN = 1.15
CACHES: dict[str, dict[str, Any]] = {
    "balanced": {"preset": "balanced"},
    # Nothing is ever that similar: what the cache costs.
    "never hits": {"method": "first_block", "threshold": 1e-9},
}


@dataclass(slots=True)
class Case:
    """One way to serve ``requests`` requests of one size; ``run`` returns latents and hit ratio."""

    name: str
    size: int
    steps: int
    requests: int
    run: Callable[[int], tuple[list[torch.Tensor], float | None]]
    compare: bool = True
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    difference: float | None = None
    hits: float | None = None
    skipped: str = ""

    def record(self) -> dict[str, Any]:
        """For the JSON file."""
        names = ("name", "size", "steps", "requests", "seconds", "difference", "hits", "skipped")
        return {**{n: getattr(self, n) for n in names}, "peak_bytes": self.peak}


class Bench:
    """Runs cases within the budget and keeps what was measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.facts: dict[str, Any] = {"torch": torch.__version__, "device": args.device}
        self.cuda = args.device.startswith("cuda")
        if self.cuda:
            self.facts["gpu"] = torch.cuda.get_device_name(args.device)
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self.facts |= {"model": args.model, "dtype": str(dtype)}
        shape = Shape(args.model, *((2, 2) if args.tiny else (args.layers, None)))
        self.model = BareModel(shape, args.device, dtype)
        self.say("model made")
        self.facts["parameters"] = self.model.parameters
        self.engines: dict[str, Any] = {}
        self.expected: dict[tuple[int, int, int], torch.Tensor] = {}
        self.cases = self._cases()

    def say(self, text: str) -> None:
        print(f"[{self.spent():6.1f} s] {text}", flush=True)

    def spent(self) -> float:
        """Seconds since the process began."""
        return time.monotonic() - STARTED

    def _engine(self, rows: int = 1, cache: str = "") -> Any:
        name = cache or str(rows)
        if name not in self.engines:
            batching = {"when": "always", "max_rows": rows}
            dit = {"batching": batching, **({"cache": CACHES[cache]} if cache else {})}
            self.engines[name] = self.model.engine(dit)
        return self.engines[name]

    def _cases(self) -> list[Case]:
        """In the order of a round: sizes in turn, within a size the most telling first."""
        made = []
        for size in self.args.sizes:
            made += [
                self._bare(size),
                self._omniq("omniq alone", size, 1),
                self._omniq("omniq, balanced cache", size, 1, cache="balanced"),
                *(self._omniq(f"omniq, {n} at once", size, n, rows=n) for n in self.args.batches),
                self._omniq("omniq, cache that never hits", size, 1, cache="never hits"),
            ]
        most, first = max(self.args.batches), self.args.sizes[0]
        made += [
            self._omniq(f"omniq, {most} of one text length", first, most, rows=most, tokens=64),
            self._omniq(f"omniq, {most} at once, deterministic", first, most, deterministic=True),
        ]
        return made

    def _bare(self, size: int) -> Case:
        def run(steps: int) -> tuple[list[torch.Tensor], None]:
            return [self.model.bare(size, steps)], None

        return Case("bare diffusers", size, self.args.steps, 1, run)

    def _omniq(
        self, name: str, size: int, n: int, *, rows: int = 1, cache: str = "", **more: Any
    ) -> Case:
        def run(steps: int) -> tuple[list[torch.Tensor], float | None]:
            engine = self._engine(rows, cache)
            made = self.model.ask(engine, size, steps, range(n), **more)
            return [latents_of(m) for m in made], made[0].metrics.get("cache_hit_ratio")

        return Case(name, size, self.args.steps, n, run, "tokens" not in more)

    def run(self) -> None:
        """All rounds, or as much as the budget has room for; the first round warms up, too."""
        for round_ in range(self.args.rounds):
            for case in self.cases:
                self._one(case, round_)
                self._save()

    def _one(self, case: Case, round_: int) -> None:
        left = self.args.budget_s - self.spent()
        if left < MARGIN * (needed := self._needed(case)):
            case.skipped = f"round {round_}: needs about {needed:.0f} s, {left:.0f} s are left"
            self.say(f"skipped {case.size}² {case.name}: {case.skipped}")
            return
        try:
            if not case.seconds:
                case.run(2)  # kernels are chosen, memory is taken
            if self.cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            made, hits = case.run(case.steps)
            case.seconds.append(time.perf_counter() - started)
        except Exception as exc:  # one case, for example out of memory, must not end the others
            case.skipped = f"{type(exc).__name__}: {exc}"
            self.say(f"failed {case.size}² {case.name}: {case.skipped}")
            return
        case.peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        case.hits = hits if hits is None else float(hits)
        key = (case.size, case.steps, 0)
        if case.name == "bare diffusers":
            self.expected[key] = made[0]
        elif case.compare and key in self.expected:
            case.difference = difference(made[0], self.expected[key])
        self.say(f"{case.size}² {case.name}: {case.seconds[-1]:.3f} s")

    def _needed(self, case: Case) -> float:
        """Expected seconds of one run, and of a warm-up if it is the first."""
        if case.seconds:
            return case.seconds[-1]
        known = [c for c in self.cases if c.seconds and c.size == case.size]
        if not known:  # of another size: by pixels, and attention on top
            known = [c for c in self.cases if c.seconds]
        if not known:
            return 0.0
        like = known[0]
        each = like.seconds[-1] / like.requests * (case.size / like.size) ** 2.5
        return each * case.requests * (1 + 2 / case.steps)

    def _save(self) -> None:
        if self.args.json:
            found = {
                **self.facts,
                "spent_s": self.spent(),
                "cases": [c.record() for c in self.cases],
            }
            part = Path(f"{self.args.json}.part")
            part.write_text(json.dumps(found, indent=1))
            part.replace(self.args.json)

    def report(self) -> None:
        """The table."""
        print(f"\n{json.dumps(self.facts)}\n")
        print(
            "| size | case | seconds | ms a step and request | requests/s against bare "
            "| cache hits | difference | peak GiB |\n|---|---|---|---|---|---|---|---|"
        )
        for case in self.cases:
            base = next(c for c in self.cases if c.size == case.size)
            if not case.seconds or not base.seconds:
                print(f"| {case.size} | {case.name} | {case.skipped or 'not run'} | | | | | |")
                continue
            seconds = statistics.median(case.seconds)
            ratio = statistics.median(base.seconds) * case.requests / seconds
            each = 1000 * seconds / case.requests / case.steps
            hits = "" if case.hits is None else f"{case.hits:.2f}"
            off = "" if case.difference is None else f"{case.difference:.1e}"
            print(
                f"| {case.size} | {case.name} | {seconds:.3f} | {each:.1f} | {ratio:.3f} "
                f"| {hits} | {off} | {case.peak / 2**30:.1f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="z_image")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="two layers of two heads")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--json", help="where the measured is written after every run")
    bench = Bench(parser.parse_args())
    try:
        bench.run()
    finally:
        bench.report()
    bench.say("done")


if __name__ == "__main__":
    main()

"""One tensor from one process to another on one host: how long until the consumer has read it.

    python benchmarks/hop.py --vllm-omni FOLDER --ray-python PYTHON --out hop.json

Time runs from the producer having a tensor (just written, so in its caches as far as it fits) to
the consumer having summed it as int64. All transports send their small message as an object through
a ``multiprocessing.Pipe``, read the same way, and run with one torch thread. Producer and consumers
keep to a core each, as two busy workers do; left to the scheduler, some rounds would run on one
core, where a pipe takes a third of the time. A hop starts at least PAUSE after the last one, as a
consumer that has slept longer takes longer to wake, whatever it waits for. Servers (Valkey, Ray)
run where they like. All take turns in rounds, so that other load meets all of them; a ratio is the
median over rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from common import Times, load, machine, now, table, valkey, write_json
from hop_transports import TRANSPORTS, Config, new_run

BOUND, OURS, VLLM_OMNI, MEMCPY, RAY = (
    "warm slab (bound)", "omniq slabs", "vllm-omni connector", "memcpy + read (limit)", "ray",
)  # fmt: skip
KB, MB = 1 << 10, 1 << 20
#: Size -> hops a round.
HOPS = {64 * KB: 100, MB: 50, 16 * MB: 10, 128 * MB: 3}
WARM_UP = 3
PAUSE = 300e-6

Measure = Callable[[int, int], tuple[list[float], list[float]]]


def read(tensor: torch.Tensor) -> int:
    """Touch every byte once."""
    return int(tensor.view(torch.int64).sum())


def pause(since: float) -> None:
    """Compute until PAUSE has passed since then."""
    while now() < since + PAUSE:
        pass


def keep_to_core(number: int) -> None:
    """Run this process on one core of those it may use, the same for the same number."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def make(nbytes: int) -> torch.Tensor:
    raw = torch.randint(0, 30000, (nbytes // 2,), dtype=torch.int16)
    return raw.view(torch.float16).view(-1, 64)


def consume(name: str, config: Config, pipe: Connection) -> None:
    """The consumer process: answers each message with the time it was read and the sum."""
    torch.set_num_threads(1)
    keep_to_core(1)
    transport = TRANSPORTS[name](config)
    pipe.send("up")
    while (message := pipe.recv()) is not None:
        tensor = transport.get(message)
        total = read(tensor)
        end = now()
        del tensor
        transport.done(message)
        pipe.send((end, total))
    transport.close()


class Pair:
    """A producer (this process) and a consumer of one transport."""

    def __init__(self, name: str, config: Config) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.consumer = context.Process(target=consume, args=(name, config, theirs), daemon=True)
        self.consumer.start()
        self.transport = TRANSPORTS[name](config)
        assert self.pipe.recv() == "up"

    def measure(self, nbytes: int, count: int) -> tuple[list[float], list[float]]:
        """Seconds of ``count`` hops, and of the same with all that is freed afterwards."""
        source = make(nbytes)
        expected = read(source)
        hops, cycles = [], []
        cycle = now()
        for number in range(-WARM_UP, count):
            tensor = source.clone()
            pause(since=cycle)
            start = now()
            message = self.transport.put(tensor)
            self.pipe.send(message)
            end, total = self.pipe.recv()
            self.transport.free(message)
            cycle = now()
            assert total == expected, "the consumer read something else"
            if number >= 0:
                hops.append(end - start)
                cycles.append(cycle - start)
        return hops, cycles

    def close(self) -> None:
        self.pipe.send(None)
        self.consumer.join(10)
        self.transport.close()


def memcpy(nbytes: int, count: int) -> tuple[list[float], list[float]]:
    """The limit: a copy into warm memory of the same process, and the read."""
    source, target = make(nbytes), make(nbytes)
    hops = []
    for number in range(-WARM_UP, count):
        tensor = source.clone()
        start = now()
        target.copy_(tensor)
        read(target)
        if number >= 0:
            hops.append(now() - start)
    return hops, hops


class Ray:
    """Ray's object store, in a Python of its own."""

    def __init__(self, python: str) -> None:
        script = str(Path(__file__).with_name("hop_ray.py"))
        self.process = subprocess.Popen(
            [python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "up\n":
            raise RuntimeError(f"Ray did not start with {python}")

    def measure(self, nbytes: int, count: int) -> tuple[list[float], list[float]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{nbytes} {count + WARM_UP}\n")
        self.process.stdin.flush()
        seconds = json.loads(self.process.stdout.readline())[WARM_UP:]
        return seconds, seconds

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def run(measures: dict[str, Measure], sizes: list[int], rounds: int) -> dict[int, dict[str, Times]]:
    """Let all take turns; size -> name -> times. Cycles are under ``<name>, freed``."""
    seconds: dict[int, dict[str, list[list[float]]]] = {s: defaultdict(list) for s in sizes}
    for number in range(rounds):
        for size in sizes:
            names = list(measures)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                hops, cycles = measures[name](size, HOPS.get(size, 20))
                seconds[size][name].append(hops)
                seconds[size][f"{name}, freed"].append(cycles)
        print(f"round {number + 1} of {rounds}, load {load():.1f}", file=sys.stderr, flush=True)
    return {
        size: {name: Times(samples) for name, samples in by_name.items()}
        for size, by_name in seconds.items()
    }


def report(results: dict[int, dict[str, Times]], names: list[str]) -> str:
    """The table of each size."""
    parts = []
    for size, times in results.items():
        header = ["transport", "median µs", "p99 µs", "GB/s", "× bound", "with freeing µs"]
        rows = [
            [
                name,
                f"{times[name].median * 1e6:.0f}",
                f"{times[name].p99 * 1e6:.0f}",
                f"{size / times[name].median / 1e9:.2f}",
                f"{times[name].times_faster_than(times[BOUND]):.2f}",
                f"{times[f'{name}, freed'].median * 1e6:.0f}",
            ]
            for name in names
        ]
        parts.append(f"{size // KB} KB\n{table(header, rows)}")
    return "\n\n".join(parts)


def goals(results: dict[int, dict[str, Times]]) -> dict[str, bool]:
    """What must be reached, as far as this run measured it."""
    reached = {}
    for size, times in results.items():
        ratio = times[OURS].times_faster_than(times[BOUND])
        if size == 64 * KB:
            reached[f"64 KB takes {1 / ratio:.2f} × the bound, at most 1.5"] = ratio >= 1 / 1.5
        elif size in HOPS:
            reached[f"{size // MB} MB is {ratio:.2f} × the bound, at least 0.8"] = ratio >= 0.8
        if size == 16 * MB and VLLM_OMNI in times:
            ratio = times[OURS].times_faster_than(times[VLLM_OMNI])
            reached[f"16 MB is {ratio:.1f} × vllm-omni's connector, at least 10"] = ratio >= 10
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(HOPS), help="bytes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--vllm-omni", help="folder of the unpacked wheel")
    parser.add_argument("--ray-python", help="a Python that has Ray")
    parser.add_argument("--only", nargs="+", choices=list(TRANSPORTS), help="these and the bound")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--check", action="store_true", help="fail unless the goals are reached")
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that all is cleaned up

    before = load()
    chosen = [n for n in TRANSPORTS if not options.only or n in options.only or n in (BOUND, OURS)]
    if options.vllm_omni is None and VLLM_OMNI in chosen:
        chosen.remove(VLLM_OMNI)
    with ExitStack() as stack:
        config = Config(new_run(), stack.enter_context(valkey()), options.vllm_omni)
        measures: dict[str, Measure] = {MEMCPY: memcpy}
        if options.ray_python:
            ray = Ray(options.ray_python)
            stack.callback(ray.close)
            measures[RAY] = ray.measure
        for name in chosen:
            pair = Pair(name, config)
            stack.callback(pair.close)
            measures[name] = pair.measure
        keep_to_core(0)  # only now: child processes inherit it
        results = run(measures, options.sizes, options.rounds)

    reached = goals(results)
    print(report(results, list(measures)))
    print()
    for goal, met in reached.items():
        print(f"{'reached' if met else 'MISSED '}  {goal}")
    print(f"load before and after: {before:.1f}, {load():.1f} on {machine()['cores']} cores")
    if options.out:
        write_json(options.out, as_json(results, list(measures), before))
    return int(options.check and not all(reached.values()))


def as_json(
    results: dict[int, dict[str, Times]], names: list[str], load_before: float
) -> dict[str, object]:
    """Everything measured, in seconds and bytes."""
    return {
        "machine": machine(),
        "load": [load_before, load()],
        "sizes": {
            size: {
                name: {
                    "median_s": times[name].median,
                    "p99_s": times[name].p99,
                    "with_freeing_median_s": times[f"{name}, freed"].median,
                    "times_bound": times[name].times_faster_than(times[BOUND]),
                    "round_medians_s": [statistics.median(r) for r in times[name].rounds],
                }
                for name in names
            }
            for size, times in results.items()
        },
        "goals": goals(results),
    }


if __name__ == "__main__":
    sys.exit(main())

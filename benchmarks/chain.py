"""Three stages that do nothing, a tensor of 1 MB on both hops: what the hops cost.

    python benchmarks/chain.py --vllm-omni FOLDER --ray-python PYTHON --out chain.json

omniq runs as it is served: late acknowledgement, a durable record of every job (append-only file,
synced each second), leases, events and heartbeats. The peers have none of these. All take turns in
rounds, with 1 and with 32 requests in flight, so that other load on the machine meets all of them;
ratios are medians over rounds. CPU time is that of all processes of a system, its server and the
client included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from chain_driver import System, cpu_seconds
from chain_omniq import Omniq
from chain_peers import PickleQueues, RayActors, RedisLists, StockCelery, VllmOmniHub
from common import load, machine, now, percentile, table, valkey, write_json

IN_FLIGHT = (1, 32)
#: Requests a round, by system; the default is for those not named.
REQUESTS = {"stock Celery chain, tensor in the message": (20, 60)}
DEFAULT = (150, 400)
WARM_UP = 40
MOST_CPU = 4.0
#: What omniq has to beat.
PEERS = (PickleQueues.name, VllmOmniHub.name, RayActors.name)


@dataclass(frozen=True, slots=True)
class Round:
    """One system, some requests in a row."""

    per_second: float
    p50: float
    p99: float
    cpu_ms: float


Results = dict[str, dict[int, list[Round]]]


class Rounds:
    """Counts requests, so that every one has a number of its own."""

    def __init__(self, scale: float) -> None:
        self._next, self._scale = 0, scale

    def numbers(self, count: int) -> range:
        start, self._next = self._next, self._next + count
        return range(start, self._next)

    def measure(self, system: System, servers: list[int], in_flight: int) -> Round:
        few, many = REQUESTS.get(system.name, DEFAULT)
        count = max(10, int((few if in_flight == 1 else many) * self._scale))
        numbers = self.numbers(count)
        processes = [*servers, *system.processes]
        cpu, began = cpu_seconds(processes), now()
        seconds = system.drive(numbers, in_flight)
        elapsed, spent = now() - began, cpu_seconds(processes) - cpu
        return Round(
            count / elapsed,
            percentile(seconds, 0.5),
            percentile(seconds, 0.99),
            spent / count * 1e3,
        )


def run(systems: list[tuple[System, list[int]]], rounds: int, scale: float) -> Results:
    """Let all take turns."""
    results: Results = defaultdict(lambda: defaultdict(list))
    counter = Rounds(scale)
    for system, _ in systems:
        system.drive(counter.numbers(WARM_UP), 8)
    for number in range(rounds):
        at = number % len(systems)
        for system, servers in systems[at:] + systems[:at]:
            for in_flight in IN_FLIGHT:
                measured = counter.measure(system, servers, in_flight)
                results[system.name][in_flight].append(measured)
        print(f"round {number + 1} of {rounds}, load {load():.1f}", file=sys.stderr, flush=True)
    return results


def ratio(results: Results, name: str, other: str, in_flight: int) -> float:
    """How many times the requests a second of ``other``: the median over rounds."""
    pairs = zip(results[name][in_flight], results[other][in_flight], strict=True)
    return statistics.median(a.per_second / b.per_second for a, b in pairs)


def median(rounds: list[Round], what: Callable[[Round], float]) -> float:
    return statistics.median(map(what, rounds))


def report(results: Results) -> str:
    """One table for each number of requests in flight."""
    parts = []
    for in_flight in IN_FLIGHT:
        header = ["system", "req/s", "p50 ms", "p99 ms", "CPU ms/req", "omniq is"]
        rows = []
        for name, by_window in results.items():
            rounds = by_window[in_flight]
            rows.append(
                [
                    name,
                    f"{median(rounds, lambda r: r.per_second):.0f}",
                    f"{median(rounds, lambda r: r.p50) * 1e3:.1f}",
                    f"{median(rounds, lambda r: r.p99) * 1e3:.1f}",
                    f"{median(rounds, lambda r: r.cpu_ms):.2f}",
                    f"{ratio(results, Omniq.name, name, in_flight):.2f} x",
                ]
            )
        parts.append(f"{in_flight} in flight\n{table(header, rows)}")
    return "\n\n".join(parts)


def goals(results: Results) -> dict[str, bool]:
    """What must be reached, as far as this run measured it."""
    reached = {}
    for in_flight in IN_FLIGHT:
        cpu = median(results[Omniq.name][in_flight], lambda r: r.cpu_ms)
        reached[f"{in_flight} in flight: {cpu:.2f} ms CPU a request, at most {MOST_CPU:g}"] = (
            cpu <= MOST_CPU
        )
        for peer in PEERS:
            if peer in results:
                times = ratio(results, Omniq.name, peer, in_flight)
                goal = f"{in_flight} in flight: {times:.2f} x the requests/s of {peer}, above 1"
                reached[goal] = times > 1
    return reached


def start(stack: ExitStack, options: argparse.Namespace) -> list[tuple[System, list[int]]]:
    """All systems, each with the servers whose CPU time is its own."""
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omniq-chain-")))
    systems: list[tuple[System, list[int]]] = []

    def server(*arguments: str) -> str:
        return stack.enter_context(valkey(*arguments))

    def add(system: System, socket: str | None = None) -> None:
        stack.callback(system.close)
        systems.append((system, [] if socket is None else [_server_of(socket)]))

    wanted = options.only or ["omniq", "bound", "queues", "hub", "celery", "ray"]
    if "bound" in wanted:
        socket = server()
        add(RedisLists(socket), socket)
    # As omniq's own broker: durable.
    socket = server("--appendonly", "yes", "--appendfsync", "everysec")
    add(Omniq(socket, logs), socket)
    if "queues" in wanted:
        add(PickleQueues())
    if "hub" in wanted and options.vllm_omni:
        add(VllmOmniHub(options.vllm_omni))
    if "ray" in wanted and options.ray_python:
        add(RayActors(options.ray_python))
    if "celery" in wanted:
        socket = server()
        for by_key in (True, False):
            add(StockCelery(socket, logs, by_key=by_key), socket)
    return systems


def _server_of(socket: str) -> int:
    # Valkey writes its own title over its command line.
    children = psutil.Process(os.getpid()).children()
    return next(p.pid for p in children if socket in " ".join(p.cmdline()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual requests a round")
    parser.add_argument("--vllm-omni", help="folder of the unpacked wheel")
    parser.add_argument("--ray-python", help="a Python that has Ray")
    parser.add_argument(
        "--only", nargs="+", choices=["bound", "queues", "hub", "celery", "ray"], help="and omniq"
    )
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--check", action="store_true", help="fail unless the goals are reached")
    options = parser.parse_args()

    before = load()
    with ExitStack() as stack:
        results = run(start(stack, options), options.rounds, options.scale)
    reached = goals(results)
    print(report(results))
    print()
    for goal, met in reached.items():
        print(f"{'reached' if met else 'MISSED '}  {goal}")
    print(f"load before and after: {before:.1f}, {load():.1f} on {machine()['cores']} cores")
    if options.out:
        write_json(options.out, as_json(results, before))
    return int(options.check and not all(reached.values()))


def as_json(results: Results, load_before: float) -> dict[str, Any]:
    """Everything measured; seconds, except where a name says otherwise."""
    return {
        "machine": machine(),
        "load": [load_before, load()],
        "systems": {
            name: {
                str(in_flight): [
                    {"per_second": r.per_second, "p50": r.p50, "p99": r.p99, "cpu_ms": r.cpu_ms}
                    for r in rounds
                ]
                for in_flight, rounds in by_window.items()
            }
            for name, by_window in results.items()
        },
        "goals": goals(results),
    }


if __name__ == "__main__":
    sys.exit(main())

"""Submitting over HTTP: omniq against a route that does nothing and against stock apply_async.

    python benchmarks/front.py [--rounds 5] [--seconds 3] [--connections 32] [--json FILE]

One uvicorn worker each (uvloop, httptools), all on one Valkey with an append-only file; rounds
are interleaved. Accepted jobs are counted in Valkey afterwards: records, index and queue.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import orjson
import redis
import uvloop
from common import load, machine, table, write_json
from front_common import (
    BASELINES,
    JOB,
    OMNIQ,
    SUBMIT,
    Load,
    Server,
    durable_valkey,
    hammer,
    request,
    serve,
)

QUEUES = {"omniq": "omniq.tiny-omni.ar", "celery": "front"}


def queued(client: redis.Redis, queue: str) -> int:
    """Messages in a queue, over all priorities."""
    return sum(client.llen(key) for key in client.scan_iter(f"{queue}*", _type="list"))


def durable(client: redis.Redis, name: str, accepted: int) -> None:
    """Stop if one accepted job is not where it must be."""
    queue = queued(client, QUEUES[name])
    assert queue == accepted, f"{name}: {accepted} accepted, {queue} queued"
    if name == "omniq":
        records = sum(1 for _ in client.scan_iter("omniq:job:*", 1000, _type="hash"))
        index = client.zcard("omniq:jobs")
        assert records == index == accepted, f"{accepted} accepted: {records}, {index} recorded"


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[Load]]:
    found: dict[str, list[Load]] = {"omniq": [], "no-op": [], "celery": []}
    body = orjson.dumps(JOB)
    with (
        durable_valkey(folder) as port,
        serve(OMNIQ, port) as omniq,
        serve(BASELINES, port) as baselines,
        redis.Redis(port=port) as client,
    ):
        asks: dict[str, tuple[Server, bytes]] = {
            "omniq": (omniq, SUBMIT),
            "no-op": (baselines, request("POST", "/noop", body)),
            "celery": (baselines, request("POST", "/celery", body)),
        }
        for _ in range(options.rounds):
            for name, (server, ask) in asks.items():
                client.flushdb()
                await hammer(server, ask, options.connections, 0.3)  # warm
                client.flushdb()
                found[name].append(await hammer(server, ask, options.connections, options.seconds))
                if name in QUEUES:
                    durable(client, name, len(found[name][-1].taken))
    return found


def summary(runs: list[Load]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    return {
        "rate": median([r.rate for r in runs]),
        "rates": [round(r.rate) for r in runs],
        "p50_ms": median([r.ms(0.5) for r in runs]),
        "p99_ms": median([r.ms(0.99) for r in runs]),
        "server_cpu_us": median([r.server_cpu / len(r.taken) * 1e6 for r in runs]),
        "generator_share_of_core": median([r.own_cpu / r.seconds for r in runs]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = load()
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as folder:
        runs = uvloop.run(measure(options, Path(folder)))
    results = {name: summary(r) for name, r in runs.items()}
    base = results["omniq"]["rate"]
    print(f"load before {before:.1f}, after {load():.1f}; {options.connections} connections")
    header = ["submits", "req/s", "p50 ms", "p99 ms", "server CPU µs", "generator", "omniq ×"]
    rows = [
        [
            name,
            f"{r['rate']:.0f}",
            f"{r['p50_ms']:.1f}",
            f"{r['p99_ms']:.1f}",
            f"{r['server_cpu_us']:.0f}",
            f"{r['generator_share_of_core']:.0%}",
            f"{base / r['rate']:.2f}",
        ]
        for name, r in results.items()
    ]
    print(table(header, rows))
    if options.json:
        write_json(options.json, {"machine": machine(), "load": before, "results": results})


if __name__ == "__main__":
    main()

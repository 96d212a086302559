"""Events: from the worker's emit to the client, and what waiting clients cost submissions.

    python benchmarks/events.py [--watchers 1 100 1000] [--samples 300] [--rounds 5] [--json FILE]

Latency: a job store emits a text delta, as a worker does, for one of N jobs that N clients watch;
measured until the client's socket has the event. The baseline is a FastAPI route with a blocking
XREAD for each client. "An engine's emit" begins in the engine's thread. "All watch one job" is the
time until the last client has it.
Submits: 32 connections, with and without 1,000 clients that wait (half of them by SSE, half by
long polls), in alternation; "busy" adds 200 events a second among them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from common import load, machine, now, percentile, table, write_json
from front_common import (
    BASELINES,
    OMNIQ,
    SUBMIT,
    Server,
    durable_valkey,
    hammer,
    request,
    serve,
)
from omniq_workers.emit import PACE, JobEmit

from omniq import keys
from omniq.config import get_pipeline
from omniq.jobs.model import JobSpec, new_job_id
from omniq.jobs.store import JobStore
from omniq.redis_client import connect
from omniq.settings import get_settings

MARK = b'"at":'


class Client(asyncio.Protocol):
    """One waiting client: notes when each event came."""

    def __init__(self, ask: bytes) -> None:
        self.ask, self.data = ask, b""
        self.begun = asyncio.get_running_loop().create_future()
        self.next: asyncio.Future[float] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(self.ask)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if not self.begun.done() and b"data: " in data:
            self.begun.set_result(None)
        if MARK in data and self.next is not None and not self.next.done():
            self.next.set_result(now())


async def clients(server: Server, asks: list[bytes]) -> list[Client]:
    loop = asyncio.get_running_loop()
    found: list[Client] = []
    for ask in asks:
        _, client = await loop.create_connection(lambda a=ask: Client(a), "127.0.0.1", server.port)
        found.append(client)
    return found


async def running_job(store: JobStore) -> tuple[str, int]:
    """A job whose first stage runs, and the run's fence."""
    config, created = get_pipeline("tiny-omni"), time.time()
    spec = JobSpec(
        id=new_job_id(created),
        pipeline=config.name,
        inputs={"prompt": "x"},
        parameters={},
        stages=config.topological_order(),
        created=created,
    )
    await store.create(spec, {s: config.upstream(s) for s in spec.stages})
    grant = await store.begin_stage(spec.id, "ar", "bench", redelivered=False)
    return spec.id, grant.fence


async def latencies(
    store: JobStore, server: Server, path: str, watchers: int, samples: int
) -> list[float]:
    """Seconds from emit to client, one event at a time."""
    jobs = [await running_job(store) for _ in range(watchers)]
    watching = await clients(
        server, [request("GET", path.format(job=job, key=keys.job_events(job))) for job, _ in jobs]
    )
    await asyncio.gather(*(c.begun for c in watching))
    found = []
    for _ in range(samples):
        i = random.randrange(watchers)
        watching[i].next = asyncio.get_running_loop().create_future()
        at = now()
        await store.delta(jobs[i][0], "ar", jobs[i][1], "text", {"text": "a red", "at": at})
        async with asyncio.timeout(10):
            found.append(await watching[i].next - at)
        await asyncio.sleep(0.002)
    await leave(store, watching, jobs)
    return found


async def through_emit(store: JobStore, server: Server, samples: int) -> list[float]:
    """Seconds from an engine's ``emit.delta`` to the client; emits are as far apart as its pace."""
    job, fence = await running_job(store)
    (client,) = await clients(server, [request("GET", f"/v1/jobs/{job}/events")])
    await client.begun
    found = []
    async with JobEmit(store, job, "ar", fence, lambda: None) as emit:
        for _ in range(samples):
            await asyncio.sleep(PACE * 1.5)
            client.next = asyncio.get_running_loop().create_future()
            at = now()
            await asyncio.to_thread(emit.delta, "text", {"text": "a red", "at": at})
            found.append(await client.next - at)
    await leave(store, [client], [(job, fence)])
    return found


async def all_of_one(store: JobStore, server: Server, watchers: int, samples: int) -> list[float]:
    """Seconds until the last of all clients of one job has an event."""
    job, fence = await running_job(store)
    watching = await clients(server, [request("GET", f"/v1/jobs/{job}/events")] * watchers)
    await asyncio.gather(*(c.begun for c in watching))
    found = []
    for _ in range(samples):
        for client in watching:
            client.next = asyncio.get_running_loop().create_future()
        at = now()
        await store.delta(job, "ar", fence, "text", {"text": "a red", "at": at})
        found.append(max(await asyncio.gather(*(c.next for c in watching))) - at)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
    await leave(store, watching, [(job, fence)])
    return found


async def leave(store: JobStore, watching: list[Client], jobs: list[tuple[str, int]]) -> None:
    for client in watching:
        client.transport.close()
    for job, _ in jobs:
        await store.cancel(job)
    await asyncio.sleep(0.5)


@asynccontextmanager
async def waiting(store: JobStore, server: Server, count: int, busy: bool) -> AsyncIterator[None]:
    """So many clients that wait for running jobs."""
    jobs = [await running_job(store) for _ in range(count)]
    asks = [
        request("GET", f"/v1/jobs/{job}/events" if i % 2 else f"/v1/jobs/{job}?wait=60")
        for i, (job, _) in enumerate(jobs)
    ]
    watching = await clients(server, asks)
    await asyncio.gather(*(c.begun for i, c in enumerate(watching) if i % 2))
    await asyncio.sleep(1.0)  # until the long polls wait, too

    async def emit() -> None:
        while True:
            job, fence = random.choice(jobs)
            await store.delta(job, "ar", fence, "text", {"text": "a red"})
            await asyncio.sleep(1 / 200)

    emitting = asyncio.create_task(emit()) if busy else None
    try:
        yield
    finally:
        if emitting is not None:
            emitting.cancel()
        await leave(store, watching, jobs)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"latency": {}, "fan_out": {}, "submits": {}}
    with durable_valkey(folder) as port:
        os.environ["OMNIQ_BROKER_URL"] = f"redis://127.0.0.1:{port}/0"
        get_settings.cache_clear()
        store = JobStore(connect())
        with serve(OMNIQ, port) as omniq, serve(BASELINES, port) as baselines:
            ways = {
                "omniq": (omniq, "/v1/jobs/{job}/events"),
                "XREAD each": (baselines, "/xread/{key}"),
            }
            found: dict[tuple[str, int], list[float]] = {}
            for _ in range(options.rounds):
                for count in options.watchers:
                    for name, (server, path) in ways.items():
                        samples = await latencies(
                            store, server, path, count, max(20, options.samples // options.rounds)
                        )
                        found.setdefault((name, count), []).extend(samples)
            for (name, count), samples in found.items():
                results["latency"].setdefault(name, {})[count] = summary(samples)
            results["emit"] = summary(await through_emit(store, omniq, 60))
            for count in options.watchers:
                results["fan_out"][count] = summary(await all_of_one(store, omniq, count, 30))
            rates: dict[str, list[Any]] = {"none": [], "waiting": [], "busy": []}
            for _ in range(options.rounds):
                for kind, runs in rates.items():
                    if kind == "none":
                        runs.append(await hammer(omniq, SUBMIT, 32, options.seconds))
                        continue
                    async with waiting(store, omniq, options.waiting, kind == "busy"):
                        runs.append(await hammer(omniq, SUBMIT, 32, options.seconds))
            for kind, runs in rates.items():
                results["submits"][kind] = {
                    "rate": statistics.median(r.rate for r in runs),
                    "server_cpu_us": statistics.median(
                        r.server_cpu / len(r.taken) * 1e6 for r in runs
                    ),
                    "p50_ms": statistics.median(r.ms(0.5) for r in runs),
                    "p99_ms": statistics.median(r.ms(0.99) for r in runs),
                    "of_none": statistics.median(
                        r.rate / n.rate for r, n in zip(runs, rates["none"], strict=True)
                    ),
                }
        await store.close()
    return results


def summary(samples: list[float]) -> dict[str, float]:
    return {
        "p50_ms": percentile(samples, 0.5) * 1e3,
        "p99_ms": percentile(samples, 0.99) * 1e3,
        "samples": len(samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--watchers", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = load()
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as folder:
        results = uvloop.run(measure(options, Path(folder)))
    print(f"load before {before:.1f}, after {load():.1f}")
    rows = [
        [f"{name}, {count} watchers", f"{r['p50_ms']:.2f}", f"{r['p99_ms']:.2f}"]
        for name, counts in results["latency"].items()
        for count, r in counts.items()
    ]
    emitted = results["emit"]
    rows.append(["omniq, an engine's emit", f"{emitted['p50_ms']:.2f}", f"{emitted['p99_ms']:.2f}"])
    rows += [
        [f"omniq, all {count} watch one job: the last", f"{r['p50_ms']:.2f}", f"{r['p99_ms']:.2f}"]
        for count, r in results["fan_out"].items()
    ]
    print(table(["emit to client", "p50 ms", "p99 ms"], rows))
    rows = [
        [
            kind,
            f"{r['rate']:.0f}",
            f"{r['p50_ms']:.1f}",
            f"{r['p99_ms']:.1f}",
            f"{r['server_cpu_us']:.0f}",
            f"{r['of_none']:.2f}",
        ]
        for kind, r in results["submits"].items()
    ]
    header = [f"submits, {options.waiting} clients wait", "req/s", "p50 ms", "p99 ms", "CPU µs"]
    print(table([*header, "of none"], rows))
    if options.json:
        write_json(options.json, {"machine": machine(), "load": before, "results": results})


if __name__ == "__main__":
    main()

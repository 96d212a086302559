"""Twice as many requests as the system can serve: what it still serves, and how soon.

    python benchmarks/overload.py [--seconds 600] [--calibrate 20] [--factor 2] [--json FILE]

One API process, one worker for each of two stages, of which the second is the bottleneck; one
Valkey with an append-only file. Capacity is measured by clients that ask again as soon as they have
their answer, before and after. In between requests come at a fixed rate whatever became of those
before (an open loop), and each is one ``POST /v1/jobs?wait=60``. A refused one does not come again.
Ends with 1 unless goodput is 90 % of the capacity, all that was accepted has succeeded with its own
answer, and all the rest was refused with ``Retry-After``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import redis
import uvloop
from common import load, machine, now, percentile, table, write_json
from front_common import HERE, OMNIQ, durable_valkey, request, serve

STAGES = ("quick", "slow")
CLIENTS = 32
PATIENCE = 60
IDLE = 30.0
"""Seconds after which a connection is not used again: the server closes it after 65."""


@dataclass
class Seen:
    """What clients got."""

    took: list[float] = field(default_factory=list)
    """Seconds of each request that succeeded."""
    ends: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """By limit."""
    refused_took: list[float] = field(default_factory=list)
    retry_after: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Client:
    """Requests over connections that are kept."""

    def __init__(self, port: int, seen: Seen) -> None:
        self.port, self.seen = port, seen
        self.idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, number: int) -> bool:
        """Whether it was served."""
        began = now()
        reader, writer = await self._connection()
        body = orjson.dumps({"pipeline": "overload", "input": {"number": str(number)}})
        writer.write(request("POST", f"/v1/jobs?wait={PATIENCE}", body))
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        found = orjson.loads(await reader.readexactly(int(headers["content-length"])))
        self.idle.append((now(), reader, writer))
        status = int(head.split(" ", 2)[1])
        return self._note(status, headers, found, number, began)

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The one that was used last and that the server has not closed since, or a new one."""
        while self.idle:
            unused_since, reader, writer = self.idle.pop()
            if now() - unused_since < IDLE and not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self.port)

    def _note(
        self, status: int, headers: dict[str, str], found: dict, number: int, began: float
    ) -> bool:
        seen, took = self.seen, now() - began
        if status == 200 and found["state"] == "succeeded":
            if found["values"] != {"number": str(number)}:
                seen.wrong.append(f"request {number} got {found['values']}")
            seen.took.append(took)
            seen.ends.append(now())
            return True
        if status == 503 and int(headers.get("retry-after", 0)) >= 1:
            seen.refused[found["limit"]] += 1
            seen.refused_took.append(took)
            seen.retry_after.append(int(headers["retry-after"]))
        else:
            seen.wrong.append(f"request {number}: {status} {json.dumps(found)[:200]}")
        return False

    def close(self) -> None:
        for _, _, writer in self.idle:
            writer.close()


async def closed_loop(port: int, seconds: float) -> float:
    """Requests a second that the system serves when it is never idle."""
    seen = Seen()
    client = Client(port, seen)
    end = now() + seconds

    async def one(first: int) -> None:
        number = first
        while now() < end:
            await client.ask(number)
            number += CLIENTS

    began = now()
    await asyncio.gather(*(one(i) for i in range(CLIENTS)))
    took = now() - began
    client.close()
    if seen.wrong or seen.refused:
        raise RuntimeError(f"while measuring capacity: {seen.wrong[:3]} {seen.refused}")
    return len(seen.took) / took


async def open_loop(port: int, rate: float, seconds: float) -> Seen:
    """What becomes of requests that come at that rate."""
    seen = Seen()
    client = Client(port, seen)
    tasks: set[asyncio.Task[bool]] = set()
    began, sent = now(), 0
    while now() - began < seconds:
        while sent < (now() - began) * rate:
            task = asyncio.create_task(client.ask(sent))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        await asyncio.sleep(0.002)
    end = now()
    await asyncio.gather(*tasks)
    client.close()
    if len(seen.took) + sum(seen.refused.values()) + len(seen.wrong) != sent:
        seen.wrong.append(f"of {sent} requests some had no answer")
    seen.ends = [t for t in seen.ends if t <= end]
    return seen


def until_ready(port: int) -> None:
    deadline = now() + 60
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/workers") as answer:
            states = {w["stage"]: w["state"] for w in json.load(answer)["workers"]}
        if all(states.get(stage) == "ready" for stage in STAGES):
            return
        if now() > deadline:
            raise TimeoutError(f"workers did not get ready: {states}")
        time.sleep(0.1)


async def measure(port: int, options: argparse.Namespace) -> tuple[list[float], float, Seen]:
    await closed_loop(port, 3)  # warm
    before = await closed_loop(port, options.calibrate)
    rate = options.factor * before
    seen = await open_loop(port, rate, options.seconds)
    after = await closed_loop(port, options.calibrate)
    return [before, after], rate, seen


def report(
    capacities: list[float], rate: float, seen: Seen, seconds: float, left: int
) -> tuple[dict, list[str]]:
    capacity = sum(capacities) / len(capacities)
    goodput = len(seen.ends) / seconds
    result = {
        "capacity": capacity,
        "capacities": capacities,
        "offered": rate,
        "goodput": goodput,
        "share": goodput / capacity,
        "p50_s": percentile(seen.took, 0.5),
        "p99_s": percentile(seen.took, 0.99),
        "max_s": max(seen.took),
        "accepted": len(seen.took),
        "refused": dict(seen.refused),
        "refused_p99_ms": percentile(seen.refused_took, 0.99) * 1e3,
        "retry_after_s": [min(seen.retry_after), max(seen.retry_after)],
    }
    faults = list(seen.wrong[:5])
    if result["share"] < 0.9:
        faults.append(f"goodput is {result['share']:.0%} of the capacity")
    if left:
        faults.append(f"{left} jobs are left unfinished")
    return result, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--calibrate", type=float, default=20.0)
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = load()
    with (
        tempfile.TemporaryDirectory(prefix="omniq-bench-") as folder,
        durable_valkey(Path(folder)) as broker,
    ):
        os.environ.update(
            OMNIQ_BROKER_URL=f"redis://127.0.0.1:{broker}/0",
            OMNIQ_PIPELINES=json.dumps([str(HERE / "overload.yaml")]),
            OMNIQ_RETENTION="60",
            PYTHONPATH=os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        )
        workers = []
        try:
            for stage in STAGES:
                with (Path(folder) / f"{stage}.log").open("wb") as log:
                    command = [sys.executable, "-m", "omniq", "worker", "--pipeline", "overload",
                               "--stage", stage, "--devices", "cpu"]  # fmt: skip
                    workers.append(subprocess.Popen(command, stdout=log, stderr=log))
            with serve(OMNIQ, broker) as server:
                until_ready(server.port)
                capacities, rate, seen = uvloop.run(measure(server.port, options))
                left = redis.Redis(port=broker).zcard("omniq:open:overload")
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait(20)
    result, faults = report(capacities, rate, seen, options.seconds, left)
    print(f"load before {before:.1f}, after {load():.1f}; {options.seconds:g} s, "
          f"{time.strftime('%Y-%m-%d')}")  # fmt: skip
    print(table(["what", "value"], [[k, str(v)] for k, v in result.items()]))
    for fault in faults:
        print("FAULT:", fault)
    if options.json:
        write_json(options.json, {"machine": machine(), "load": before, "results": result})
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""How soon a stage has worked through the first window of what the stage before it makes.

    python benchmarks/first_window.py --out first_window.json

A producer makes 50 chunks, 20 ms each, and a consumer takes 20 ms for each of them: once behind an
edge with ``trigger: window``, once behind a full one. Real worker processes and a real Valkey; the
two take turns. Times run from the job's acceptance to the consumer's word that its first window is
done (TTFP), and to the end of the job, all by the broker's and this machine's one clock.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import Times, load, machine, now, table, valkey, write_json

HERE = Path(__file__).parent
PIPELINES = ("full", "window")
STAGES = ("produce", "consume")
READY_SECONDS = 60.0


def pipeline(name: str, options: argparse.Namespace) -> str:
    """The YAML of one of the two pipelines."""
    window = name == "window"
    args = f"chunks: {options.chunks}, pace: {options.pace}, kb: {options.kb}"
    more = f", window: {options.window}" if window else ""
    edge = f", trigger: window, window: {options.window}" if window else ""
    stage = "engine_type: AR, model: none, max_in_flight: 4"
    engine = "first_window_engines"
    return f"""
name: {name}
inputs: {{prompt: {{type: text}}}}
stages:
  - {{stage_id: produce, engine: "{engine}:Produce", {stage}, engine_args: {{{args}{more}}}}}
  - {{stage_id: consume, engine: "{engine}:Consume", {stage},
     engine_args: {{{args}, first: {options.window}}}}}
edges:
  - {{from: input.prompt, to: produce.prompt}}
  - {{from: produce.chunks, to: consume.chunks{edge}}}
outputs: {{sum: {{from: consume.sum, type: text}}}}
"""


@contextmanager
def workers(folder: Path) -> Iterator[None]:
    """All four, ready."""
    code = (
        "import sys; from omniq_workers.main import run_worker; run_worker(*sys.argv[1:], ['cpu'])"
    )
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    running = []
    try:
        for name in PIPELINES:
            for stage in STAGES:
                log = folder / f"{name}.{stage}.log"
                with log.open("wb") as out:
                    process = subprocess.Popen(
                        [sys.executable, "-c", code, name, stage],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "PYTHONPATH": paths},
                    )
                running.append((process, log))
        deadline = now() + READY_SECONDS
        for process, log in running:
            while "stage_ready" not in log.read_text():
                if process.poll() is not None or now() > deadline:
                    raise RuntimeError(f"a worker is not ready:\n{log.read_text()}")
                asyncio.run(asyncio.sleep(0.05))
        yield
    finally:
        for process, _ in running:
            process.terminate()
        for process, _ in running:
            process.wait()


async def measure(name: str) -> tuple[float, float, str]:
    """Seconds to the first window and to the end of one job, and its result."""
    from omniq.jobs.store import JobStore
    from omniq.submit import submit

    store = JobStore.from_settings()
    try:
        job = await submit(store, pipeline=name, inputs={"prompt": "go"})
        first = end = None
        async for event in store.events(job.id):
            if event is not None and event.type == "stage.delta" and first is None:
                first = event.time - job.spec.created
            if event is not None and event.final:
                end = event.time - job.spec.created
        record = await store.get(job.id)
        if first is None or end is None or "sum" not in record.values:
            raise RuntimeError(f"the job did not succeed: {record}")
        return first, end, str(record.values["sum"])
    finally:
        await store.close()


def run(options: argparse.Namespace) -> dict[str, dict[str, Times]]:
    """Rounds of one job each."""
    seconds: dict[str, dict[str, list[list[float]]]] = {
        name: {"first": [], "total": []} for name in PIPELINES
    }
    asyncio.run(measure("window"))  # warm-up
    asyncio.run(measure("full"))
    for number in range(options.rounds):
        results = set()
        for name in PIPELINES:
            first, total, result = asyncio.run(measure(name))
            seconds[name]["first"].append([first])
            seconds[name]["total"].append([total])
            results.add(result)
        if len(results) != 1:
            raise RuntimeError(f"the two ways make different results: {results}")
        print(f"round {number + 1} of {options.rounds}, load {load():.1f}", file=sys.stderr)
    return {n: {k: Times(v) for k, v in kinds.items()} for n, kinds in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--chunks", type=int, default=50)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds a chunk, in both stages")
    parser.add_argument("--window", type=int, default=2, help="chunks of the first window")
    parser.add_argument("--kb", type=int, default=64, help="KB of tensor in each chunk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()

    before = load()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omniq-bench-")))
        socket = stack.enter_context(valkey())
        for name in PIPELINES:
            (folder / f"{name}.yaml").write_text(pipeline(name, options))
        os.environ["OMNIQ_BROKER_URL"] = f"redis+socket://{socket}"
        os.environ["OMNIQ_PIPELINES"] = f'["{folder}"]'
        stack.enter_context(workers(folder))
        times = run(options)

    least = {
        "full": (options.chunks + options.window) * options.pace,
        "window": 2 * options.window * options.pace,
    }
    least_total = {
        "full": 2 * options.chunks * options.pace,
        "window": (options.chunks + options.window) * options.pace,
    }
    rows = [
        [
            name,
            f"{times[name]['first'].median * 1e3:.0f}",
            f"{least[name] * 1e3:.0f}",
            f"{times[name]['total'].median * 1e3:.0f}",
            f"{least_total[name] * 1e3:.0f}",
        ]
        for name in PIPELINES
    ]
    header = ["trigger", "TTFP ms", "its least", "total ms", "its least"]
    print(table(header, rows))
    ratios = {
        kind: times["window"][kind].times_faster_than(times["full"][kind])
        for kind in ("first", "total")
    }
    print(f"windowed: first window {ratios['first']:.1f} × sooner, end {ratios['total']:.2f} ×")
    print(f"load before and after: {before:.1f}, {load():.1f} on {machine()['cores']} cores")
    if options.out:
        write_json(options.out, as_json(options, times, ratios, before))
    return 0


def as_json(
    options: argparse.Namespace,
    times: dict[str, dict[str, Times]],
    ratios: dict[str, float],
    load_before: float,
) -> dict[str, Any]:
    """Everything measured, in seconds."""
    return {
        "machine": machine(),
        "load": [load_before, load()],
        "chunks": options.chunks,
        "pace_s": options.pace,
        "window": options.window,
        "chunk_kb": options.kb,
        "times": {
            name: {
                kind: {"median_s": t.median, "rounds_s": [r[0] for r in t.rounds]}
                for kind, t in kinds.items()
            }
            for name, kinds in times.items()
        },
        "times_faster": ratios,
    }


if __name__ == "__main__":
    sys.exit(main())

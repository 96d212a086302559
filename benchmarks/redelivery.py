"""How long a task of a killed worker waits until another one runs it.

    python benchmarks/redelivery.py --kills 20

Two workers serve one stage, with settings as they come. A job runs on one of them, which is killed
(SIGKILL), stopped (SIGSTOP) or wedged (its engine loop blocks) at a random moment; measured is the
time from then until the engine of another worker is called for the job. The lost worker is replaced
before the next turn. Prints the distribution; exits with 1 if a job was lost or its p95 is above
``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import load, machine, percentile, valkey, write_json

YAML = """
name: redelivery
inputs: {prompt: {type: text}}
stages:
  - {stage_id: a, engine_type: AR, engine: "redelivery_engine:Sleeper", model: none,
     output_modalities: [text], max_in_flight: 4, retry: {max_deliveries: 100}}
edges: [{from: input.prompt, to: a.prompt}]
outputs: {text: {from: a.text, type: text}}
"""
#: Seconds of a run that is to be lost, and for which the next one is allowed.
RUN, PATIENCE = 60.0, 60.0


class Workers:
    """Two worker processes of the stage."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, 0
        self.alive: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.started += 1
        log = self.folder / f"worker-{self.started}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "omniq", "worker", "--pipeline", "redelivery",
                 "--stage", "a", "--devices", "cpu"],
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while "stage_ready" not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text(errors="replace"))
            time.sleep(0.05)
        self.alive[process.pid] = process

    def lose(self, pid: int, how: str) -> None:
        process = self.alive[pid]
        if how == "kill":
            process.kill()
        elif how == "stop":
            process.send_signal(signal.SIGSTOP)
        else:
            (self.folder / f"notes.wedge.{pid}").touch()  # its engine blocks the loop

    def bury(self, pid: int) -> None:
        process = self.alive.pop(pid)
        process.kill()
        process.wait()


def noted(notes: Path, job: str) -> list[tuple[float, int]]:
    lines = [line.split() for line in notes.read_text().splitlines()]
    return [(float(at), int(pid)) for at, pid, name in lines if name == job]


async def runs_of(notes: Path, job: str, count: int) -> list[tuple[float, int]]:
    """When and by which process the job was run, once that has happened so many times."""
    deadline = time.monotonic() + PATIENCE
    while True:
        ran = noted(notes, job)
        if len(ran) >= count:
            return ran
        if time.monotonic() > deadline:
            raise RuntimeError(f"job {job} was run {len(ran)} times, not {count}")
        await asyncio.sleep(0.005)


async def measure(args: argparse.Namespace, folder: Path) -> list[float]:
    from omniq.jobs.store import JobStore
    from omniq.submit import submit

    notes = folder / "notes"
    notes.touch()
    rng = random.Random(args.seed)
    store, workers = JobStore.from_settings(), Workers(folder)
    for _ in range(2):
        workers.start()
    times: list[float] = []
    try:
        for number in range(args.kills):
            job = await submit(store, pipeline="redelivery", inputs={"prompt": str(RUN)})
            ran = await runs_of(notes, job.id, 1)
            await asyncio.sleep(rng.uniform(0, 1.5))
            victim = ran[0][1]
            began = time.time()
            workers.lose(victim, args.how)
            ran = await runs_of(notes, job.id, 2)
            times.append(ran[1][0] - began)
            print(f"{number + 1}: {times[-1]:.2f} s", file=sys.stderr, flush=True)
            await store.cancel(job.id)
            workers.bury(victim)
            workers.start()
    finally:
        for pid in list(workers.alive):
            workers.bury(pid)
        await store.close()
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--how", choices=["kill", "stop", "wedge"], default="kill")
    parser.add_argument("--limit", type=float, default=5.0, help="Seconds that the p95 may take.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omniq-bench-") as name, valkey() as socket:
        folder = Path(name)
        (folder / "redelivery.yaml").write_text(YAML)
        (folder / "redelivery_engine.py").write_text(ENGINE)
        os.environ.update(
            OMNIQ_BROKER_URL=f"redis+socket://{socket}",
            OMNIQ_PIPELINES=json.dumps([str(folder / "redelivery.yaml")]),
            PYTHONPATH=f"{folder}:{os.environ.get('PYTHONPATH', '')}",
            REDELIVERY_NOTES=str(folder / "notes"),
        )
        times = asyncio.run(measure(args, folder))
    p50, p95 = statistics.median(times), percentile(times, 0.95)
    print(
        f"{args.how}: {len(times)} workers lost; the next run began after p50 {p50:.2f} s, "
        f"p95 {p95:.2f} s, at most {max(times):.2f} s, load {load():.1f}"
    )
    if args.out:
        data = {"how": args.how, "seconds": times, "p50": p50, "p95": p95, "machine": machine()}
        write_json(args.out, data)
    return 0 if p95 <= args.limit else 1


ENGINE = """
import asyncio, os, time
from omniq.engines.base import Engine, StageOutput

class Sleeper(Engine):
    name = "sleeper"

    async def load(self):
        self._wedging = asyncio.create_task(self._wedge())

    async def _wedge(self):
        flag = os.environ["REDELIVERY_NOTES"] + f".wedge.{os.getpid()}"
        while not os.path.exists(flag):
            await asyncio.sleep(0.02)
        time.sleep(600)

    async def warmup(self):
        pass

    async def run(self, request, inputs, emit):
        job = request.request_id.partition(".")[0]
        with open(os.environ["REDELIVERY_NOTES"], "a") as notes:
            notes.write(f"{time.time():.4f} {os.getpid()} {job}\\n")
        await asyncio.sleep(float(str(inputs["prompt"].value)))
        return StageOutput(values={"text": "done"})
"""

if __name__ == "__main__":
    sys.exit(main())

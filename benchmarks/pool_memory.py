"""What many large blobs leave behind: jobs through real workers and a small slab pool.

    python benchmarks/pool_memory.py --jobs 10000 --mb 16 --pool-mb 512 --idle 35 --out pool.json

Two stage workers and a Valkey of their own; each job passes one tensor of that size from the first
stage to the second, which reads every byte of it. Prints what /dev/shm, Redis and the workers hold
before the first job, after the last one, after ``--idle`` seconds (slabs that were not used for
30 s go back to the system), and when the workers have stopped. Exits with 1 if anything is left
that was not there before, or if a blob did not go through shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import load, machine, now, table, valkey, write_json

if TYPE_CHECKING:
    from omniq.jobs.store import JobStore

FOLDER = Path(__file__).parent
SHM = Path("/dev/shm")
STAGES = ("make", "check")
MB = 1 << 20
#: Seconds that ended jobs' records stay, which are no leak but keys.
RETENTION = 3
#: Growth of Redis' memory that is the allocator's and not a key's.
SLACK = 2 * MB


@dataclass(frozen=True, slots=True)
class Held:
    """What is held at one moment; bytes, except for counts."""

    shm_files: int
    shm_bytes: int
    redis_keys: int
    redis_bytes: int
    worker_fds: int
    worker_bytes: int


def own_memory(process: Path) -> int:
    """Bytes in RAM that a process (its folder in /proc) has for itself, without shared memory."""
    lines = (process / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class System:
    """The broker's client, two workers, and a sampler of the peaks."""

    def __init__(self, store: JobStore, namespace: str, logs: Path) -> None:
        self.store, self.namespace, self.logs = store, namespace, logs
        self.workers: list[subprocess.Popen[bytes]] = []
        self.peak_shm = self.peak_redis = 0

    def start(self) -> None:
        for stage in STAGES:
            with (self.logs / f"{stage}.log").open("wb") as log:
                command = [sys.executable, "-m", "omniq", "worker", "--pipeline", "pool-memory",
                           "--stage", stage, "--devices", "cpu"]  # fmt: skip
                self.workers.append(subprocess.Popen(command, stdout=log, stderr=log))

    async def ready(self) -> None:
        deadline = now() + 60
        for stage in STAGES:
            log = self.logs / f"{stage}.log"
            while "stage_ready" not in log.read_text():
                if now() > deadline:
                    raise TimeoutError(f"stage {stage} did not get ready:\n{log.read_text()}")
                await asyncio.sleep(0.05)

    def stop(self) -> list[int]:
        for worker in self.workers:
            worker.terminate()
        return [worker.wait(20) for worker in self.workers]

    def shm(self) -> tuple[int, int]:
        files = [p.stat() for p in SHM.glob(f"{self.namespace}.*")]
        return len(files), sum(s.st_blocks * 512 for s in files)

    async def held(self) -> Held:
        info = await self.store.redis.info("memory")
        processes = [Path(f"/proc/{w.pid}") for w in self.workers if w.poll() is None]
        found = await self.store.redis.keys("*")
        return Held(
            *self.shm(),
            # Who looks for lost messages at the moment comes and goes.
            redis_keys=sum(b":reconciler:" not in key for key in found),
            redis_bytes=info["used_memory"],
            worker_fds=sum(len(list((p / "fd").iterdir())) for p in processes),
            worker_bytes=sum(map(own_memory, processes)),
        )

    async def records_gone(self) -> None:
        """Wait until the records of ended jobs have expired, and leave the index too."""
        deadline = now() + 60 + RETENTION
        while (await self.store.list())[0] or await self.store.redis.keys("*:job:*"):
            if now() > deadline:
                left = (await self.store.redis.keys("*:job:*"))[:5]
                raise TimeoutError(f"jobs that do not go: {left}")
            await asyncio.sleep(0.2)

    async def sample(self) -> None:
        while True:
            info = await self.store.redis.info("memory")
            self.peak_shm = max(self.peak_shm, self.shm()[1])
            self.peak_redis = max(self.peak_redis, info["used_memory"])
            await asyncio.sleep(0.1)

    async def run(self, numbers: range, in_flight: int) -> None:
        from omniq.submit import submit

        rest = iter(numbers)

        async def client() -> None:
            for number in rest:
                job = await submit(
                    self.store, pipeline="pool-memory", inputs={"number": str(number)}
                )
                record = await self.store.wait(job.id, 120)
                assert record.values == {"number": str(number)}, record

        await asyncio.gather(*(client() for _ in range(in_flight)))

    async def puts(self) -> dict[str, int]:
        """Blobs that the first stage has written, by store; heard with its next heartbeat."""
        from omniq.jobs.workers import WorkerRegistry

        await asyncio.sleep(3)
        workers = await WorkerRegistry(self.store.redis).all()
        return next(w.blobs.puts for w in workers if w.stage == "make" and w.blobs)


async def measure(args: argparse.Namespace, namespace: str, logs: Path) -> dict[str, object]:
    from omniq.jobs.store import JobStore

    store = JobStore.from_settings()
    system = System(store, namespace, logs)
    system.start()
    try:
        await system.ready()
        await system.run(range(8), in_flight=8)  # scripts, connections, the pool's first slabs
        await system.records_gone()
        moments = {"before": await system.held()}
        sampler = asyncio.create_task(system.sample())
        began = now()
        await system.run(range(args.jobs), args.in_flight)
        seconds = now() - began
        sampler.cancel()
        puts = await system.puts()
        await system.records_gone()
        moments["after"] = await system.held()
        if args.idle:
            await asyncio.sleep(args.idle)
            moments["idle"] = await system.held()
        codes = await asyncio.to_thread(system.stop)
        moments["stopped"] = await system.held()
    finally:
        await asyncio.to_thread(system.stop)
        await store.close()
    return {
        "jobs": args.jobs,
        "mb": args.mb,
        "pool_mb": args.pool_mb,
        "in_flight": args.in_flight,
        "seconds": seconds,
        "puts": puts,
        "peak_shm_bytes": system.peak_shm,
        "peak_redis_bytes": system.peak_redis,
        "moments": {name: asdict(held) for name, held in moments.items()},
        "exit_codes": codes,
        "faults": faults(args, moments, puts, system.peak_shm, codes),
    }


def faults(
    args: argparse.Namespace,
    moments: dict[str, Held],
    puts: dict[str, int],
    peak_shm: int,
    codes: list[int],
) -> list[str]:
    """What should not be."""
    before, after, stopped = moments["before"], moments["after"], moments["stopped"]
    idle = moments.get("idle")
    checks = {
        f"a blob did not go through shared memory: {puts}": puts
        == {"shm": args.jobs + 8, "redis": 0},
        f"the pool grew to {peak_shm} bytes": peak_shm <= args.pool_mb * MB + 2 * 4096,
        "files are left in /dev/shm": stopped.shm_files == 0,
        "keys are left in Redis": after.redis_keys <= before.redis_keys,
        "keys are left in Redis by stopped workers": stopped.redis_keys <= before.redis_keys,
        "Redis' memory has grown": after.redis_bytes <= before.redis_bytes + SLACK,
        "idle workers keep shared memory": idle is None or idle.shm_bytes <= len(STAGES) * 4096,
        "idle workers keep open files": idle is None or idle.worker_fds <= before.worker_fds,
        f"a worker ended with {codes}": codes == [0] * len(STAGES),
    }
    return [text for text, fine in checks.items() if not fine]


def report(found: dict[str, object]) -> str:
    """The table."""
    moments = found["moments"]
    assert isinstance(moments, dict)
    rows = [
        (
            name,
            str(m["shm_files"]),
            f"{m['shm_bytes'] / MB:.2f}",
            str(m["redis_keys"]),
            f"{m['redis_bytes'] / MB:.2f}",
            str(m["worker_fds"]),
            f"{m['worker_bytes'] / MB:.0f}",
        )
        for name, m in moments.items()
    ]
    header = ("", "files in shm", "MB in shm", "keys", "MB in Redis", "worker fds", "worker MB")
    return table(header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--mb", type=int, default=16, help="size of a tensor")
    parser.add_argument("--pool-mb", type=int, default=512)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--idle", type=float, default=35.0, help="seconds to wait at the end")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    namespace = f"bench{secrets.token_hex(6)}"
    with valkey() as socket, tempfile.TemporaryDirectory(prefix="omniq-bench-") as logs:
        os.environ.update(
            OMNIQ_BROKER_URL=f"redis+socket://{socket}",
            OMNIQ_NAMESPACE=namespace,
            OMNIQ_PIPELINES=json.dumps([str(FOLDER / "pool_memory.yaml")]),
            OMNIQ_SHM_MAX_BYTES=str(args.pool_mb * MB),
            OMNIQ_RETENTION=str(RETENTION),
            OMNIQ_TOMBSTONES="0",
            POOL_MEMORY_BYTES=str(args.mb * MB),
            PYTHONPATH=os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
        )
        found = asyncio.run(measure(args, namespace, Path(logs)))
    print(report(found))
    print(
        f"{args.jobs} jobs of {args.mb} MB in {found['seconds']:.0f} s, "
        f"{args.in_flight} in flight; blobs written: {found['puts']}; "
        f"at most {found['peak_shm_bytes'] / MB:.0f} MB in shm, "
        f"{found['peak_redis_bytes'] / MB:.1f} MB in Redis"
    )
    found |= {"machine": machine(), "load": load(), "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    if args.out:
        write_json(args.out, found)
    for fault in found["faults"]:
        print("FAULT:", fault)
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())

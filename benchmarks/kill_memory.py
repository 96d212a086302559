"""What killed processes leave behind: producers and consumers of blobs, killed at random points.

    python benchmarks/kill_memory.py --kills 1000 --out kills.json

Processes do what stage workers do with a job: record it, begin a stage, write its blob to shared
memory or Redis, finish the stage, read the blob in the next one, finish that, free what the script
hands back; some jobs are cancelled, and all processes collect garbage now and then. One after the
other is killed (SIGKILL) at a random moment, also while it starts, and replaced; two are never
killed. Then the jobs that lost their processes are cancelled and the dead are swept.

Prints what is left. Exits with 1 if that is a file in /dev/shm, a key in Redis (records have a time
to live, which is waited for) or an open file of a survivor;
or if a consumer read anything but what was written.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import load, machine, now, table, valkey, write_json

if TYPE_CHECKING:
    from omniq.blobs import BlobRouter
    from omniq.jobs.store import JobStore

SHM = Path("/dev/shm")
KB, MB = 1 << 10, 1 << 20
SIZES = [64, 5 * KB, 300 * KB, 4 * MB]
POOL = 512 * MB
#: Seconds that records of ended jobs stay.
RETENTION = 3
#: Seconds that blobs may stay in Redis which the dead have written and not recorded.
SWEPT = 20
IDLE_SECONDS = 0.5
COLLECT_EVERY = 0.3
#: Jobs between producers and consumers, so that one does not run away from the other.
MOST_WAITING = 64
CONTEXT = multiprocessing.get_context("forkserver")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def make_router() -> BlobRouter:
    """As :meth:`BlobRouter.from_settings`, except that unused slabs go back sooner."""
    from omniq.blobs import BlobRouter, RedisStore, SlabStore, host_identity
    from omniq.settings import get_settings

    host, namespace = host_identity(), get_settings().namespace
    slabs = SlabStore(SHM, namespace, host, POOL, idle_seconds=IDLE_SECONDS)
    return BlobRouter(host, slabs, RedisStore.from_settings())


def queue() -> str:
    from omniq.settings import get_settings

    return f"{get_settings().namespace}:waiting"


def taken_by(process: int | None) -> str:
    """Messages that a consumer has not done with."""
    return f"{queue()}:{process}"


class Player:
    """What producers and consumers share: stores, a wish to stop, garbage now and then."""

    def __init__(self, connection: Connection, seed: int) -> None:
        import torch

        from omniq.jobs.store import JobStore

        torch.set_num_threads(1)
        self.connection, self.rng = connection, random.Random(seed)
        self.store, self.router = JobStore.from_settings(), make_router()
        self.collected = now()
        self.views: deque[Any] = deque(maxlen=4)

    async def play(self, turn: Callable[[Player], Any]) -> None:
        """Take turns until told to rest; then say how many files are open, and leave when told."""
        self.warm_up()
        await self.store.redis.llen(queue())
        await self.store.stop_stage("warm", "a", 1)  # scripts have a connection of their own
        self.connection.send(("up", open_files()))
        while not self.connection.poll():
            await turn(self)
            if now() > self.collected + COLLECT_EVERY:
                await asyncio.to_thread(self.router.collect)
                self.collected = now()
        self.connection.recv()
        self.views.clear()
        self.connection.send("resting")
        while not self.connection.poll(COLLECT_EVERY):
            self.router.collect()
        self.connection.recv()
        self.router.collect()
        self.connection.send(open_files())
        self.router.spill()
        self.router.close()
        await self.store.close()

    def warm_up(self) -> None:
        """Open what stays open: the owner's lock, connections, the threads of asyncio."""
        ref = self.router.put("warm.a.1.up", filled(1, 64), consumers_local=True)
        self.router.get(ref)
        self.router.delete(ref)
        ref = self.router.put("warm.a.1.up", filled(1, 64), consumers_local=False)
        self.router.delete(ref)
        time.sleep(IDLE_SECONDS)
        self.router.collect()


def filled(number: int, nbytes: int) -> dict[str, Any]:
    import torch

    return {"x": torch.full((nbytes // 8,), number, dtype=torch.int64)}


async def produce(self: Player) -> None:
    """One job up to the end of its first stage."""
    from omniq.jobs.model import JobSpec, StageResult, new_job_id

    if await self.store.redis.llen(queue()) > MOST_WAITING:
        await asyncio.sleep(0.01)
        return
    moment = time.time()
    number = self.rng.randrange(1 << 40)
    spec = JobSpec(
        id=new_job_id(moment), pipeline="p", inputs={"number": str(number)}, parameters={},
        stages=["a", "b"], created=moment,
    )  # fmt: skip
    await self.store.create(spec, {"a": [], "b": ["a"]})
    grant = await self.store.begin_stage(spec.id, "a", str(os.getpid()), redelivered=False)
    ref = self.router.put(
        f"{spec.id}.a.{grant.fence}.out",
        filled(number, self.rng.choice(SIZES)),
        consumers_local=self.rng.random() < 0.8,
    )
    result = StageResult(outputs={"out": {"blob": ref.model_dump()}}, blobs=[ref])
    if self.rng.random() < 0.1:
        await self.store.cancel(spec.id)
    if await self.store.finish_stage(spec.id, "a", grant.fence, result, host=self.router.host):
        await self.store.redis.lpush(queue(), spec.id)
    else:
        self.router.delete(ref)
        await self.store.stop_stage(spec.id, "a", grant.fence)


async def consume(self: Player) -> None:
    """The second stage of a job, late acknowledgement included."""
    taken = taken_by(os.getpid())
    message = await self.store.redis.blmove(queue(), taken, 0.1, "RIGHT", "LEFT")
    if message is not None:
        job_id, _, again = message.decode().partition(" ")
        await second_stage(self, job_id, redelivered=bool(again))
        await self.store.redis.delete(taken)


async def second_stage(self: Player, job_id: str, *, redelivered: bool) -> None:
    """Read what the first one wrote."""
    from omniq.blobs import BlobRef
    from omniq.errors import BlobNotFound
    from omniq.jobs.model import StageResult, Verdict

    grant = await self.store.begin_stage(job_id, "b", str(os.getpid()), redelivered=redelivered)
    if grant.verdict is not Verdict.RUN:
        return
    assert grant.spec is not None
    ref = BlobRef.model_validate(grant.upstream["a"]["out"]["blob"])
    try:
        tensor = self.router.get(ref)["x"]
    except BlobNotFound as exc:
        raise AssertionError(f"the blob of an unfinished job is gone: {ref}") from exc
    number = int(grant.spec.inputs["number"])
    assert bool((tensor == number).all()), f"{ref.id} does not hold {number} everywhere"
    self.views.append((tensor, number))
    for view, expected in self.views:
        assert int(view[0]) == int(view[-1]) == expected, "a view has changed"
    done = await self.store.finish_stage(
        job_id, "b", grant.fence, StageResult(outputs={}, blobs=[]), host=self.router.host
    )
    if not done:
        await self.store.stop_stage(job_id, "b", grant.fence)
    assert self.router.shm is not None
    for entry in done.garbage:
        self.router.shm.delete(BlobRef.from_json(entry))


TURNS = {"producer": produce, "consumer": consume}


def play(connection: Connection, role: str, seed: int) -> None:
    """A process's body."""
    asyncio.run(Player(connection, seed).play(TURNS[role]))


def start(role: str, seed: int) -> tuple[str, BaseProcess, Connection]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=play, args=(theirs, role, seed), daemon=True)
    process.start()
    theirs.close()
    return role, process, ours


def slaughter(kills: int, each: int) -> Counter[str]:
    """Kill that many processes of a crowd of so many producers and consumers, and the crowd."""
    import redis

    from omniq.settings import get_settings

    client = redis.Redis.from_url(get_settings().redis_url)
    rng = random.Random(kills)
    done: Counter[str] = Counter()
    seeds = iter(range(1, 1 << 30))
    crowd = [start(role, next(seeds)) for role in TURNS for _ in range(each)]
    try:
        for number in range(kills):
            role, process, connection = victim = crowd.pop(rng.randrange(len(crowd)))
            starting = rng.random() < 0.1
            if not starting:
                connection.poll(60)
            time.sleep(rng.uniform(0, 0.1))
            crowd.append(start(role, next(seeds)))
            process.kill()
            process.join()
            while message := client.lpop(taken_by(process.pid)):
                client.rpush(queue(), message.split()[0] + b" again")
                done["jobs delivered again"] += 1
            if process.exitcode != -signal.SIGKILL:
                done[f"a {role} ended by itself with {process.exitcode}"] += 1
            done[f"{role}s killed" + (" while starting" if starting else "")] += 1
            victim[2].close()
            if (number + 1) % 100 == 0:
                print(f"{number + 1} killed", file=sys.stderr, flush=True)
    finally:
        for _, process, connection in crowd:
            process.kill()
            process.join()
            connection.close()
        client.close()
    return done


async def cancel_all(store: JobStore) -> int:
    """Cancel the jobs that lost their processes."""
    from omniq.jobs.model import JobState

    open_states = [s for s in JobState if not s.final]
    cancelled, cursor = 0, None
    while True:
        records, cursor = await store.list(states=open_states, limit=200, cursor=cursor)
        for record in records:
            await store.cancel(record.spec.id)
            # Nobody runs its stage any more who could say that it stopped.
            for stage, run in record.stages.items():
                if run.state == "running":
                    await store.begin_stage(record.spec.id, stage, "nobody", redelivered=True)
        cancelled += len(records)
        if cursor is None:
            return cancelled


def files(namespace: str) -> list[Path]:
    return list(SHM.glob(f"{namespace}.*"))


def megabytes(namespace: str) -> float:
    return round(sum(p.stat().st_blocks * 512 for p in files(namespace)) / MB, 1)


async def measure(args: argparse.Namespace, namespace: str) -> dict[str, Any]:
    from omniq.jobs.store import JobStore

    survivors = [start(role, -number) for number, role in enumerate(TURNS)]
    opened = [connection.recv()[1] for _, _, connection in survivors]
    store, router = JobStore.from_settings(), make_router()
    began = now()
    killed = await asyncio.to_thread(slaughter, args.kills, args.each)
    seconds = now() - began
    for _, _, connection in survivors:
        connection.send("rest")
    for _, _, connection in survivors:
        assert connection.recv() == "resting"
    left = {
        "files in /dev/shm": len(files(namespace)),
        "MB in /dev/shm": megabytes(namespace),
        "keys in Redis": len(await store.redis.keys("*")),
    }
    await store.redis.delete(queue(), *await store.redis.keys(f"{queue()}:*"))
    cancelled = await cancel_all(store)
    await asyncio.sleep(2 * IDLE_SECONDS)
    swept = await asyncio.to_thread(router.collect)
    for _, _, connection in survivors:
        connection.send("end")
    ended = [connection.recv() for _, _, connection in survivors]
    for _, process, _ in survivors:
        process.join(20)
    deadline = now() + SWEPT
    while (orphans := len(await store.redis.keys(f"{namespace}:blob*"))) and now() < deadline:
        swept += await asyncio.to_thread(router.collect)
        await asyncio.sleep(0.2)
    deadline = now() + 60
    while (await store.list())[0] or await store.redis.keys("*"):
        if now() > deadline:
            break
        await asyncio.sleep(0.2)
    keys = [k.decode() for k in await store.redis.keys("*")]
    router.close()
    await store.close()
    faults = [text for text in killed if "by itself" in text]
    faults += [f"left in /dev/shm: {p.name}" for p in files(namespace)]
    faults += [f"left in Redis: {k}" for k in keys]
    if orphans:
        faults.append(f"{orphans} keys of blobs in Redis after {SWEPT} s")
    faults += [
        f"a {role} that lived has {after} files open, {before} before"
        for (role, _, _), before, after in zip(survivors, opened, ended, strict=True)
        if after > before
    ]
    faults += [
        f"a {role} that lived ended with {process.exitcode}"
        for role, process, _ in survivors
        if process.exitcode
    ]
    return {
        "kills": args.kills,
        "seconds": seconds,
        "killed": dict(killed),
        "left_by_the_dead": left,
        "cancelled": cancelled,
        "swept_blobs": swept,
        "redis_blobs_left": orphans,
        "left_after_the_sweep": {
            "files in /dev/shm": len(files(namespace)),
            "MB in /dev/shm": megabytes(namespace),
            "keys in Redis": len(keys),
        },
        "open_files_of_survivors": {"before": opened, "after": ended},
        "faults": faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--each", type=int, default=3, help="producers, and consumers, at a time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    namespace = f"bench{secrets.token_hex(6)}"
    with valkey() as socket:
        os.environ.update(
            OMNIQ_BROKER_URL=f"redis+socket://{socket}",
            OMNIQ_NAMESPACE=namespace,
            OMNIQ_RETENTION=str(RETENTION),
            OMNIQ_TOMBSTONES="0",
        )
        CONTEXT.set_forkserver_preload(["torch", "omniq.blobs.router", "omniq.blobs.slabs.forms",
                                        "omniq.jobs.store"])  # fmt: skip
        found = asyncio.run(measure(args, namespace))
    left, after = found["left_by_the_dead"], found["left_after_the_sweep"]
    rows = [(name, str(left[name]), str(after[name])) for name in left]
    print(table(("", "when all were dead", "after the sweep"), rows))
    opened = found["open_files_of_survivors"]
    print(
        f"{args.kills} killed in {found['seconds']:.0f} s ({found['killed']}); "
        f"{found['cancelled']} jobs cancelled, {found['swept_blobs']} blobs swept, "
        f"{found['redis_blobs_left']} blobs in Redis left; "
        f"open files of survivors: {opened['before']} before, {opened['after']} after"
    )
    found |= {"machine": machine(), "load": load(), "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    if args.out:
        write_json(args.out, found)
    for fault in found["faults"]:
        print("FAULT:", fault)
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())

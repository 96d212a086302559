"""What an API keeps after many requests: memory, descriptors and threads of its process, keys."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import httpx
import psutil
import redis
from fuzz_system import KEY

#: Descriptors and threads that pools of connections and of workers may add after the warm-up.
ROOM = 64
#: Bytes of memory that may be added after the warm-up: caches that are not full by then.
MEMORY = 96 << 20


@dataclass(frozen=True)
class Held:
    """What the API's process holds at a moment: bytes of resident memory, and counts."""

    rss: int
    descriptors: int
    threads: int

    @classmethod
    def by(cls, pid: int) -> Held:
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(process.memory_info().rss, process.num_fds(), process.num_threads())

    def __str__(self) -> str:
        return f"{self.rss >> 20} MiB, {self.descriptors} descriptors, {self.threads} threads"

    def leaks(self, warm: Held) -> list[str]:
        """What has grown since the warm-up by more than it may."""
        faults = []
        if self.rss > warm.rss + MEMORY:
            faults.append(f"memory grew from {warm.rss >> 20} to {self.rss >> 20} MiB")
        for name in ("descriptors", "threads"):
            before, after = getattr(warm, name), getattr(self, name)
            if after > before + ROOM:
                faults.append(f"{name} grew from {before} to {after}")
        return faults


def cancel_all(url: str, broker: redis.Redis, namespace: str = "omniq") -> int:
    """End every open job by the API; returns how many there were."""
    ended = 0
    with httpx.Client(base_url=url, headers=KEY, timeout=60) as client:
        for job_id in broker.zrange(f"{namespace}:jobs", 0, -1):
            ended += client.post(f"/v1/jobs/{job_id.decode()}/cancel").status_code < 300
    return ended


def still_open(url: str, patience: float) -> list[str]:
    """Jobs that have not ended some seconds after all were cancelled."""
    until = time.monotonic() + patience
    asked = {"state": ["queued", "running", "cancelling"], "limit": 200}
    with httpx.Client(base_url=url, headers=KEY, timeout=60) as client:
        while jobs := client.get("/v1/jobs", params=asked).json()["jobs"]:
            if time.monotonic() > until:
                return [client.get(job["urls"]["self"]).text for job in jobs]
            time.sleep(0.2)
    return []


def drop_letters(url: str) -> None:
    """Give up all dead letters, which are kept longer than other jobs."""
    with httpx.Client(base_url=url, headers=KEY, timeout=60) as client:
        while letters := client.get("/v1/dlq").json()["dead_letters"]:
            for letter in letters:
                client.delete(f"/v1/dlq/{letter['id']}")


def keys_of_jobs(broker: redis.Redis) -> Counter[str]:
    """Keys that belong to one job, by what they are."""
    found: Counter[str] = Counter()
    for key in broker.scan_iter(match="*{*}*", count=1000):
        head, _, rest = key.decode("utf-8", "replace").partition("{")
        found[f"{head}{{}}{rest.partition('}')[2]}"] += 1
    return found


def keys_left(broker: redis.Redis, patience: float) -> Counter[str]:
    """Keys of jobs that are still there some seconds after the last job has ended."""
    until = time.monotonic() + patience
    while (left := keys_of_jobs(broker)) and time.monotonic() < until:
        time.sleep(0.2)
    return left

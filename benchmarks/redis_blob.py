"""A tensor into Redis and out again: omniq's Redis store against redis-py with safetensors.

    python benchmarks/redis_blob.py --out redis_blob.json

One process puts a tensor and gets it back, with one torch thread; Valkey runs where it likes. All
ways take turns, tensor by tensor, so that other load meets all of them; a ratio is the median over
rounds. The bound is RESP by hand: ``sendmsg`` of the tensor's memory as one value, ``recv_into``
new memory, no header, no checksum, no time to live, no limit of what one command holds.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import redis
import torch
from common import Times, load, machine, now, table, valkey, write_json
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from omniq.blobs import BlobRef
from omniq.blobs.redis import RedisStore

KB, MB = 1 << 10, 1 << 20
#: Size -> puts and gets a round.
COUNTS = {64 * KB: 100, MB: 50, 16 * MB: 8, 128 * MB: 2}
WARM_UP = 1
OURS, PLAIN, BOUND = "omniq", "redis-py + safetensors", "raw RESP (bound)"
#: Of the store, at 16 MB: times as fast as PLAIN, and as BOUND.
GOALS = {PLAIN: 4.0, BOUND: 0.8}


@dataclass(frozen=True, slots=True)
class Server:
    """Where Valkey listens; ``port`` is 0 for its Unix socket."""

    path: str
    port: int = 0

    def client(self) -> redis.Redis:
        if self.port:
            return redis.Redis(port=self.port)
        return redis.Redis(unix_socket_path=self.path)


class Way:
    """Base: a way to put a tensor and get it back."""

    def put(self, tensor: torch.Tensor) -> object:
        raise NotImplementedError

    def get(self, key: object) -> torch.Tensor:
        raise NotImplementedError

    def free(self, key: object) -> None:
        raise NotImplementedError


class Omniq(Way):
    """The Redis store."""

    def __init__(self, server: Server) -> None:
        self.store = RedisStore(server.client(), ttl=600.0, max_bytes=1 << 30)
        if server.port:  # or it would find the Unix socket
            self.store._wires._looked = True

    def put(self, tensor: torch.Tensor) -> object:
        return self.store.put("job.stage.1.out", {"hidden_states": tensor})

    def get(self, key: object) -> torch.Tensor:
        assert isinstance(key, BlobRef)
        return self.store.get(key)["hidden_states"]

    def free(self, key: object) -> None:
        assert isinstance(key, BlobRef)
        assert self.store.delete(key)


class Plain(Way):
    """What one would write: ``SET`` of ``safetensors.torch.save``, ``GET``, ``load``."""

    def __init__(self, server: Server) -> None:
        self.client = server.client()

    def put(self, tensor: torch.Tensor) -> object:
        self.client.set("plain", save_safetensors({"hidden_states": tensor}), ex=600)
        return "plain"

    def get(self, key: object) -> torch.Tensor:
        data = self.client.get("plain")
        assert isinstance(data, bytes)
        return load_safetensors(data)["hidden_states"]

    def free(self, key: object) -> None:
        assert self.client.unlink("plain")


class Raw(Way):
    """The bound; dtype and shape are known beforehand."""

    def __init__(self, server: Server) -> None:
        if server.port:
            self.socket = socket.create_connection(("127.0.0.1", server.port))
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(server.path)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        self.client = server.client()

    def put(self, tensor: torch.Tensor) -> object:
        data = memoryview(tensor.numpy()).cast("B")
        head = b"*3\r\n$3\r\nSET\r\n$3\r\nraw\r\n$%d\r\n" % len(data)
        views = [memoryview(head), data, memoryview(b"\r\n")]
        while views:
            sent = self.socket.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]
        assert self.socket.recv(64) == b"+OK\r\n"
        return tensor.shape

    def get(self, key: object) -> torch.Tensor:
        assert isinstance(key, torch.Size)
        nbytes = key.numel() * 2
        head = b"$%d\r\n" % nbytes
        self.socket.sendall(b"*2\r\n$3\r\nGET\r\n$3\r\nraw\r\n")
        assert self.socket.recv(len(head), socket.MSG_WAITALL) == head
        data = torch.empty(key, dtype=torch.float16)
        view = memoryview(data.numpy()).cast("B")
        while view:
            view = view[self.socket.recv_into(view) :]
        assert self.socket.recv(2, socket.MSG_WAITALL) == b"\r\n"
        return data

    def free(self, key: object) -> None:
        assert self.client.unlink("raw")


def make(nbytes: int) -> torch.Tensor:
    raw = torch.randint(0, 30000, (nbytes // 2,), dtype=torch.int16)
    return raw.view(torch.float16).view(-1, 64)


def measure(way: Way, source: torch.Tensor) -> tuple[float, float]:
    """Seconds of one put and of one get."""
    tensor = source.clone()
    begin = now()
    key = way.put(tensor)
    middle = now()
    got = way.get(key)
    end = now()
    assert torch.equal(got, source), "something else was read"
    way.free(key)
    return middle - begin, end - middle


@dataclass(frozen=True, slots=True)
class Result:
    """Times of one way at one size."""

    put: Times
    get: Times
    both: Times


def run(ways: dict[str, Way], sizes: list[int], rounds: int) -> dict[int, dict[str, Result]]:
    """Let all take turns; size -> way -> times."""
    taken: dict[int, dict[str, list[tuple[list[float], list[float]]]]] = {
        size: {name: [] for name in ways} for size in sizes
    }
    names = list(ways)
    for number in range(rounds):
        for size in sizes:
            source = make(size)
            for name in names:
                taken[size][name].append(([], []))
            for turn in range(-WARM_UP, COUNTS.get(size, 20)):
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    times = measure(ways[name], source)
                    if turn >= 0:
                        for samples, seconds in zip(taken[size][name][-1], times, strict=True):
                            samples.append(seconds)
        print(f"round {number + 1} of {rounds}, load {load():.1f}", file=sys.stderr, flush=True)
    return {
        size: {
            name: Result(
                Times([puts for puts, _ in samples]),
                Times([gets for _, gets in samples]),
                Times([[p + g for p, g in zip(*both, strict=True)] for both in samples]),
            )
            for name, samples in by_name.items()
        }
        for size, by_name in taken.items()
    }


def compared(results: dict[str, Result], name: str) -> dict[str, float]:
    """How many times as fast as the others on the same kind of socket."""
    kind = name.rpartition(", ")[2].removesuffix(" AOF")
    return {
        other: results[name].both.times_faster_than(results[f"{other}, {kind}"].both)
        for other in (PLAIN, BOUND)
    }


def report(results: dict[int, dict[str, Result]]) -> str:
    """The table of each size."""
    parts = []
    for size, by_name in results.items():
        header = ["way", "put ms", "get ms", "both ms", "p99 ms", f"× {PLAIN}", "× bound"]
        rows = [
            [
                name,
                *(f"{t.median * 1e3:.2f}" for t in (result.put, result.get, result.both)),
                f"{result.both.p99 * 1e3:.2f}",
                *(f"{ratio:.2f}" for ratio in compared(by_name, name).values()),
            ]
            for name, result in by_name.items()
        ]
        parts.append(f"{size // KB} KB\n{table(header, rows)}")
    return "\n\n".join(parts)


def goals(results: dict[int, dict[str, Result]]) -> dict[str, bool]:
    """What the store has to reach, at 16 MB."""
    by_name = results.get(16 * MB, {})
    return {
        f"16 MB, {kind}: {ratio:.2f} x {other}, at least {GOALS[other]}": ratio >= GOALS[other]
        for kind in ("unix", "tcp")
        if f"{OURS}, {kind}" in by_name
        for other, ratio in compared(by_name, f"{OURS}, {kind}").items()
    }


def as_json(results: dict[int, dict[str, Result]], load_before: float) -> dict[str, object]:
    """Everything measured, in seconds."""
    return {
        "machine": machine(),
        "load": [load_before, load()],
        "sizes": {
            size: {
                name: {
                    "put_median_s": result.put.median,
                    "get_median_s": result.get.median,
                    "both_median_s": result.both.median,
                    "both_p99_s": result.both.p99,
                    "times_as_fast_as": compared(by_name, name),
                }
                for name, result in by_name.items()
            }
            for size, by_name in results.items()
        },
        "goals": goals(results),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(COUNTS), help="bytes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--check", action="store_true", help="fail if a goal is missed")
    options = parser.parse_args()

    torch.set_num_threads(1)
    before = load()
    makers: dict[str, Callable[[Server], Way]] = {OURS: Omniq, PLAIN: Plain, BOUND: Raw}
    with ExitStack() as stack:
        port = free_port()
        path = stack.enter_context(valkey("--port", str(port)))
        durable = stack.enter_context(valkey("--appendonly", "yes", "--appendfsync", "everysec"))
        servers = {"unix": Server(path), "tcp": Server(path, port)}
        ways = {
            f"{name}, {kind}": maker(server)
            for kind, server in servers.items()
            for name, maker in makers.items()
        }
        ways[f"{OURS}, unix AOF"] = Omniq(Server(durable))
        results = run(ways, options.sizes, options.rounds)

    reached = goals(results)
    print(report(results))
    print()
    for goal, met in reached.items():
        print(f"{'reached' if met else 'MISSED '}  {goal}")
    print(f"load before and after: {before:.1f}, {load():.1f} on {machine()['cores']} cores")
    if options.out:
        write_json(options.out, as_json(results, before))
    return int(options.check and not all(reached.values()))


if __name__ == "__main__":
    sys.exit(main())

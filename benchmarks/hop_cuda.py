"""Tensors on a GPU through shared memory: from the device into a slab, to a view, to a device.

    python benchmarks/hop_cuda.py --out hop_cuda.json

``device -> slab -> host`` is what a consumer on the CPU gets: the producer puts a tensor that lies
on the device, the consumer (a reader of its own, as another process has) maps it. ``device -> slab
-> device`` adds the consumer's copy to its device. Against them:

- ``cpu() + memcpy``: what a store without registered memory does, ``tensor.cpu()`` and a copy into
  warm shared memory; and the same with the copy back to a device;
- ``pinned copy (bound)``: one copy of the device's DMA engine into pinned memory of torch's, what
  the link can do; and one back from there.

Every first and last result is compared with what was sent. Times are of whole calls, the device
idle before and after; all take turns in rounds, a ratio is the median over rounds. Needs torch with
CUDA, numpy, pydantic, pydantic-settings, orjson, redis; no broker. Exits with 2 where there is no
CUDA device.
"""

from __future__ import annotations

import argparse
import mmap
import secrets
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from common import Times, load, machine, now, table, write_json

KB, MB = 1 << 10, 1 << 20
#: Size -> transfers a round.
TRANSFERS = {64 * KB: 50, MB: 50, 16 * MB: 20, 128 * MB: 8, 1024 * MB: 3}
WARM_UP = 3
HOST, DEVICE = "host", "device"


class Way(Protocol):
    """One way from a tensor on the device to a tensor on the host, or on the device again."""

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory that may be read until :meth:`done`."""

    def device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device."""

    def done(self) -> None:
        """The result is not read any more."""

    def close(self) -> None:
        """Leave nothing."""


class Slabs:
    """omniq's store: the producer's and the consumer's."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        from omniq.blobs.slabs import SlabStore

        namespace = f"bench{secrets.token_hex(6)}"
        self.stores = [SlabStore(folder, namespace, "host", 4 * nbytes + 16 * MB) for _ in range(2)]
        self.ref: Any = None

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        producer, consumer = self.stores
        self.ref = producer.put("job.stage.1.out", {"t": tensor})
        return consumer.get(self.ref)["t"]

    def device(self, tensor: torch.Tensor) -> torch.Tensor:
        view = self.host(tensor)
        return view.to(tensor.device)

    def done(self) -> None:
        self.stores[1].delete(self.ref)

    def close(self) -> None:
        for store in self.stores:
            store.close()


class Plain:
    """``tensor.cpu()``, then a copy into shared memory that is warm, but not registered."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        path = folder / f"bench{secrets.token_hex(6)}"
        with path.open("w+b") as file:
            path.unlink()
            file.truncate(nbytes)
            self.shared = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
        self.shared.zero_()

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.shared.view(tensor.dtype).copy_(tensor.cpu())

    def device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.host(tensor).to(tensor.device)

    def done(self) -> None:
        pass

    def close(self) -> None:
        pass


class Pinned:
    """The bound: one copy into pinned memory."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.pinned.view(tensor.dtype).copy_(tensor)

    def device(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.host(tensor).to(tensor.device)

    def done(self) -> None:
        pass

    def close(self) -> None:
        pass


OURS, PLAIN, BOUND = "omniq slabs", "cpu() + memcpy", "pinned copy (bound)"
WAYS: dict[str, Callable[[Path, int], Way]] = {OURS: Slabs, PLAIN: Plain, BOUND: Pinned}


def measure(way: Way, source: torch.Tensor, where: str, count: int) -> list[float]:
    """Seconds of so many transfers; each result is the source's, bit for bit."""
    expected = source.cpu() if where == HOST else source
    transfer = way.host if where == HOST else way.device
    seconds = []
    for number in range(-WARM_UP, count):
        torch.cuda.synchronize()
        start = now()
        got = transfer(source)
        torch.cuda.synchronize()
        end = now()
        if number in (-WARM_UP, count - 1):
            assert torch.equal(got, expected), "something else has arrived"
        del got
        way.done()
        if number >= 0:
            seconds.append(end - start)
    return seconds


def run(folder: Path, sizes: list[int], rounds: int) -> dict[tuple[int, str, str], Times]:
    """Times by size, way and end, from all rounds."""
    found: defaultdict[tuple[int, str, str], list[list[float]]] = defaultdict(list)
    for nbytes in sizes:
        source = torch.randn(nbytes // 2, device="cuda").to(torch.bfloat16)
        ways = {name: make(folder, nbytes) for name, make in WAYS.items()}
        try:
            for _ in range(rounds):
                for name, way in ways.items():
                    for where in (HOST, DEVICE):
                        seconds = measure(way, source, where, TRANSFERS[nbytes])
                        found[nbytes, name, where].append(seconds)
        finally:
            for way in ways.values():
                way.close()
    return {key: Times(times) for key, times in found.items()}


def report(found: dict[tuple[int, str, str], Times]) -> list[dict[str, Any]]:
    """One row for each size and end."""
    rows = []
    for nbytes, where in dict.fromkeys((size, end) for size, _, end in found):
        ours, plain, bound = (found[nbytes, name, where] for name in (OURS, PLAIN, BOUND))
        rows.append(
            {
                "bytes": nbytes,
                "to": where,
                "milliseconds": {name: found[nbytes, name, where].median * 1e3 for name in WAYS},
                "gb_per_second": nbytes / ours.median / 1e9,
                "share_of_bound": ours.times_faster_than(bound),
                "times_faster_than_plain": ours.times_faster_than(plain),
            }
        )
    return rows


def text(rows: list[dict[str, Any]]) -> str:
    """The table."""
    header = ("device -> slab ->", "size", *(f"{n}, ms" for n in WAYS), "GB/s", "of bound",
              "faster than plain")  # fmt: skip
    return table(
        header,
        [
            (
                row["to"],
                f"{row['bytes'] / MB:g} MB",
                *(f"{row['milliseconds'][name]:.3f}" for name in WAYS),
                f"{row['gb_per_second']:.1f}",
                f"{row['share_of_bound']:.2f} x",
                f"{row['times_faster_than_plain']:.2f} x",
            )
            for row in rows
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-mb", type=int, default=128, help="largest tensor")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no CUDA device (torch {torch.__version__}): nothing to measure", file=sys.stderr)
        return 2
    sizes = [size for size in TRANSFERS if size <= args.max_mb * MB]
    rows = report(run(args.folder, sizes, args.rounds))
    print(text(rows))
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}; median of {args.rounds} rounds")
    if args.out:
        write_json(
            args.out,
            {"device": device, "rows": rows, "rounds": args.rounds, "machine": machine(),
             "load": load()},
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

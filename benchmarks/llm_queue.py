"""A long queue on one worker: what it holds, and in which order it serves.

    python benchmarks/llm_queue.py --model build/smollm2-135m-instruct [--requests 500]

One system of omniq gets all requests at once, their priorities 0, 5 and 9 by turns, and the worker
takes ``--window`` at a time. Resident memory of the worker and of vLLM's processes is read while
the jobs end; the order is compared with priority first, then first in first out. Requests of one
window start together: up to the window's size the order is chance.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import load, machine, now, table, write_json
from llm_common import arguments, offer_pipelines, prompts, set_environment

PRIORITIES = (0, 5, 9)


def processes() -> Iterator[tuple[int, str]]:
    """Worker and vLLM's processes among this one's descendants: id and name."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            names[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has just ended
        parents[int(folder.name)] = int(parent)
    for pid, name in names.items():
        at = pid
        while at in parents and at != os.getpid():
            at = parents[at]
        if at == os.getpid() and name.startswith("VLLM"):
            yield pid, name.split("\0")[0]
        elif at == os.getpid() and "celeryd" in name:
            yield pid, "worker"


def resident(pid: int) -> int:
    """Private bytes in memory: without files and shared memory, which many may map."""
    for line in (Path("/proc") / str(pid) / "status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} tells no memory")


async def measure(given: Any) -> dict[str, Any]:
    from omniq import AsyncOmniLLM

    params = {"temperature": 0.0, "max_tokens": given.output_tokens, "ignore_eos": True}
    total = given.requests
    async with AsyncOmniLLM("bench", ready_timeout=600) as llm:
        warm = [llm.generate({"token_ids": p}, params) for p in prompts(given, -1)[: given.window]]
        await asyncio.gather(*warm)
        watched = dict(processes())
        memory: dict[int, dict[int, int]] = {0: {p: resident(p) for p in watched}}
        priorities = [PRIORITIES[i % len(PRIORITIES)] for i in range(total)]
        started = now()
        ids = [
            await llm.submit({"token_ids": p}, params, priority=q, stream=False)
            for p, q in zip(prompts(given, 0), priorities, strict=True)
        ]
        submitted, ended = now() - started, 0

        async def wait(job: str) -> Any:
            nonlocal ended
            output = await llm.result(job)
            ended += 1
            if ended % 100 == 0 or ended == total:
                memory[ended] = {p: resident(p) for p in watched}
                print(f"{ended} have ended after {now() - started:.0f} s, load {load():.1f}")
            return output

        outputs = await asyncio.gather(*map(wait, ids))
        seconds = now() - started
    begun = [o.stages["ar"].started for o in outputs]
    place = {i: at for at, i in enumerate(sorted(range(total), key=lambda i: begun[i]))}
    wanted = sorted(range(total), key=lambda i: (-priorities[i], i))
    # Those that came first found the worker idle: they started whatever their priority.
    first = {i for i in range(total) if begun[i] < min(o.stages["ar"].finished for o in outputs)}
    queued = [i for i in wanted if i not in first]
    order = sorted(queued, key=lambda i: place[i])
    displaced = max(abs(order.index(i) - at) for at, i in enumerate(queued))
    return {
        "processes": watched,
        "memory": memory,
        "seconds": seconds,
        "submitted": submitted,
        "displaced": displaced,
        "tokens": total * given.output_tokens,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(requests=500, output_tokens=8)
    parser.add_argument("--window", type=int, default=64, help="Requests the worker has at a time.")
    given = parser.parse_args()
    given.engine_args = {"max_num_seqs": given.window, **given.engine_args}
    set_environment(given)
    offer_pipelines(given)
    found = asyncio.run(measure(given))
    counts = sorted(found["memory"])
    print(
        table(
            ["MiB private after", *map(str, counts)],
            [
                [name, *(f"{found['memory'][n][pid] / 2**20:,.1f}" for n in counts)]
                for pid, name in found["processes"].items()
            ],
        )
    )
    print(
        f"{given.requests} requests were accepted in {found['submitted']:.1f} s and served in "
        f"{found['seconds']:.1f} s, {found['tokens'] / found['seconds']:,.0f} tokens/s; of those "
        f"that waited none started more than {found['displaced']} places from its own "
        f"(window {given.window})"
    )
    if given.json:
        settings = {k: str(v) for k, v in vars(given).items()}
        write_json(given.json, {"machine": machine(), "settings": settings, **found})


if __name__ == "__main__":
    main()

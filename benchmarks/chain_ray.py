"""Three Ray actors for ``chain.py``; runs in a Python that has Ray (2.x) and numpy.

Reads lines ``<from> <to> <in flight>`` and answers each with a JSON list of seconds. The stages do
what :mod:`chain_work` says, on arrays, which Ray hands on without a copy.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DISABLE_METRICS_COLLECTION", "1")
import time
from collections import deque

import numpy as np
import ray  # type: ignore[import-not-found]

COUNT = 1 << 19


@ray.remote(num_cpus=0.5)
class Stage:
    def __init__(self) -> None:
        self.base = np.zeros(COUNT, np.float16)

    def first(self, number: int) -> np.ndarray:
        array = self.base.copy()
        array[:2] = number % 1000, number // 1000
        return array

    def middle(self, array: np.ndarray) -> np.ndarray:
        return array

    def last(self, array: np.ndarray) -> int:
        int(array.view(np.int64).sum())
        return int(array[0]) + 1000 * int(array[1])


def main() -> None:
    ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error",
        object_store_memory=2 << 30,
    )  # fmt: skip
    one, two, three = (Stage.remote() for _ in range(3))  # type: ignore[attr-defined]

    def submit(number: int) -> object:
        return three.last.remote(two.middle.remote(one.first.remote(number)))

    assert ray.get(submit(7)) == 7
    print("up", flush=True)
    for line in sys.stdin:
        start, stop, in_flight = map(int, line.split())
        rest, seconds = iter(range(start, stop)), []
        sent: deque[tuple[int, float, object]] = deque()
        while True:
            while len(sent) < in_flight and (number := next(rest, None)) is not None:
                sent.append((number, time.perf_counter(), submit(number)))
            if not sent:
                break
            number, began, handle = sent.popleft()
            assert ray.get(handle) == number
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()

"""Ray's object store in ``hop.py``; runs in a Python that has Ray (2.x) and numpy.

Reads lines ``<nbytes> <count>`` and answers each with a JSON list of seconds, one per hop: from the
producer having an array to an actor having read it.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
import numpy as np
import ray  # type: ignore[import-not-found]


@ray.remote
class Consumer:
    def read(self, array: np.ndarray) -> tuple[float, int]:
        total = int(array.view(np.int64).sum())
        return time.perf_counter(), total


def main() -> None:
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error",
        object_store_memory=2 << 30,
    )  # fmt: skip
    consumer = Consumer.remote()  # type: ignore[attr-defined]
    ray.get(consumer.read.remote(np.zeros(64, np.int64)))
    print("up", flush=True)
    for line in sys.stdin:
        nbytes, count = map(int, line.split())
        rng = np.random.default_rng(0)
        source = rng.integers(0, 30000, nbytes // 2, np.int16).view(np.float16).reshape(-1, 64)
        expected = int(source.view(np.int64).sum())
        seconds = []
        for _ in range(count):
            array = source.copy()
            start = time.perf_counter()
            ref = ray.put(array)
            end, total = ray.get(consumer.read.remote(ref))
            assert total == expected
            del ref
            seconds.append(end - start)
        print(json.dumps(seconds), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()

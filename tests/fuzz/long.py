"""The long form of the fuzz tests: many bad inputs, a table, and every finding with its seed.

    python tests/fuzz/long.py --count 100000 --seconds 480 --seed 7

``--count`` inputs are divided among the targets; ``--seconds`` ends early, with what was done.
The exit status is 1 if there were findings.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from runs import HEADER, Report, feed, feed_api, running_api  # noqa: E402 - found by then
from support import Valkey  # noqa: E402 - as above
from targets import LOCAL  # noqa: E402 - as above

#: Parts of all inputs; the rest is shared by the others.
SHARES = {"api": 0.1, "pipelines": 0.04, "videos": 0.06, "sounds": 0.1, "files": 0.1}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="*", default=[*LOCAL, "api"])
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # Pillow's, about broken EXIF
    until = time.monotonic() + given.seconds
    others = [t for t in given.targets if t not in SHARES]
    left = 1.0 - sum(SHARES.get(t, 0.0) for t in given.targets)
    reports = []
    print(HEADER, flush=True)
    for name in given.targets:
        share = SHARES.get(name, left / max(1, len(others)))
        report = run(name, max(1, round(given.count * share)), given.seed, until)
        reports.append(report)
        print(report.line(), flush=True)
        for finding in report.findings[:5]:
            print(finding, flush=True)
    total, bad = sum(r.inputs for r in reports), sum(len(r.findings) for r in reports)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{total} bad inputs, {bad} findings; this process took {peak} MiB at most")
    return 1 if bad else 0


def run(name: str, count: int, seed: int, until: float) -> Report:
    """One target."""
    if name != "api":
        return feed(name, count, seed, until)
    with tempfile.TemporaryDirectory() as folder:
        valkey = Valkey(Path(folder))
        valkey.start()
        try:
            with running_api(Path(folder), valkey.url) as (url, server):
                report = feed_api(url, count, seed, until)
                if "Traceback" in (log := server.output()):
                    report.findings.append(f"the log of the API:\n{log[-4000:]}")
                return report
        finally:
            valkey.stop()


if __name__ == "__main__":
    sys.exit(main())

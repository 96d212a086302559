"""The long form of the fuzz tests: many bad inputs, a table, and every finding with its seed.

    python tests/fuzz/long.py --count 100000 --seconds 480 --seed 7
    python tests/fuzz/long.py --count 100000 --targets schema --seed 7

``schema`` is schemathesis over the OpenAPI document, ``api`` are requests that are spoilt as bytes;
the others are parts. ``--count`` inputs are divided among the targets; ``--seconds`` ends early,
with what was done.
What the API's process holds, and the keys of jobs that are left in the broker, are looked at too.
The exit status is 1 if there were findings.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from fuzz_system import fuzzed_system  # noqa: E402 - as below
from leaks import Held, cancel_all, drop_letters, keys_left, still_open  # noqa: E402 - found by then
from runs import HEADER, Report, feed, feed_api  # noqa: E402 - found by then
from schema_fuzz import AGAIN, FIRST, schemathesis  # noqa: E402 - as above
from support import Valkey  # noqa: E402 - as above
from targets import LOCAL  # noqa: E402 - as above

#: Parts of all inputs; the rest is shared by the others.
SHARES = {"schema": 0.1, "api": 0.1, "pipelines": 0.04, "videos": 0.06, "sounds": 0.1, "files": 0.1}

#: Requests to the API between two times that all jobs are ended: fewer than may be open.
ROUND = 2000
#: Cases that schemathesis makes for each operation and phase in a round.
EXAMPLES = 100
#: Clients that ask the API at once.
CLIENTS = 2
#: Targets that are a running system.
OF_API = ("schema", "api")
#: Seconds after which a job that was cancelled has ended.
PATIENCE = 20
#: Seconds that the API's ended jobs are kept.
RETENTION = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="*", default=[*LOCAL, *OF_API])
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # Pillow's, about broken EXIF
    until = time.monotonic() + given.seconds
    others = [t for t in given.targets if t not in SHARES]
    left = 1.0 - sum(SHARES.get(t, 0.0) for t in given.targets)
    whole = 1.0 if others else 1.0 - left
    reports = []
    print(HEADER, flush=True)
    for name in given.targets:
        share = SHARES.get(name, left / max(1, len(others))) / whole
        report = run(name, max(1, round(given.count * share)), given.seed, until)
        reports.append(report)
        print(report.line(), flush=True)
        for finding in report.findings[:5]:
            print(finding, flush=True)
    total, bad = sum(r.inputs for r in reports), sum(len(r.findings) for r in reports)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{total} inputs, {bad} findings; this process took {peak} MiB at most")
    return 1 if bad else 0


def run(name: str, count: int, seed: int, until: float) -> Report:
    """One target."""
    if name not in OF_API:
        return feed(name, count, seed, until)
    with tempfile.TemporaryDirectory() as folder:
        valkey = Valkey(Path(folder))
        valkey.start()
        try:
            return run_api(name, Path(folder), valkey, count=count, seed=seed, until=until)
        finally:
            valkey.stop()


def run_api(
    name: str, folder: Path, valkey: Valkey, *, count: int, seed: int, until: float
) -> Report:
    """The API of a system of its own; jobs are ended now and then, and forgotten soon."""
    report = Report(name)
    with fuzzed_system(folder, valkey, OMNIQ_RETENTION=str(RETENTION)) as system:
        held: list[Held] = []
        told = 0
        while report.inputs < count:
            if name == "schema":
                report.add(_by_schema(system.url, folder, seed + CLIENTS * len(held), not held))
            else:
                number = min(ROUND, count - report.inputs)
                first = report.inputs
                spoilt = feed_api(system.url, number, seed, until, clients=CLIENTS, first=first)
                report.add(spoilt)
            cancel_all(system.url, system.broker)
            for job in still_open(system.url, PATIENCE):
                report.findings.append(f"a cancelled job has not ended: {job}")
            held.append(Held.by(system.api.process.pid))
            for finding in report.findings[told:]:
                print(finding, flush=True)
            told = len(report.findings)
            print(f"{report.line()}\n  {held[-1]}", flush=True)
            if time.monotonic() > until:
                break
        report.findings += held[-1].leaks(held[0])
        drop_letters(system.url)
        if left := keys_left(system.broker, 10 * RETENTION):
            report.findings.append(f"keys of ended jobs are left: {dict(left)}")
        report.findings += [
            f"the log of a process:\n{part}"
            for each in (system.api, *system.workers)
            for part in tracebacks(each.output())
        ]
    return report


def _by_schema(url: str, folder: Path, seed: int, first: bool) -> Report:
    """One round: several runs of schemathesis at once."""
    whole = Report("schema")
    begun = time.monotonic()

    def one(number: int) -> Report:
        own = folder / f"client-{number}"
        own.mkdir(exist_ok=True)
        phases = FIRST if first and not number else AGAIN
        return schemathesis(url, own, examples=EXAMPLES, seed=seed + number, phases=phases)

    with ThreadPoolExecutor(CLIENTS) as pool:
        for report in pool.map(one, range(CLIENTS)):
            whole.add(report)
    whole.seconds = time.monotonic() - begun
    return whole


def tracebacks(log: str) -> list[str]:
    """Each with a line before it and some after."""
    lines = log.splitlines()
    at = [i for i, line in enumerate(lines) if line.startswith("Traceback")]
    return ["\n".join(lines[max(0, i - 1) : i + 80]) for i in at]


if __name__ == "__main__":
    sys.exit(main())

"""The long form of the chaos suite, by hand.

    python tests/chaos/chaos_long.py --jobs 10000 --faults 500 --seed 1

Prints a table: jobs, faults by kind, final states, and what was lost, doubled, unequal to what the
undisturbed computation gives, or left behind. Exits with 1 if there is any of the latter.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from chaos_system import ChaosSystem, report, use  # noqa: E402 - found by the line above
from support import Valkey  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--pause", type=float, default=1.2, help="Seconds between faults.")
    parser.add_argument("--workers", type=int, default=1, help="Of each stage.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trouble", type=int, default=60, help="Of so many jobs each kind once.")
    parser.add_argument("--poison", type=int, default=200, help="Of so many jobs each kind once.")
    parser.add_argument("--keep", type=Path, help="Where the logs go.")
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="omniq-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    valkey = Valkey(folder)
    valkey.start()
    try:
        system = ChaosSystem(
            folder,
            valkey,
            args.seed,
            each=args.workers,
            trouble=args.trouble,
            poison=args.poison,
        )
        use(system.environment())
        run = system.run(jobs=args.jobs, faults=args.faults, pause=args.pause, say=True)
        tally = asyncio.run(run)
    finally:
        valkey.stop()
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    report(tally)
    return 0 if tally.good else 1


if __name__ == "__main__":
    sys.exit(main())

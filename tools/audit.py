"""Known weaknesses of the pinned dependencies, looked up by pip-audit.

    python tools/audit.py [--may-skip]

No weakness found means something only if the service that was asked knows of any: a mirror of PyPI
may have none, and pip-audit passes over packages that a service does not have. So a service is
asked first for an old release with weaknesses that everybody knows.

The exit status is 0 if there are no weaknesses, 1 if there are or if a package could not be looked
up, and 3 if no service is usable, or, with ``--may-skip``, 0, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).parents[1] / "requirements" / "constraints.txt"
SERVICES = ("pypi", "osv")
#: CVE-2019-10906 and several more.
KNOWN_WEAK = "jinja2==2.10\n"
SKIPPED = 3

#: Asks a service about a file of requirements: pip-audit's ``dependencies``.
Ask = Callable[[str, Path], list[dict[str, Any]]]


class NotAsked(Exception):
    """A service, or pip-audit itself, is not there; says why."""


def main() -> int:
    """Ask, tell, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--may-skip", action="store_true", help="0 if no service is usable")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        status = audited(_asking(Path(folder)), CONSTRAINTS, Path(folder))
    return 0 if status == SKIPPED and given.may_skip else status


def audited(ask: Ask, requirements: Path, folder: Path) -> int:
    """Look up what ``requirements`` pins, by the first usable service; returns the exit status."""
    weak = folder / "known-weak.txt"
    weak.write_text(KNOWN_WEAK)
    reasons = []
    for service in SERVICES:
        try:
            if any(each.get("vulns") for each in ask(service, weak)):
                return _report(service, ask(service, requirements))
            reasons.append(f"{service}: knows nothing of {KNOWN_WEAK.strip()}, which is weak")
        except NotAsked as exc:
            reasons.append(f"{service}: {exc}")
    print("pip-audit was SKIPPED; whether dependencies have known weaknesses was not looked up:")
    print(*(f"  {reason}" for reason in reasons), sep="\n")
    return SKIPPED


def _report(service: str, found: list[dict[str, Any]]) -> int:
    faults = [f"{d['name']}: not looked up: {d['skip_reason']}" for d in found if "vulns" not in d]
    for each in found:
        for weakness in each.get("vulns", ()):
            fixed = ", ".join(weakness["fix_versions"]) or "no release"
            faults.append(f"{each['name']} {each['version']}: {weakness['id']}, fixed in {fixed}")
    print(f"pip-audit ({service}): {len(found)} packages, {len(faults)} findings")
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults or not found else 0


def _asking(folder: Path) -> Ask:
    """pip-audit in an environment of its own, so that none of its packages is among those tested.

    It is installed when it is first needed.
    """

    def ask(service: str, requirements: Path) -> list[dict[str, Any]]:
        program = folder / "venv" / "bin" / "pip-audit"
        if not program.exists():
            venv.create(folder / "venv", with_pip=True)
            pip = [str(program.with_name("python")), "-m", "pip", "install", "-q", "pip-audit"]
            _run(pip, "pip-audit cannot be installed")
        command = [
            *(str(program), "--vulnerability-service", service, "--format", "json"),
            *("--no-deps", "--disable-pip", "--progress-spinner", "off", "-r", str(requirements)),
        ]
        output = _run(command, "cannot be asked", good=(0, 1))
        try:
            dependencies: list[dict[str, Any]] = json.loads(output)["dependencies"]
        except (ValueError, KeyError) as exc:
            raise NotAsked(f"pip-audit's answer cannot be read: {exc}") from exc
        return dependencies

    return ask


def _run(command: list[str], what: str, good: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in good or (done.returncode and not done.stdout.strip()):
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise NotAsked(f"{what}: {last}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())

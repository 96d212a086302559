"""`tools/audit.py`: silence of a service that knows nothing is no good news."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from audit import SKIPPED, Ask, NotAsked, audited

WEAKNESS = {"id": "CVE-1", "fix_versions": ["2.0"]}
WEAK = {"name": "jinja2", "version": "2.10", "vulns": [WEAKNESS]}
GOOD = {"name": "celery", "version": "5.7", "vulns": []}
UNKNOWN = {"name": "jinja2", "skip_reason": "not found"}


def service(known: list[Any], found: list[Any] | None = None, only: str = "pypi") -> Ask:
    """Answers ``known`` about what is known to be weak, then ``found``; others are not there."""

    def ask(name: str, requirements: Path) -> list[dict[str, Any]]:
        if name != only:
            raise NotAsked("no such host")
        return known if requirements.name == "known-weak.txt" else found or []

    return ask


@pytest.mark.parametrize(
    ("ask", "status", "said"),
    [
        (service([WEAK], [GOOD]), 0, "pip-audit (pypi): 1 packages, 0 findings"),
        (service([WEAK], [GOOD], "osv"), 0, "pip-audit (osv): 1 packages, 0 findings"),
        (service([WEAK], [GOOD, WEAK]), 1, "jinja2 2.10: CVE-1, fixed in 2.0"),
        (service([WEAK], [GOOD, UNKNOWN]), 1, "jinja2: not looked up: not found"),
        (service([WEAK], []), 1, "0 packages"),
        (service([UNKNOWN], [GOOD]), SKIPPED, "pypi: knows nothing of jinja2==2.10"),
        (service([{**WEAK, "vulns": []}], [GOOD]), SKIPPED, "SKIPPED"),
        (service([WEAK], [GOOD], "none"), SKIPPED, "osv: no such host"),
    ],
)
def test_only_a_service_that_knows_weaknesses_finds_none(
    ask: Ask, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audited(ask, tmp_path / "constraints.txt", tmp_path) == status
    printed = capsys.readouterr().out
    assert said in printed
    assert ("SKIPPED" in printed) == (status == SKIPPED)

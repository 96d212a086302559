"""The short form: a minute of faults, and nothing is lost, doubled, different or left."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_system import ChaosSystem, report, use
from support import Valkey


@pytest.mark.chaos
async def test_a_minute_of_faults(
    tmp_path: Path, own_valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = ChaosSystem(tmp_path, own_valkey, seed=7)
    environment = system.environment()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    use(environment)
    tally = await system.run(jobs=60, faults=16, pause=1.2)
    report(tally)
    assert tally.accepted == 60
    assert tally.faults.total() >= 12
    assert tally.good, tally.table()

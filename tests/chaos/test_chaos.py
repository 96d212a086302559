"""The short form: a minute of faults, and nothing is lost, doubled, different or left."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from chaos_system import ChaosSystem, report, use
from support import Valkey


@pytest.mark.chaos
@pytest.mark.timeout(400)  # workers start again and again, on however busy a machine
async def test_a_minute_of_faults(
    tmp_path: Path, own_valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind once or more; another order each time: ``CHAOS_SEED`` repeats a table's."""
    seed = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10_000))
    system = ChaosSystem(tmp_path, own_valkey, seed, trouble=60, most_deliveries=4)
    environment = system.environment()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    use(environment)
    tally = await system.run(jobs=60, faults=22, pause=0.6)
    report(tally)
    assert tally.accepted == 65
    assert tally.faults.total() >= 22
    assert len(tally.faults) >= 20, "every kind"
    assert tally.good, tally.table()

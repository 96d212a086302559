"""Hosts whose clocks differ, or are set while they work, serve jobs as others do."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from clock_step import ClockStep
from omniq_workers.delays import shortened

from omniq.jobs.model import JobRecord, JobState
from omniq.jobs.store import JobStore
from omniq.jobs.workers import WorkerRegistry
from omniq.submit import submit
from omniq.tasks import DELAY


async def served(store: JobStore, prompt: str) -> JobRecord:
    """A job with a minute to be served in."""
    job = await submit(store, pipeline="p", inputs={"prompt": prompt}, timeout=60)
    record = await store.wait(job.id, 30)
    assert record.state is JobState.SUCCEEDED, record.error
    return record


async def test_clocks_that_are_set_move_no_deadline_retry_or_heartbeat(
    stages: Any, store: JobStore, tmp_path: Path, notes: Callable[..., list[str]]
) -> None:
    """Workers an hour ahead and an hour behind; then each is set to the other's time."""
    a, b = ClockStep(tmp_path, "a"), ClockStep(tmp_path, "b")
    a.set(3600)
    b.set(-3600)
    stages.define("a>b")
    stages.start("a", **a.environment)
    stages.start("b", **b.environment)
    for ahead in (3600, -3600):
        a.set(ahead)
        b.set(-ahead)
        # The messages that are tried again are sent and taken by these clocks.
        record = await served(store, "a:retry=1 b:retry=1")
        assert [s.attempts for s in record.stages.values()] == [2, 2]
        found = await WorkerRegistry(store.redis).all()
        assert sorted(w.stage for w in found) == ["a", "b"]
        now = await store.clock.now()
        assert all(abs(w.seen - now) < 30 for w in found)
    left = [float(n.split()[-1]) for n in notes("deadline")]
    assert len(left) == 8
    assert all(0 < seconds < 61 for seconds in left), left


async def test_a_clock_that_is_set_moves_no_submission(
    stages: Any, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The submitter's: a job's times are the server's, and older jobs stay listed."""
    stages.define("a>b")
    stages.start("a", "b")
    first = await served(store, "x")
    monkeypatch.setattr(time, "time", lambda: 4e9)
    second = await served(store, "x")
    assert second.spec.deadline is not None
    assert 0 < second.spec.deadline - first.spec.created < 120
    listed, _ = await store.list(limit=10)
    assert [r.id for r in listed] == [second.id, first.id]


@pytest.mark.parametrize(
    ("headers", "shorter"),
    [
        ({"eta": 3600.0, DELAY: 1.5}, True),
        ({"eta": 1.0, DELAY: 1.5}, False),
        ({"eta": -3600.0, DELAY: 1.5}, False),
        ({"eta": 3600.0}, False),
        ({"eta": "tomorrow", DELAY: 1.5}, False),
        ({"eta": None, DELAY: 1.5}, False),
        ({"eta": 3600.0, DELAY: "1"}, False),
    ],
)
def test_a_message_waits_no_longer_than_its_delay(headers: dict[str, Any], shorter: bool) -> None:
    now = datetime.now(UTC)
    if isinstance(headers["eta"], float):
        headers = {**headers, "eta": (now + timedelta(seconds=headers["eta"])).isoformat()}
    before = dict(headers)
    found = shortened(headers)
    assert headers == before, "what was signed"
    if shorter:
        wait = (datetime.fromisoformat(found["eta"]) - now).total_seconds()
        assert 1.5 <= wait < 10
    else:
        assert found == before

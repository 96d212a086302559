"""Bad inputs are refused by name: no other error, no hang. The long form is ``long.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import feed, feed_api, running_api
from support import Valkey
from targets import LOCAL

#: Slow ones get fewer.
COUNTS = {"pipelines": 60, "videos": 100, "files": 150, "pictures": 300, "sounds": 200}


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("name", list(LOCAL))
def test_bad_inputs_are_refused(name: str) -> None:
    report = feed(name, COUNTS.get(name, 500), seed=1)
    assert report.findings == []
    assert report.accepted < report.inputs, "some are bad"


def test_bad_requests_are_answered(broker: Valkey, tmp_path: Path) -> None:
    with running_api(tmp_path, broker.url) as (url, server):
        report = feed_api(url, 400, seed=1)
        log = server.output()
    assert report.findings == [], log[-3000:]
    refused = report.answers[400] + report.answers[422]
    assert refused > 40 and report.accepted > 5, report.answers
    assert "Traceback" not in log

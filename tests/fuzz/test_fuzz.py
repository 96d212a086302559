"""Bad inputs are refused by name: no other error, no hang. The long form is ``long.py``."""

from __future__ import annotations

import pytest
from runs import feed
from targets import LOCAL

#: Slow ones get fewer.
COUNTS = {"pipelines": 60, "videos": 100, "files": 150, "pictures": 300, "sounds": 200}


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("name", list(LOCAL))
def test_bad_inputs_are_refused(name: str) -> None:
    report = feed(name, COUNTS.get(name, 500), seed=1)
    assert report.findings == []
    assert report.accepted < report.inputs, "some are bad"

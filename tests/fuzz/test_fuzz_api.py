"""Whatever is asked, the API answers as its OpenAPI document says. The long form is ``long.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_system import FuzzedSystem, fuzzed_system
from runs import feed_api
from schema_fuzz import schemathesis
from support import Valkey


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedSystem]:
    folder = tmp_path_factory.mktemp("fuzz")
    valkey = Valkey(folder)
    valkey.start()
    with fuzzed_system(folder, valkey) as running:
        yield running
    valkey.stop()


def test_the_api_is_as_its_document_says(system: FuzzedSystem, tmp_path: Path) -> None:
    report = schemathesis(system.url, tmp_path, examples=3, seed=1, limit=150)
    assert report.findings == [], report.findings[0]
    answers = report.answers
    assert report.accepted > 100 and answers[400] + answers[422] > 100, answers
    assert "Traceback" not in system.api.output()


def test_spoilt_requests_are_answered(system: FuzzedSystem) -> None:
    report = feed_api(system.url, 400, seed=1)
    assert report.findings == []
    refused = report.answers[400] + report.answers[422]
    assert refused > 40 and report.accepted > 5, report.answers
    assert "Traceback" not in system.api.output()

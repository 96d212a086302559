"""Fixtures of the tests of admission."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from admission_helpers import PIPELINE

import omniq
from omniq.config import available_pipelines
from omniq.jobs.store import JobStore
from omniq.settings import get_settings


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline as tiny-omni, whose engines take one request at a time."""
    text = (Path(omniq.__file__).parent / "pipelines/tiny-omni.yaml").read_text()
    text = re.sub(r"max_in_flight: \d+", "max_in_flight: 1", text)
    file = tmp_path / "small.yaml"
    file.write_text(text.replace("name: tiny-omni", f"name: {PIPELINE}"))
    monkeypatch.setenv("OMNIQ_PIPELINES", json.dumps([str(file)]))


@pytest.fixture
async def store(broker: object) -> Any:
    available_pipelines.cache_clear()
    store = JobStore.from_settings()
    yield store
    await store.close()


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets one of omniq's settings."""

    def change(name: str, value: object) -> None:
        monkeypatch.setenv(f"OMNIQ_{name.upper()}", str(value))
        get_settings.cache_clear()

    return change

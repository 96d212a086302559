"""A model's folder as a pipeline of this Python process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from omniq import AsyncOmniLLM
from omniq.config import available_pipelines
from omniq.errors import ConfigError, UnknownPipeline
from omniq.serve.in_process import PIPELINES
from omniq.settings import get_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("OMNIQ_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv(PIPELINES, "[]")
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()
    yield
    for cached in (get_settings, available_pipelines):
        cached.cache_clear()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    return folder


def test_a_folder_is_a_pipeline_for_this_process_and_its_children(model: Path) -> None:
    """Named by the folder; said again with other options it is the newer one."""
    for window in (3, 5):
        llm = AsyncOmniLLM(
            str(model), engine="transformers", stage_overrides={"ar": {"max_in_flight": window}}
        )
        assert llm.config.name == "my-model"
        assert llm.config.stage("ar").max_in_flight == window
        assert available_pipelines()["my-model"] == llm.config
        assert len(json.loads(os.environ[PIPELINES])) == 1
    assert AsyncOmniLLM("my-model").config == llm.config


def test_options_are_of_models(model: Path) -> None:
    llm = AsyncOmniLLM("tiny-omni", stage_overrides={"dit": {"max_in_flight": 2}})
    assert (llm.config.name, llm.config.stage("dit").max_in_flight) == ("tiny-omni-served", 2)
    with pytest.raises(TypeError, match=r"unknown argument 'gpu'; of a model: engine, "):
        AsyncOmniLLM(str(model), gpu=2)
    with pytest.raises(UnknownPipeline, match="no pipeline 'my-modle'"):
        AsyncOmniLLM("my-modle")


def test_a_running_system_serves_what_it_was_started_with(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"a running system serves the pipelines"):
        AsyncOmniLLM(str(model), broker_url="redis://127.0.0.1:1/0")

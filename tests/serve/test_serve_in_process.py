"""A model's folder as a pipeline of this Python process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from omniq import AsyncOmniLLM
from omniq.config import available_pipelines, load_pipeline
from omniq.config.loader import BUILTIN_DIR
from omniq.errors import ConfigError, UnknownPipeline
from omniq.resolve.files import MAX_NAME
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
    """Named by the folder; said again, also by that name, it is the same."""
    options = {"engine": "transformers", "stage_overrides": {"ar": {"max_in_flight": 3}}}
    llm = AsyncOmniLLM(str(model), **options)
    assert llm.config.name == "my-model"
    assert llm.config.stage("ar").max_in_flight == 3
    for again in (AsyncOmniLLM(str(model), **options), AsyncOmniLLM("my-model")):
        assert again.config == llm.config == available_pipelines()["my-model"]
    assert len(json.loads(os.environ[PIPELINES])) == 1


def test_models_of_the_same_name_keep_apart(model: Path, tmp_path: Path) -> None:
    """Other folders called alike, and the same one with other options: each has its own pipeline,
    which those opened later leave as it is.
    """
    other = tmp_path / "other" / model.name
    shutil.copytree(model, other)
    for i in range(2):  # opened again, each is what it was
        for number, (folder, window) in enumerate(((model, 3), (other, 3), (model, 5)), 1):
            overrides = {"ar": {"max_in_flight": window}}
            llm = AsyncOmniLLM(str(folder), engine="transformers", stage_overrides=overrides)
            assert llm.config.name == ("my-model" if number == 1 else f"my-model-{number}")
            assert llm.config.stage("ar").model == str(folder)
            assert llm.config.stage("ar").max_in_flight == window
            assert len(json.loads(os.environ[PIPELINES])) == (3 if i else number)
    kept = {n: p for n, p in available_pipelines().items() if n.startswith("my-model")}
    assert [(p.stage("ar").model, p.stage("ar").max_in_flight) for p in kept.values()] == [
        (str(model), 3),
        (str(other), 3),
        (str(model), 5),
    ]


def test_a_pipeline_of_the_users_keeps_its_name(model: Path, tmp_path: Path) -> None:
    """A folder called as a pipeline that the user has is another one, with a name that fits."""
    name = "m" * MAX_NAME
    folder = model.rename(tmp_path / name)
    own = load_pipeline(BUILTIN_DIR / "tiny-omni.yaml").model_dump(mode="json", by_alias=True)
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps({**own, "name": name}))
    os.environ[PIPELINES] = json.dumps([str(file)])
    get_settings.cache_clear()
    available_pipelines.cache_clear()
    llm = AsyncOmniLLM(str(folder), engine="transformers")
    assert llm.config.name == name[:-2] + "-2"
    assert AsyncOmniLLM(name).config.stages[0].stage_id == own["stages"][0]["stage_id"]


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

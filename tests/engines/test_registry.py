"""Finding engines by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omniq.config import EngineType, OmniStageConfig
from omniq.engines import create_engine, describe, registry
from omniq.engines.registry import resolve
from omniq.errors import ConfigError


def config(engine: str, engine_type: str = "AR") -> OmniStageConfig:
    return OmniStageConfig(stage_id="s", engine_type=engine_type, engine=engine, model="none")


def test_auto_takes_vllm_only_on_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: object())
    assert resolve(EngineType.AR, "auto", "cpu").name == "transformers"
    assert resolve(EngineType.AR, "auto", "cuda:0").name == "vllm"
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert resolve(EngineType.AR, "auto", "cuda:0").name == "transformers"


@pytest.mark.parametrize(
    ("engine_type", "name"),
    [("DiT", "diffusers"), ("decode", "diffusers"), ("encode", "diffusers")],
)
def test_auto_of_the_other_types(engine_type: str, name: str) -> None:
    assert resolve(EngineType(engine_type), "auto").name == name


def test_unknown_engine_lists_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"no AR engine 'diffusers'; allowed: auto, transformers"):
        create_engine(config("diffusers"))


def test_engine_whose_package_is_missing_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed: vllm; install the extra omniq\[vllm\]"):
        create_engine(config("vllm"))
    assert {i.name for i in describe() if i.available} == set()


def test_describe_lists_every_builtin_engine() -> None:
    found = {(i.engine_type, i.name): i for i in describe()}
    assert {("AR", "transformers"), ("AR", "vllm"), ("DiT", "diffusers")} <= set(found)
    assert found["decode", "diffusers"].available
    assert found["encode", "diffusers"].available


def test_engine_by_import_path() -> None:
    path = "omniq.engines.ar_transformers:TransformersAREngine"
    assert create_engine(config(path)).name == "transformers"
    with pytest.raises(ConfigError, match="no_such_package"):
        create_engine(config("no_such_package.engine:Engine"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        create_engine(config("omniq.engines.ar_transformers:Nothing"))
    with pytest.raises(ConfigError, match=r"is no omniq\.engines\.base\.Engine"):
        create_engine(config("pathlib:Path"))


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a distribution that offers engine entry points."""

    def install(entries: str) -> None:
        info = tmp_path / "fancy-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fancy\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[omniq.engines]\n{entries}\n")
        (tmp_path / "fancy_engine.py").write_text(
            "from omniq.engines.ar_transformers import TransformersAREngine\n"
            "class Fancy(TransformersAREngine):\n    name = 'fancy'\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def test_third_party_engine_is_found(third_party: Any) -> None:
    third_party("AR.fancy = fancy_engine:Fancy\nAR.vllm = fancy_engine:Fancy")
    assert create_engine(config("fancy")).name == "fancy"
    infos = [i for i in describe() if i.origin == "fancy"]
    assert [(i.name, i.available) for i in infos] == [("fancy", True), ("vllm", False)]
    assert infos[1].reason == "the name is taken by omniq"


def test_third_party_engine_of_unknown_type_is_ignored(
    third_party: Any, caplog: pytest.LogCaptureFixture
) -> None:
    third_party("fancy = fancy_engine:Fancy")
    assert "fancy" not in {i.origin for i in describe()}
    assert "must be called TYPE.NAME" in caplog.text

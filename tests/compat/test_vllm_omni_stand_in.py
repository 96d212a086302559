"""`vllm_omni`: omniq's stand-in is found when there is no real one, and never in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest

WHERE = "import vllm_omni; print(vllm_omni.__file__)"


def python(code: str, path: Path | None = None) -> str:
    env = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A folder of `sys.path` in which a vllm-omni is installed."""
    package = tmp_path / "vllm_omni"
    package.mkdir()
    (package / "__init__.py").write_text("")
    info = tmp_path / "vllm_omni-0.14.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 0.14.0\n")
    return tmp_path


def test_without_a_real_one_the_stand_in_is_found_with_what_vllm_imports() -> None:
    code = "from vllm_omni.entrypoints.cli.main import main; print(main.__module__)"
    assert python(code) == "vllm_omni.entrypoints.cli.main"
    assert python(WHERE).endswith("omniq/compat/vllm_omni/__init__.py")


def test_a_real_one_is_found_before_the_stand_in(real: Path) -> None:
    assert python(WHERE, real) == str(real / "vllm_omni" / "__init__.py")


def test_the_stand_in_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, vllm_omni.entrypoints.cli.main;"
        "print({'vllm', 'torch', 'pydantic', 'celery'} & set(sys.modules))"
    )
    assert python(code) == "set()"


def test_nothing_called_vllm_omni_is_installed_beside_omniq() -> None:
    """Or pip would overwrite a real one's files, and uninstalling omniq remove them."""
    installed = [str(f) for f in files("omniq") or ()]
    assert any(f.endswith("omniq_vllm_omni.pth") for f in installed)
    assert not [f for f in installed if f.startswith("vllm_omni")]


def test_doctor_says_who_answers(real: Path) -> None:
    code = "from omniq.cli.doctor import _vllm_omni; print(*_vllm_omni())"
    assert "vllm-omni 0.14.0 is installed" in python(code, real)
    assert "omniq's command is `omniq serve`" in python(code, real)
    assert "0.14.0" not in python(code)

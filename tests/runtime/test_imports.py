"""`import omniq` is fast and light, and its public names exist."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import omniq


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_import_takes_less_than_half_a_second() -> None:
    """The better of two runs: the first one may have to read everything from disk."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        run("import omniq")
        times.append(time.perf_counter() - started)
    assert min(times) < 0.5


def test_import_brings_no_heavy_package() -> None:
    heavy = run(
        "import sys, omniq; from omniq import OmniLLM, PipelineConfig;"
        "print({'torch', 'transformers', 'diffusers', 'vllm', 'PIL', 'numpy'} & set(sys.modules))"
    )
    assert heavy.strip() == "set()"


def test_every_lazy_name_is_public_and_known_to_type_checkers() -> None:
    assert set(omniq.__all__) == {*omniq._HOMES, "__version__"}
    source = Path(omniq.__file__).read_text()
    block = source.partition("if TYPE_CHECKING:")[2].partition("__all__")[0]
    assert all(f"{name}" in block for name in omniq._HOMES)


@pytest.mark.parametrize("name", omniq.__all__)
def test_public_name_exists(name: str) -> None:
    assert getattr(omniq, name) is not None
    assert name in dir(omniq)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = omniq.nonsense


def test_celery_finds_the_application_by_the_package_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "omniq", "report"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "omniq.tasks" in done.stdout

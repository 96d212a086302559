"""The tiny random model shared by the engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import make_z_image


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Z-Image with random weights."""
    return make_z_image(tmp_path_factory.mktemp("models") / "tiny_z_image")

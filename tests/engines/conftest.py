"""Tiny models with random weights, shared by the engine tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_families import make
from tiny_models import make_z_image


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Z-Image with random weights."""
    return make_z_image(tmp_path_factory.mktemp("models") / "tiny_z_image")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny diffusion pipeline with random weights by its name, made once."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = make(name, tmp_path_factory.mktemp("families") / name)
        return folders[name]

    return get

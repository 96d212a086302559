"""Parts of a checkpoint by the names of its tensors, without the rest of it in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from omniq.errors import ConfigError
from omniq.json_file import read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def files_of(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a checkpoint in folder ``folder``.

    Raises:
        ConfigError: it holds no safetensors.
    """
    if (folder / INDEX).is_file():
        return {
            name: folder / file for name, file in read_json(folder / INDEX)["weight_map"].items()
        }
    if not (folder / SINGLE).is_file():
        raise ConfigError(f"{folder} holds no {SINGLE} and no {INDEX}")
    with safe_open(folder / SINGLE, framework="pt") as weights:
        return dict.fromkeys(weights.keys(), folder / SINGLE)


def load_part(cls: Any, folder: Path, prefix: str, **options: Any) -> Any:
    """``cls.from_pretrained`` of one part of an omni checkpoint, in silence about the others.

    Args:
        cls: takes the tensors whose names begin with ``prefix``.
        folder: of the whole checkpoint.
        prefix: of the part.
        options: of ``from_pretrained``.

    Raises:
        ConfigError: tensors are missing.
    """
    quiet: Any = type(
        cls.__name__,
        (cls,),
        {
            "_keys_to_ignore_on_load_unexpected": [rf"^(?!{prefix}\.)"],
            # transformers looks at where a class comes from: it joins the weights of experts for
            # its own only, and reads in the source which attention there is.
            "__module__": cls.__module__,
        },
    )
    model, found = quiet.from_pretrained(folder, output_loading_info=True, **options)
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(f"{folder} lacks {len(missing)} tensors of {prefix}: {missing[0]}, ...")
    return model


def part_of(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """All tensors whose name begins with ``prefix``, under the rest of their names.

    Raises:
        ConfigError: there is none.
    """
    found: dict[str, torch.Tensor] = {}
    names = {n: f for n, f in files_of(folder).items() if n.startswith(prefix)}
    for file in sorted(set(names.values())):
        with safe_open(file, framework="pt") as weights:
            for name in (n for n, f in names.items() if f == file):
                found[name.removeprefix(prefix)] = weights.get_tensor(name)
    if not found:
        raise ConfigError(f"{folder} holds no tensors named {prefix}*")
    return found


class Rows:
    """Rows of a matrix in a checkpoint; the file is mapped, so only what is asked for is read.

    Args:
        name: of the tensor [rows, columns].
        dtype: of what is given out.

    Raises:
        ConfigError: the checkpoint has no such tensor.
    """

    def __init__(self, folder: Path, name: str, dtype: torch.dtype, device: str) -> None:
        file = files_of(folder).get(name)
        if file is None:
            raise ConfigError(f"{folder} holds no tensor {name!r}")
        with safe_open(file, framework="pt") as weights:
            self._matrix = weights.get_tensor(name)
        self._dtype, self._device = dtype, device

    def __call__(self, rows: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """[n, columns] of row numbers, int64 [n]."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        return self._matrix[index].to(self._device, self._dtype)

"""What each of three stages does in every system that ``chain.py`` compares: next to nothing."""

from __future__ import annotations

import torch

#: One MB of fp16.
COUNT = 1 << 19

_base = torch.zeros(COUNT, dtype=torch.float16)


def first(number: int) -> torch.Tensor:
    """A tensor that says ``number``: a copy of 1 MB."""
    tensor = _base.clone()
    tensor[:2] = torch.tensor([number % 1000, number // 1000], dtype=torch.float16)
    return tensor


def middle(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is."""
    return tensor


def last(tensor: torch.Tensor) -> int:
    """Its number; all of it is read once."""
    int(tensor.view(torch.int64).sum())
    return int(tensor[0]) + 1000 * int(tensor[1])

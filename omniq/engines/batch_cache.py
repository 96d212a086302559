"""The KV cache of several sequences in one transformers cache, for one forward pass a step.

Sequences differ in length. They stand right-aligned: what a row lacks to the longest one is filled
on the left with zeros that the attention mask hides, so that every row's next position is the last
column. Rows come and go between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omniq.errors import EngineError


def can_batch(cache: Any) -> bool:
    """Whether rows can be joined to and taken from such a cache.

    Plain attention layers only: a window or a recurrent state has no columns to align.
    """
    from transformers.cache_utils import DynamicLayer  # noqa: PLC0415 - slow import, done by load

    return all(type(layer) is DynamicLayer for layer in cache.layers)


class BatchCache:
    """Keys and values of the rows of a batch, [rows, heads, columns, head size] a layer.

    ``cache`` is what the model takes as ``past_key_values``; the model appends a column a step.
    """

    def __init__(self, cache: Any, length: int) -> None:
        """Begin with one row: the cache of its prompt, ``length`` tokens long."""
        self.cache = cache
        self.lengths = [length]

    @property
    def columns(self) -> int:
        """Columns in use: the length of the longest row."""
        return max(self.lengths)

    def attention_mask(self, device: str) -> torch.Tensor:
        """int64 [rows, columns + 1]: 1 where a row has a token, the one to come included."""
        columns = torch.arange(self.columns + 1, device=device)
        missing = self.columns - torch.tensor(self.lengths, device=device)
        return (columns >= missing[:, None]).to(torch.int64)

    def positions(self, device: str) -> torch.Tensor:
        """int64 [rows, 1]: the position of each row's next token."""
        return torch.tensor(self.lengths, device=device)[:, None]

    def stepped(self) -> None:
        """The model has appended a column."""
        self.lengths = [n + 1 for n in self.lengths]

    def join(self, other: BatchCache) -> None:
        """Append the rows of ``other``, which is used up."""
        columns = max(self.columns, other.columns)
        for mine, new in zip(self.cache.layers, other.cache.layers, strict=True):
            mine.keys = torch.cat([_padded(mine.keys, columns), _padded(new.keys, columns)])
            mine.values = torch.cat([_padded(mine.values, columns), _padded(new.values, columns)])
        self.lengths += other.lengths

    def repeat(self, rows: int) -> None:
        """Make ``rows`` equal rows of the only one.

        Raises:
            EngineError: there are several.
        """
        if len(self.lengths) != 1:
            raise EngineError("only a single row can be repeated")
        for layer in self.cache.layers:
            layer.keys = layer.keys.repeat(rows, 1, 1, 1)
            layer.values = layer.values.repeat(rows, 1, 1, 1)
        self.lengths *= rows

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows, and columns that none of these has."""
        self.lengths = [self.lengths[r] for r in rows]
        index = torch.tensor(list(rows), device=self.cache.layers[0].keys.device)
        for layer in self.cache.layers:
            layer.keys = layer.keys.index_select(0, index)[:, :, -self.columns :]
            layer.values = layer.values.index_select(0, index)[:, :, -self.columns :]


def _padded(states: torch.Tensor, columns: int) -> torch.Tensor:
    """``states`` [rows, heads, n, size] with zeros on the left up to ``columns``."""
    return torch.nn.functional.pad(states, (0, 0, columns - states.shape[2], 0))

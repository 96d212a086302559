"""The KV cache of several sequences in one transformers cache, for one forward pass a step.

Sequences differ in length. They stand right-aligned: what a row lacks to the longest one is filled
on the left with zeros that the attention mask hides, so that every row's next token goes to the
last column. Rows come and go between steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    A row may sit a step out: its column is a hole that the mask hides.
    """

    def __init__(self, cache: Any, length: int) -> None:
        """Begin with one row: the cache of its prompt, ``length`` tokens long."""
        self.cache = cache
        #: Tokens of each row.
        self.lengths = [length]
        #: bool [rows, columns], on the CPU: where a row has a token.
        self._filled = torch.ones(1, length, dtype=torch.bool)

    @property
    def columns(self) -> int:
        """Columns in use."""
        return self._filled.shape[1]

    def attention_mask(self, device: str) -> torch.Tensor:
        """int64 [rows, columns + 1]: 1 where a row has a token, the one to come included."""
        to_come = torch.ones(len(self.lengths), 1, dtype=torch.bool)
        return torch.cat([self._filled, to_come], 1).to(device, torch.int64)

    def positions(self, device: str) -> torch.Tensor:
        """int64 [rows, 1]: the place of each row's next token."""
        return torch.tensor(self.lengths, device=device)[:, None]

    def stepped(self, rows: Collection[int] | None = None) -> None:
        """The model has appended a column, which counts for ``rows`` (all by default)."""
        count = len(self.lengths)
        taken = torch.tensor([rows is None or r in rows for r in range(count)])
        self._filled = torch.cat([self._filled, taken[:, None]], 1)
        self.lengths = [n + int(t) for n, t in zip(self.lengths, taken.tolist(), strict=True)]

    def join(self, other: BatchCache) -> None:
        """Append the rows of ``other``, which is used up."""
        columns = max(self.columns, other.columns)
        for mine, new in zip(self.cache.layers, other.cache.layers, strict=True):
            mine.keys = torch.cat([_padded(mine.keys, columns), _padded(new.keys, columns)])
            mine.values = torch.cat([_padded(mine.values, columns), _padded(new.values, columns)])
        filled = [
            torch.nn.functional.pad(b._filled, (columns - b.columns, 0)) for b in (self, other)
        ]
        self._filled = torch.cat(filled)
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
        self._filled = self._filled.repeat(rows, 1)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows, and columns that none of these has."""
        self.lengths = [self.lengths[r] for r in rows]
        kept = self._filled[list(rows)]
        used = kept.any(0).nonzero().flatten()
        first, whole = int(used[0]), len(used) == self.columns - int(used[0])
        self._filled = kept[:, first:] if whole else kept[:, used]
        device = self.cache.layers[0].keys.device
        index, used = torch.tensor(list(rows), device=device), used.to(device)
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name).index_select(0, index)
                states = states[:, :, first:] if whole else states.index_select(2, used)
                setattr(layer, name, states)


def _padded(states: torch.Tensor, columns: int) -> torch.Tensor:
    """``states`` [rows, heads, n, size] with zeros on the left up to ``columns``."""
    return torch.nn.functional.pad(states, (0, 0, columns - states.shape[2], 0))

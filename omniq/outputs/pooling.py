"""Embeddings: inline as numbers while they are small, as a file when they are not."""

from __future__ import annotations

import math
from typing import Any

from omniq.outputs.base import (
    OutputContext,
    OutputError,
    OutputHandler,
    ProcessedOutput,
    only_tensor,
)
from omniq.outputs.tensors import safetensors_artifact

# About 80 KB of JSON: enough for any one embedding, small enough for a job record.
INLINE_MAX = 4096


class PoolingHandler(OutputHandler):
    """A vector [dim] or several [n, dim] become a JSON list of floats, or lists of them.

    Above ``INLINE_MAX`` numbers, or with format ``safetensors``, there is a safetensors file
    instead; with ``json`` the list is inline whatever its size.
    """

    formats = ("auto", "json", "safetensors")

    def encode(self, name: str, form: str, data: Any, context: OutputContext) -> ProcessedOutput:
        """Inline list or file."""
        if isinstance(data, list):
            _check_numbers(name, data)
            return ProcessedOutput(value=data)
        tensor = only_tensor(name, data)
        if tensor.ndim not in (1, 2) or not tensor.is_floating_point():
            raise OutputError(
                f"output {name!r}: an embedding is floating point [dim] or [n, dim], "
                f"not {tensor.dtype} {list(tensor.shape)}"
            )
        if form == "safetensors" or (form == "auto" and tensor.numel() > INLINE_MAX):
            return ProcessedOutput(artifact=safetensors_artifact(name, {name: tensor}, context))
        values = tensor.tolist()
        _check_numbers(name, values)
        return ProcessedOutput(value=values)


def _check_numbers(name: str, values: list[Any]) -> None:
    """JSON has no NaN or infinity."""
    for item in values:
        if isinstance(item, list):
            _check_numbers(name, item)
        elif isinstance(item, bool) or not isinstance(item, int | float) or not math.isfinite(item):
            raise OutputError(f"output {name!r}: {item!r} is no finite number")

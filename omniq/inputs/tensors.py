"""Latents of a request: one floating-point tensor in a safetensors file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omniq.inputs.faults import invalid, unsupported

FLOATS = ("F16", "BF16", "F32", "F64")
#: Latents of pictures are [n, C, h, w], of videos [n, C, f, h, w].
AXES = (4, 5)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file, and what is in it."""

    data: bytes
    dtype: str
    shape: list[int]


def tensor_file(value: Any, field: str) -> TensorFile:
    """Latents as a safetensors file of one tensor.

    Args:
        value: such a file's bytes, an array or torch tensor, or a mapping with one of them
            (``OmniRequestOutput.latents``).
        field: names the input in errors.

    Raises:
        UnsupportedInput: the bytes are no safetensors file.
        InvalidRequest: not exactly one tensor, no floating point, or not four or five axes.
    """
    from safetensors import SafetensorError, deserialize  # noqa: PLC0415 - few requests need it

    data = value if isinstance(value, bytes) else _saved(value, field)
    try:
        entries = deserialize(data)
    except SafetensorError as exc:
        raise unsupported(field, f"must be a safetensors file: {exc}") from exc
    if len(entries) != 1:
        names = ", ".join(sorted(name for name, _ in entries))
        raise invalid(field, f"the file must hold one tensor, holds {len(entries)}: {names}"[:300])
    entry = entries[0][1]
    dtype, shape = str(entry["dtype"]), [int(n) for n in entry["shape"]]
    if dtype not in FLOATS or len(shape) not in AXES or 0 in shape:
        raise invalid(
            field,
            f"must be floating point [n, C, h, w] or [n, C, f, h, w], is {dtype} {shape}",
        )
    return TensorFile(data, dtype, shape)


def _saved(value: Any, field: str) -> bytes:
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.values()))
    if type(value).__module__.partition(".")[0] == "torch":
        from safetensors.torch import save  # noqa: PLC0415 - imports torch

        return bytes(save({"latents": value.detach().cpu().contiguous()}))
    import numpy as np  # noqa: PLC0415 - few requests need it
    from safetensors.numpy import save as save_array  # noqa: PLC0415 - as above

    if not isinstance(value, np.ndarray):
        raise invalid(field, f"must be a tensor, not {type(value).__name__}")

    try:
        return bytes(save_array({"latents": np.ascontiguousarray(value)}))
    except KeyError as exc:
        raise invalid(field, f"must be floating point, is {value.dtype}") from exc

"""Named tensors as bytes, in the layout of safetensors files.

::

    8 bytes   length of the header, little-endian
    header    JSON: name -> {"dtype", "shape", "data_offsets"}, padded with spaces so that the data
              begins at a multiple of 64 bytes
    data      the tensors' elements in row-major order, without gaps; those of larger dtypes first,
              so that each tensor is aligned to its own elements

The ``safetensors`` package reads what this module writes and the other way round
(https://github.com/huggingface/safetensors). It is not used here because it can neither write into
given memory nor read tensors without copying them out of a buffer. Importing this module does not
import torch.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import orjson

from omniq.errors import BlobCorrupt, BlobError

if TYPE_CHECKING:
    import torch

    #: Anything with the buffer protocol: ``bytes``, ``mmap``, ``memoryview``, a numpy array.
    Buffer = Any

if sys.byteorder != "little":
    raise ImportError("omniq's blobs need a little-endian machine")

ALIGNMENT = 64
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 1 << 16
MAX_DIMS = 64
#: A reference describes so many tensors at most: it has to stay small.
MAX_DESCRIBED = 16

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_INT64_MAX = (1 << 63) - 1
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
# safetensors' name -> torch's. No FP4: torch counts pairs of elements, the format single ones.
_DTYPE_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}


@lru_cache(maxsize=1)
def dtypes() -> dict[str, torch.dtype]:
    """The dtypes that can be stored and that this torch has, by safetensors' names."""
    import torch  # noqa: PLC0415 - see the module's docstring

    return {n: getattr(torch, t) for n, t in _DTYPE_NAMES.items() if hasattr(torch, t)}


@lru_cache(maxsize=1)
def _names() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in dtypes().items()}


# -- writing ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor and where its elements go.

    Attributes:
        tensor: the elements as integers of the same size, any strides, on any device. Copying
            integers changes no bit and works for every dtype.
        start: first byte, counted from the start of the blob.
        end: one past the last byte.
    """

    tensor: torch.Tensor
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How a set of tensors will lie; nothing is copied yet.

    Attributes:
        nbytes: bytes of the whole blob.
        header: its first bytes, up to the data.
        parts: the data in order, without gaps.
        described: name -> ``'float32[1,16,8,8]'``, of at most :data:`MAX_DESCRIBED` tensors.
    """

    nbytes: int
    header: bytes
    parts: tuple[Part, ...]
    described: dict[str, str]

    def write_into(self, view: memoryview) -> None:
        """Write the blob to the start of ``view``: one copy, also from a device.

        Args:
            view: writable bytes, at least ``nbytes`` of them.
        """
        import torch  # noqa: PLC0415 - see the module's docstring

        if len(view) < self.nbytes:
            raise ValueError(f"{self.nbytes} bytes do not fit into {len(view)}")
        view[: len(self.header)] = self.header
        for part in self.parts:
            source = part.tensor
            if not source.numel():
                continue
            target = torch.frombuffer(
                view, dtype=source.dtype, count=source.numel(), offset=part.start
            )
            target.view(source.shape).copy_(source)

    def buffers(self) -> Iterator[memoryview]:
        """The blob piece by piece; only tensors on a device or with gaps are copied, one a time."""
        import torch  # noqa: PLC0415 - see the module's docstring

        yield memoryview(self.header)
        for part in self.parts:
            if count := part.tensor.numel():
                # Not view(-1): one element may have any stride and still be called contiguous.
                flat = part.tensor.cpu().contiguous().as_strided((count,), (1,))
                yield flat.view(torch.uint8).numpy().data


def plan(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Lay out named tensors (any shape, strides and device; dtypes as :func:`dtypes` lists).

    Raises:
        BlobError: a tensor cannot be stored (dtype, sparse, no data), or there are too many.
    """
    if len(tensors) > MAX_TENSORS:
        raise BlobError(f"{len(tensors)} tensors in one blob; at most {MAX_TENSORS} are allowed")
    for name, tensor in tensors.items():
        _check(name, tensor)
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        spans[name] = start, end
    header = _header(tensors, spans)
    base = len(header)
    return Layout(
        nbytes=base + end,
        header=header,
        parts=tuple(
            Part(_as_integers(tensors[name]), base + start, base + stop)
            for name, (start, stop) in spans.items()
        ),
        described=describe(tensors),
    )


def _check(name: str, tensor: torch.Tensor) -> None:
    import torch  # noqa: PLC0415 - see the module's docstring

    fault = None
    if name == _METADATA:
        fault = "the name is reserved"
    elif not isinstance(tensor, torch.Tensor):
        fault = f"it is no tensor but {type(tensor).__name__}"
    elif tensor.layout is not torch.strided:
        fault = f"layout {tensor.layout}"
    elif tensor.dtype not in _names():
        fault = f"dtype {tensor.dtype}"
    elif tensor.is_meta:
        fault = "it is on the meta device and holds no data"
    elif tensor.dim() > MAX_DIMS:
        fault = f"{tensor.dim()} dimensions"
    if fault:
        raise BlobError(f"tensor {name!r} cannot be stored: {fault}")


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    import torch  # noqa: PLC0415 - see the module's docstring

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(integers[tensor.dtype.itemsize])


def _header(tensors: Mapping[str, torch.Tensor], spans: Mapping[str, tuple[int, int]]) -> bytes:
    entries = {
        name: {"dtype": _names()[t.dtype], "shape": list(t.shape), "data_offsets": spans[name]}
        for name, t in tensors.items()
    }
    try:
        text = orjson.dumps(entries)
    except orjson.JSONEncodeError as exc:  # such as a lone surrogate
        raise BlobError(f"a tensor has an impossible name: {exc}") from exc
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise BlobError(f"the header takes {len(text)} bytes; at most {MAX_HEADER_BYTES} are read")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name -> ``'float32[1,16,8,8]'``, of at most :data:`MAX_DESCRIBED` tensors."""
    return {
        name: f"{str(t.dtype).removeprefix('torch.')}[{','.join(map(str, t.shape))}]"
        for name, t in list(tensors.items())[:MAX_DESCRIBED]
    }


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: torch.dtype
    shape: list[int]
    start: int
    end: int


def parse(buffer: Buffer) -> dict[str, torch.Tensor]:
    """The tensors of a blob, as views of ``buffer``, which lives as long as any of them.

    Nothing is copied except tensors that are not aligned to their elements (this module writes no
    such). Views of a read-only buffer must not be written to: that may end the process.

    Raises:
        BlobCorrupt: ``buffer`` is not exactly one well-formed blob.
    """
    view = memoryview(buffer)
    if view.format != "B" or view.ndim != 1:
        view = view.cast("B")
    header, data_start = _read_header(view)
    entries = _entries(header, len(view) - data_start)
    holder: Buffer = _writable_alias(view) if view.readonly else view
    return {e.name: _tensor(holder, data_start, e) for e in entries}


def _tensor(holder: Buffer, data_start: int, entry: _Entry) -> torch.Tensor:
    import torch  # noqa: PLC0415 - see the module's docstring

    if entry.start == entry.end:
        return torch.empty(entry.shape, dtype=entry.dtype)
    size = entry.dtype.itemsize
    flat = torch.frombuffer(
        holder,
        dtype=entry.dtype,
        count=(entry.end - entry.start) // size,
        offset=data_start + entry.start,
    )
    if flat.data_ptr() % size:
        part = memoryview(holder).cast("B")[data_start + entry.start : data_start + entry.end]
        flat = torch.frombuffer(bytearray(part), dtype=entry.dtype)
    return flat.view(entry.shape)


def _writable_alias(view: memoryview) -> Buffer:
    """The same memory, kept alive, as an object that does not say it is read-only.

    torch has no read-only tensors and warns once of each attempt. To silence that by
    ``warnings.catch_warnings`` is not safe while other threads run.
    """
    import numpy as np  # noqa: PLC0415 - heavy, and needed only here

    address = np.frombuffer(view, np.uint8).ctypes.data
    alias = (ctypes.c_ubyte * len(view)).from_address(address)
    alias._keeps = view  # type: ignore[attr-defined]
    return alias


def _read_header(view: memoryview) -> tuple[dict[str, Any], int]:
    """The parsed header and where the data begins."""
    if len(view) < _LENGTH_BYTES:
        _corrupt(f"only {len(view)} bytes")
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        _corrupt(f"a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
    data_start = _LENGTH_BYTES + length
    if data_start > len(view):
        _corrupt(f"a header of {length} bytes in a blob of {len(view)}")
    text = bytes(view[_LENGTH_BYTES:data_start])
    if not text.startswith(b"{"):
        _corrupt("the header is no JSON object")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as exc:
        raise BlobCorrupt(f"not a blob: its header is no JSON: {exc}") from exc
    return header, data_start


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _corrupt("a name stands twice in its header")
    return found


def _entries(header: dict[str, Any], data_bytes: int) -> list[_Entry]:
    """The header's tensors in its own order, checked to cover the data exactly."""
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _corrupt("its metadata are not strings by name")
    if len(header) > MAX_TENSORS:
        _corrupt(f"{len(header)} tensors; at most {MAX_TENSORS} are read")
    entries = [_entry(name, info) for name, info in header.items()]
    covered = 0
    for entry in sorted(entries, key=lambda e: (e.start, e.end)):
        if entry.start != covered:
            _corrupt(f"tensor {entry.name!r} leaves a gap or overlaps another one")
        covered = entry.end
    if covered != data_bytes:
        _corrupt(f"its tensors take {covered} bytes, its data {data_bytes}")
    return entries


def _entry(name: str, info: Any) -> _Entry:
    try:
        name.encode()
    except UnicodeEncodeError:
        _corrupt("a tensor's name is not Unicode")
    if not isinstance(info, dict) or info.keys() != _FIELDS:
        _corrupt(f"tensor {name!r} is not described by {', '.join(sorted(_FIELDS))}")
    dtype = dtypes().get(info["dtype"]) if isinstance(info["dtype"], str) else None
    if dtype is None:
        _corrupt(f"tensor {name!r} has the unknown dtype {info['dtype']!r}")
    shape, offsets = info["shape"], info["data_offsets"]
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        _corrupt(f"tensor {name!r} has an impossible shape")
    if not _naturals(offsets) or len(offsets) != 2:
        _corrupt(f"tensor {name!r} has impossible offsets")
    # Strides of an empty tensor are computed as if its zeros were ones, and must not overflow.
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize > _INT64_MAX:
        _corrupt(f"tensor {name!r} has an impossible shape")
    start, end = offsets
    if end - start != math.prod(shape) * dtype.itemsize:
        _corrupt(f"tensor {name!r} has {end - start} bytes, which its shape and dtype do not take")
    return _Entry(name, dtype, shape, start, end)


def _naturals(value: Any) -> bool:
    # `type`, as JSON's true is an int for isinstance().
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _corrupt(what: str) -> NoReturn:
    raise BlobCorrupt(f"not a blob: {what}")

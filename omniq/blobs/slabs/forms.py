"""Tensors to bytes and back for sets of tensors whose like was seen before.

A stage puts tensors of the same names, dtypes and shapes again and again. What
:mod:`omniq.blobs.codec` says of such a set, where each tensor lies and what the header is, then
need not be computed again; nor need a header be parsed whose bytes were parsed before. For small
blobs that is most of the work.

The only module of this package that imports torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
import torch

from omniq.blobs import codec
from omniq.blobs.slabs import device
from omniq.blobs.slabs.layout import MAX_ID_BYTES, slot_bytes

if TYPE_CHECKING:
    from omniq.blobs.slabs.owner import Slot
    from omniq.blobs.slabs.readers import Holder

#: So many sets and headers are remembered; then it starts over.
_REMEMBERED = 512
#: Headers above this size are parsed each time.
_LONG_HEADER = 4096
#: The header's own length, before its JSON.
_PREFIX = 8

_Tensor, _strided = torch.Tensor, torch.strided


@dataclass(slots=True)
class Form:
    """How one set of tensors is written.

    Attributes:
        nbytes: bytes of the blob.
        slot_bytes: bytes of the slot it needs.
        header_bytes: bytes of its header.
        described: for ``BlobRef.tensors``.
        plan: the codec's, with these very tensors; it copies from anywhere.
    """

    nbytes: int
    slot_bytes: int
    header_bytes: int
    described: dict[str, str]
    plan: codec.Layout

    def write(self, tensors: Mapping[str, torch.Tensor], slot: Slot) -> None:
        """Copy the tensors that the form was made of into the slot."""
        device.prepare(self.plan, slot.extent)
        self.plan.write_into(slot.view)


@dataclass(slots=True)
class PlainForm:
    """How tensors are written that lie in the CPU's memory without gaps, one after the other.

    Attributes:
        spans: tensor name -> first byte in the blob and number of bytes.
    """

    nbytes: int
    slot_bytes: int
    header_bytes: int
    described: dict[str, str]
    header: bytes
    spans: dict[str, tuple[int, int]]

    def write(self, tensors: Mapping[str, torch.Tensor], slot: Slot) -> None:
        """Copy tensors of this form into the slot, one thread, without the GIL."""
        slot.view[: self.header_bytes] = self.header
        for name, (start, size) in self.spans.items():
            ctypes.memmove(slot.address + start, tensors[name].data_ptr(), size)


class Forms:
    """The forms of the sets of tensors that were written; safe to use from any thread."""

    def __init__(self) -> None:
        self._known: dict[Any, PlainForm] = {}

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Form | PlainForm:
        """How to write these tensors.

        Raises:
            BlobError: one of them cannot be stored.
        """
        key: list[Any] = []
        for name, t in tensors.items():
            # Subclasses may keep their elements elsewhere.
            plain = type(t) is _Tensor and t.is_cpu and t.layout is _strided and not t.is_neg()
            if not plain or not t.is_contiguous():
                return self._any(tensors)
            key += name, t.dtype, t.shape
        return self._known.get(tuple(key)) or self._new(tuple(key), tensors)

    def _any(self, tensors: Mapping[str, torch.Tensor]) -> Form:
        plan = codec.plan(tensors)
        return Form(plan.nbytes, _slot_bytes(plan), len(plan.header), plan.described, plan)

    def _new(self, key: Any, tensors: Mapping[str, torch.Tensor]) -> Form | PlainForm:
        if any(t.dtype.is_complex for t in tensors.values()):  # it may be marked as conjugate
            return self._any(tensors)
        plan = codec.plan(tensors)
        base = len(plan.header)
        entries = orjson.loads(plan.header[_PREFIX:])
        form = PlainForm(
            plan.nbytes,
            _slot_bytes(plan),
            base,
            plan.described,
            plan.header,
            {
                name: (base + entries[name]["data_offsets"][0], t.numel() * t.itemsize)
                for name, t in tensors.items()
            },
        )
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[key] = form
        return form


def _slot_bytes(plan: codec.Layout) -> int:
    return slot_bytes(plan.nbytes + MAX_ID_BYTES)


class _Span(NamedTuple):
    """One tensor of a blob, as numpy can make it in one step.

    Attributes:
        name: the tensor's.
        shape: the tensor's.
        plain: its dtype in numpy, or an integer of the same size if numpy has none such.
        start: first byte in the blob.
        dtype: its dtype in torch if ``plain`` is not it.
    """

    name: str
    shape: tuple[int, ...]
    plain: np.dtype[Any]
    start: int
    dtype: torch.dtype | None


class Views:
    """Where the tensors lie under headers that were read; safe to use from any thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], list[_Span]] = {}

    def tensors(self, holder: Holder, header_bytes: int, length: int) -> dict[str, torch.Tensor]:
        """The tensors of the blob in the first ``length`` bytes, as views that keep the holder.

        Raises:
            BlobCorrupt: it is not well-formed.
        """
        header: Any = holder[:header_bytes]  # of c_char, slices are bytes
        key = header, length
        spans = self._known.get(key)
        if spans is None:
            tensors = codec.parse(memoryview(holder).cast("B")[:length])
            self._remember(key, ctypes.addressof(holder), tensors)
            return tensors
        found = {}
        buffer: Any = holder
        for name, shape, plain, start, dtype in spans:
            tensor = torch.from_numpy(np.ndarray(shape, plain, buffer, start))
            found[name] = tensor if dtype is None else tensor.view(dtype)
        return found

    def _remember(
        self, key: tuple[bytes, int], first: int, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        header, length = key
        if not _PREFIX < len(header) <= _LONG_HEADER:
            return
        spans = []
        for name, tensor in tensors.items():
            start = tensor.data_ptr() - first
            if not 0 <= start < length:  # an empty tensor, or one that had to be copied
                return
            try:
                plain, dtype = tensor.numpy().dtype, None
            except TypeError:
                plain, dtype = np.dtype(f"i{tensor.itemsize}"), tensor.dtype
            spans.append(_Span(name, tuple(tensor.shape), plain, start, dtype))
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[key] = spans

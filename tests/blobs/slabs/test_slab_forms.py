"""What is remembered of tensors and headers changes nothing: the codec decides, each time."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from blob_tools import assert_same
from hypothesis import given, settings
from slab_players import make_store

from omniq.blobs import codec
from omniq.blobs.slabs import SlabStore, forms

DTYPES = st.sampled_from(list(codec.dtypes().values()))


@pytest.fixture(scope="module")
def store() -> Iterator[SlabStore]:
    store = make_store("testslabforms")
    yield store
    assert store.own() == []
    store.close()


def there_and_back(store: SlabStore, tensors: dict[str, torch.Tensor]) -> None:
    ref = store.put("j.1", tensors)
    try:
        assert bytes(store.buffer(ref)) == encoded(tensors)
        for _ in range(2):
            assert_same(store.get(ref), tensors)
    finally:
        store.delete(ref)


def encoded(tensors: dict[str, torch.Tensor]) -> bytes:
    plan = codec.plan(tensors)
    data = bytearray(plan.nbytes)
    plan.write_into(memoryview(data))
    return bytes(data)


@st.composite
def some_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    tensors = {}
    for name in draw(st.lists(st.sampled_from("abcde"), unique=True, max_size=4)):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype = draw(DTYPES)
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, 64), dtype=torch.uint8)
        tensor = raw.view(dtype)[..., : draw(st.integers(0, 2))]
        layout = draw(st.sampled_from(["as it is", "contiguous", "transposed", "scalar"]))
        if layout == "contiguous":
            tensor = tensor.contiguous()
        elif layout == "transposed":
            tensor = tensor.mT if tensor.dim() > 1 else tensor
        elif layout == "scalar" and tensor.numel():
            tensor = tensor.flatten()[0]
        tensors[name] = tensor
    return tensors


@settings(max_examples=300, deadline=None)
@given(some_tensors())
def test_any_tensors_are_written_as_the_codec_writes_them(
    store: SlabStore, tensors: dict[str, torch.Tensor]
) -> None:
    there_and_back(store, tensors)
    there_and_back(store, tensors)


SQUARE = torch.arange(16, dtype=torch.float32).view(4, 4)
COMPLEX = torch.complex(SQUARE, SQUARE + 1)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": SQUARE.mT},
        {"b": SQUARE},
        {"a": SQUARE.view(torch.int32)},
        {"a": SQUARE.view(2, 8)},
        {"a": SQUARE, "b": SQUARE},
        {"b": SQUARE, "a": SQUARE},
        {"a": SQUARE[1:3], "b": SQUARE[2:]},
        {"a": SQUARE.half(), "b": SQUARE, "c": SQUARE.double()},
        {"a": COMPLEX},
        {"a": COMPLEX.conj()},
        {"a": COMPLEX.conj().imag},
        {"a": COMPLEX.conj()[0, :1].imag},
        {"a": torch.nn.Parameter(SQUARE.clone())},
        {"a": SQUARE.clone().requires_grad_()},
        {"a": torch.tensor(5)},
        {"a": torch.empty(0, 3)},
        {"a": torch.empty(0, 3), "b": SQUARE},
    ],
    ids=str,
)
def test_what_only_looks_like_a_known_form_is_written_right(
    store: SlabStore, tensors: dict[str, torch.Tensor]
) -> None:
    there_and_back(store, {"a": SQUARE})
    there_and_back(store, {"a": COMPLEX})
    there_and_back(store, {"a": torch.ones(1)})
    there_and_back(store, tensors)


def test_memory_of_forms_and_headers_is_bounded(
    store: SlabStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "_REMEMBERED", 4)
    for number in range(1, 20):
        there_and_back(store, {"x": torch.zeros(number)})
    assert len(store._forms._known) <= 4
    assert len(store._views._known) <= 4


def test_a_view_from_a_remembered_header_keeps_the_slot(store: SlabStore) -> None:
    for number in range(3):
        ref = store.put("j.1", {"x": torch.full((64,), number)})
        tensor = store.get(ref)["x"]
        store.delete(ref)
        other = store.put("j.2", {"x": torch.full((64,), -1)})
        assert tensor.unique().tolist() == [number]
        store.delete(other)
        del tensor

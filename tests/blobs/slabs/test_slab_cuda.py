"""Tensors on a GPU go straight into registered shared memory."""

from __future__ import annotations

import pytest
import torch
from blob_tools import assert_same
from slab_players import make_store

from omniq.blobs import codec
from omniq.blobs.slabs import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", codec.dtypes().values(), ids=str)
def test_device_tensors_come_back_bit_for_bit(namespace: str, dtype: torch.dtype) -> None:
    """Read where they lie by the CPU, and copied to a device again; the slot is reused."""
    producer, consumer = make_store(namespace), make_store(namespace)
    most = 2 if dtype is torch.bool else 256
    for seed in range(3):
        torch.manual_seed(seed)
        source = torch.randint(0, most, (64, 1024), dtype=torch.uint8).view(dtype)
        on_device = source.cuda()
        sent = {
            "a": on_device, "strided": on_device[:, ::3], "scalar": on_device[1, 2],
            "empty": on_device[:0], "cpu": source,
        }  # fmt: skip
        expected = {
            "a": source, "strided": source[:, ::3], "scalar": source[1, 2],
            "empty": source[:0], "cpu": source,
        }  # fmt: skip
        ref = producer.put("j.1", sent)
        got = consumer.get(ref)
        assert_same(got, expected)
        assert_same({"again": got["a"].cuda().cpu()}, {"again": source})
        assert consumer.delete(ref)
        del got
    consumer.close()
    producer.close()


def test_other_streams_work_is_done_before_it_is_copied(namespace: str) -> None:
    """What was queued on the caller's stream is in the blob."""
    store = make_store(namespace)
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.zeros(1 << 24, device="cuda", dtype=torch.int64)
        for _ in range(50):
            tensor += 1
        ref = store.put("j.1", {"x": tensor})
    assert store.get(ref)["x"].unique().tolist() == [50]
    store.delete(ref)
    store.close()


def test_an_extent_is_registered_once_and_given_back(namespace: str) -> None:
    store = make_store(namespace, idle=0.0)
    tensor = torch.ones(1 << 20, device="cuda")
    refs = [store.put(f"j.{n}", {"x": tensor}) for n in range(4)]
    extents = list(store._allocator._extents.values())
    assert all(e.unregister not in (None, device._nothing) for e in extents)
    assert torch.frombuffer(extents[0].buffer, dtype=torch.uint8).is_pinned()
    for ref in refs:
        store.delete(ref)
    store.sweep(lambda _: False)
    assert store.stats()["own"]["extents"] == 0
    assert torch.cuda.current_stream().query(), "no error is left behind"
    store.close()

"""Tensors on a GPU go straight into registered shared memory."""

from __future__ import annotations

import pytest
import torch
from slab_players import make_store

from omniq.blobs.slabs import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_device_tensors_come_back_bit_for_bit(namespace: str, dtype: torch.dtype) -> None:
    store = make_store(namespace)
    source = torch.randn(256, 1024).to(dtype)
    tensors = {"a": source.cuda(), "b": source.cuda()[:, ::3], "c": source}
    for _ in range(3):
        ref = store.put("j.1", tensors)
        got = store.get(ref)
        assert torch.equal(got["a"], source)
        assert torch.equal(got["b"], source[:, ::3])
        assert torch.equal(got["c"], source)
        assert torch.equal(got["a"].cuda().cpu(), source)
        store.delete(ref)
        del got
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


def test_the_copy_uses_the_link(namespace: str) -> None:
    """A registered copy is much faster than the driver's own detour (about 5 GB/s)."""
    store = make_store(namespace, 2 << 30)
    tensor = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
    store.delete(store.put("j.0", {"x": tensor}))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    store.delete(store.put("j.1", {"x": tensor}))
    end.record()
    end.synchronize()
    assert tensor.nbytes / start.elapsed_time(end) / 1e6 > 10, "GB/s"
    store.close()

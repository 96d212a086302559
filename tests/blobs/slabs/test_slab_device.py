"""Registering memory with CUDA's runtime, as far as that can be seen without a device."""

from __future__ import annotations

import types

import pytest
import torch
from slab_players import filled, make_store

from omniq.blobs import codec
from omniq.blobs.slabs import device


class Runtime:
    """Stands where CUDA's runtime would; says what it was asked."""

    cudaError = types.SimpleNamespace(success=0)

    def __init__(self, answer: int) -> None:
        self.answer, self.calls = answer, []

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        self.calls.append(("register", start, size, flags))
        return self.answer

    def cudaHostUnregister(self, start: int) -> int:
        self.calls.append(("unregister", start))
        return 0


@pytest.fixture
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime(getattr(request, "param", 0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def plan_on_device() -> codec.Layout:
    part = types.SimpleNamespace(tensor=types.SimpleNamespace(is_cuda=True))
    return types.SimpleNamespace(parts=(part,))  # type: ignore[return-value]


def test_an_extent_is_registered_once_and_unregistered_when_it_goes(
    namespace: str, runtime: Runtime
) -> None:
    store = make_store(namespace, idle=0.0)
    ref = store.put("j.1", filled(1, 1000))
    [extent] = store._allocator._extents.values()
    for _ in range(2):
        device.prepare(plan_on_device(), extent)
    assert runtime.calls == [("register", extent.address, extent.size, 0)]
    store.delete(ref)
    store.sweep(lambda _: True)
    assert runtime.calls[1:] == [("unregister", extent.address)]
    store.close()


def test_tensors_in_the_cpus_memory_register_nothing(namespace: str, runtime: Runtime) -> None:
    store = make_store(namespace)
    store.delete(store.put("j.1", {"x": torch.zeros(4, 4).mT}))
    assert runtime.calls == []
    store.close()


@pytest.mark.parametrize("runtime", [2], indirect=True)
def test_memory_that_cannot_be_registered_is_used_as_it_is(
    namespace: str, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store(namespace)
    ref = store.put("j.1", filled(1, 1000))
    [extent] = store._allocator._extents.values()
    for _ in range(2):
        device.prepare(plan_on_device(), extent)
    assert len(runtime.calls) == 1
    assert "not pinned" in caplog.text
    store.delete(ref)
    store.close()
    assert len(runtime.calls) == 1

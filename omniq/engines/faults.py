"""Turning whatever a model library raises into the engine errors the worker acts on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from omniq.engines.base import Cancelled
from omniq.errors import EngineDead, EngineError, EngineOutOfMemory, OmniqError

# In what is not a torch.OutOfMemoryError: torch's allocator on the CPU, CUDA's own allocations
# (pinned memory, graphs), cuBLAS.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


@contextlib.contextmanager
def engine_faults(what: str) -> Iterator[None]:
    """Inside, every exception leaves as an :class:`EngineError` that starts with ``what``.

    omniq's own errors and :class:`Cancelled` pass unchanged.

    Raises:
        EngineOutOfMemory: device or host memory ran out; cached device memory was released, so
            that only this request fails.
        EngineDead: the CUDA context is broken; nothing more can run in this process.
        EngineError: anything else; the device can go on.
    """
    try:
        yield
    except (OmniqError, Cancelled):
        raise
    except (torch.OutOfMemoryError, MemoryError) as exc:
        raise _out_of_memory(what, exc) from exc
    except Exception as exc:
        # Libraries say in a plain RuntimeError what CUDA told them, and not every error of CUDA is
        # the end: only the device knows.
        if lost := _lost_device(exc):
            raise EngineDead(f"{what}: the device failed: {lost}") from exc
        if any(text in str(exc) for text in _OUT_OF_MEMORY):
            raise _out_of_memory(what, exc) from exc
        raise EngineError(f"{what}: {type(exc).__name__}: {exc}") from exc


def _lost_device(fault: Exception) -> str | None:
    """What says that nothing can run any more on a device that this process uses."""
    if not torch.cuda.is_available():  # who else has an AcceleratorError cannot be asked
        return str(fault) if isinstance(fault, torch.AcceleratorError) else None
    for number in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        # A look at one that is not in use would make a context on it.
        if torch.cuda.memory_reserved(number):
            try:
                torch.cuda.synchronize(number)
            except RuntimeError as exc:
                answer = str(exc).partition("\n")[0]
                return f"{fault}; cuda:{number} answers: {answer}"
    return None


def _out_of_memory(what: str, exc: BaseException) -> EngineOutOfMemory:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    first_line = str(exc).partition("\n")[0]
    return EngineOutOfMemory(
        f"{what}: out of memory: {first_line}",
        hint="ask for less at once (smaller size, fewer tokens), or lower max_in_flight",
    )

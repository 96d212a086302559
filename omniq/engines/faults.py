"""Turning whatever a model library raises into the engine errors the worker acts on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from omniq.engines.base import Cancelled
from omniq.errors import EngineDead, EngineError, EngineOutOfMemory, OmniqError

# torch's CPU allocator raises a plain RuntimeError with this text.
_CPU_ALLOCATOR = "DefaultCPUAllocator"


@contextlib.contextmanager
def engine_faults(what: str) -> Iterator[None]:
    """Inside, every exception leaves as an :class:`EngineError` that starts with ``what``.

    omniq's own errors and :class:`Cancelled` pass unchanged.

    Raises:
        EngineOutOfMemory: device or host memory ran out; cached device memory was released, so
            that only this request fails.
        EngineDead: the CUDA context is broken; nothing more can run in this process.
        EngineError: anything else.
    """
    try:
        yield
    except (OmniqError, Cancelled):
        raise
    except (torch.OutOfMemoryError, MemoryError) as exc:
        raise _out_of_memory(what, exc) from exc
    except torch.AcceleratorError as exc:
        raise EngineDead(f"{what}: the device failed: {exc}") from exc
    except Exception as exc:
        if _CPU_ALLOCATOR in str(exc):
            raise _out_of_memory(what, exc) from exc
        raise EngineError(f"{what}: {type(exc).__name__}: {exc}") from exc


def _out_of_memory(what: str, exc: BaseException) -> EngineOutOfMemory:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    first_line = str(exc).partition("\n")[0]
    return EngineOutOfMemory(
        f"{what}: out of memory: {first_line}",
        hint="ask for less at once (smaller size, fewer tokens), or lower max_in_flight",
    )

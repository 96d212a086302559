"""Tensors on a GPU: from the device straight into shared memory, in one copy.

A device can write by itself (DMA) only to memory that is pinned; for other memory its driver copies
through a small pinned buffer of its own, at a fraction of the speed. So the first blob that comes
from a device has its extent registered, once; later blobs find it so.

Consumers are not registered: they map privately, and to pin such memory would copy it.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omniq.blobs.codec import Layout
    from omniq.blobs.slabs.owner import Extent

logger = logging.getLogger(__name__)

_lock = threading.Lock()


def prepare(layout: Layout, extent: Extent) -> None:
    """Register the extent if a tensor of the blob is on a CUDA device and it is not yet."""
    if extent.unregister is None and any(part.tensor.is_cuda for part in layout.parts):
        with _lock:
            if extent.unregister is None:
                _register(extent)


def _register(extent: Extent) -> None:
    import torch  # noqa: PLC0415 - whoever has a CUDA tensor has it

    runtime = torch.cuda.cudart()
    start = extent.address
    error = runtime.cudaHostRegister(start, extent.size, 0)
    if error != runtime.cudaError.success:
        # Such as a limit on locked memory. Copies go through the driver's buffer then.
        logger.warning("shared memory is not pinned for the GPU, copies are slower: %s", error)
        extent.unregister = _nothing
        return
    extent.unregister = lambda: runtime.cudaHostUnregister(start)


def _nothing() -> None:
    pass

"""Blobs: immutable named tensors under a key, in shared memory or in Redis.

The public names are imported on first use; none of them needs torch before tensors are handled.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omniq.blobs.base import BlobRef, BlobStore
    from omniq.blobs.host import host_identity
    from omniq.blobs.redis import RedisStore
    from omniq.blobs.router import BlobRouter
    from omniq.blobs.slabs import SlabStore

__all__ = ["BlobRef", "BlobRouter", "BlobStore", "RedisStore", "SlabStore", "host_identity"]

# Eager imports would be circular: the job model needs BlobRef, and the router the job model.
_HOMES = {
    "BlobRef": "omniq.blobs.base",
    "BlobRouter": "omniq.blobs.router",
    "BlobStore": "omniq.blobs.base",
    "RedisStore": "omniq.blobs.redis",
    "SlabStore": "omniq.blobs.slabs",
    "host_identity": "omniq.blobs.host",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

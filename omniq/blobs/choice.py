"""Which store a blob goes to, and why: from where those live who will read it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Literal, NamedTuple

from pydantic import BaseModel, Field

Mode = Literal["auto", "shm", "redis"]
Store = Literal["shm", "redis"]


class Where(StrEnum):
    """Where the consumers of an output live, as seen from its producer."""

    SAME_HOST = "all consumers are on this host"
    OTHER_HOSTS = "consumers on other hosts"
    NONE_KNOWN = "no live consumer known"


class Choice(NamedTuple):
    """A store, and why that one; for people."""

    store: Store
    reason: str


class BlobUse(BaseModel):
    """What a worker says of its blobs with every heartbeat. All sizes in bytes."""

    mode: Mode = Field(description="Its OMNIQ_BLOB_STORE.")
    shared_memory: bool = Field(description="Whether it has shared memory at all.")
    slabs: int = Field(0, description="Files of its own pool, each of equal slots.")
    slab_bytes: int = Field(0, description="Their size.")
    used_bytes: int = Field(0, description="Slots that hold a blob, or are still read.")
    blobs: int = Field(0, description="Blobs in its pool that nobody freed.")
    host_bytes: int = Field(0, description="What all workers of its host hold together.")
    max_bytes: int = Field(0, description="The most they may hold: OMNIQ_SHM_MAX_BYTES.")
    puts: dict[Store, int] = Field(
        default_factory=dict, description="Blobs written since its start, by store."
    )


def where(host: str, consumers: Iterable[set[str]]) -> Where:
    """Where the consumers live.

    Args:
        host: the producer's.
        consumers: for each stage that reads the output, the hosts of its live workers.
    """
    found = Where.SAME_HOST
    for hosts in consumers:
        if not hosts:
            return Where.NONE_KNOWN
        if hosts != {host}:
            found = Where.OTHER_HOSTS
    return found


def choose(mode: Mode, *, shared_memory: bool, consumers: Where) -> Choice:
    """The store for an output, as long as there is room in it."""
    if mode != "auto":
        return Choice(mode, f"forced by OMNIQ_BLOB_STORE={mode}")
    if not shared_memory:
        return Choice("redis", "the producer has no shared memory")
    return Choice("shm" if consumers is Where.SAME_HOST else "redis", consumers.value)

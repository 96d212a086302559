"""Where a stage's forwards are computed: the interface, and the usual case of one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omniq.engines.diffusion.cache import DiTCacheManager
from omniq.engines.diffusion.cache_dit import StateName


@dataclass(frozen=True, slots=True)
class Share:
    """One forward of ``module``; ``state`` names the cache state to use, None computes all."""

    module: Any
    kwargs: Mapping[str, Any]
    state: StateName | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward gave, and whether the cache skipped blocks of it."""

    output: Any
    hit: bool = False


class Devices(Protocol):
    """Computes forwards, as many at a time as there are branches."""

    branches: int

    def forward(self, shares: Sequence[Share | None]) -> list[Computed | None]:
        """One forward by each branch, which idles for a None; the results in the same order.

        A branch keeps cache state of its own, so that a state must always go to the same one.

        Raises:
            EngineDead: nothing more can be computed.
        """

    def drop(self, request_id: str) -> None:
        """Forget the cache state of a request; never raises."""


class OneDevice:
    """Forwards in this process."""

    branches = 1

    def __init__(self, cache: DiTCacheManager) -> None:
        self._cache = cache

    def forward(self, shares: Sequence[Share | None]) -> list[Computed | None]:
        """As :meth:`Devices.forward`."""
        return [None if s is None else compute(s, self._cache) for s in shares]

    def drop(self, request_id: str) -> None:
        """As :meth:`Devices.drop`."""
        self._cache.drop(request_id)


def compute(share: Share, cache: DiTCacheManager) -> Computed:
    """The forward, here and now."""
    if share.state is None:
        # Requests without cache, while the transformer has cache hooks, take none of it.
        with cache.unused():
            return Computed(share.module(**share.kwargs)[0])
    with cache.step(share.state):
        output = share.module(**share.kwargs)[0]
    return Computed(output, cache.hit)

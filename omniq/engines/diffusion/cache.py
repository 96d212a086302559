"""Cache acceleration by diffusers' hooks, with the state of each request kept apart.

The hooks reuse what a transformer computed at an earlier step. Pipelines name that state ``cond``
and ``uncond``; for requests that take turns the name must hold the request too, or they read each
other's.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omniq.config.stage import DiTCacheConfig
from omniq.engines.diffusion.cache_dit import UNUSED, CacheDitStates, StateName, apply_cache_dit
from omniq.engines.families.base import Family
from omniq.errors import ConfigError


@dataclass(slots=True)
class CacheUse:
    """What the cache did for one request: forwards in all, and those that skipped blocks."""

    forwards: int = 0
    hits: int = 0

    def metrics(self) -> dict[str, float | int]:
        """As metrics of a stage."""
        return {
            "cache_steps_skipped": self.hits,
            "cache_hit_ratio": self.hits / self.forwards if self.forwards else 0.0,
        }


class DiTCacheManager:
    """Installs the hooks of one method and keeps their state by request.

    Decisions depend on all samples of a forward, so a cached request's calls never join another's;
    requests still take turns step by step. State is bounded: when it grows past ``max_bytes`` or
    ``max_requests``, that of other requests is evicted, and their next step computes everything.

    Args:
        config: method and bounds; method ``none`` installs nothing.
        family: names the attention modules, for methods that hook those.
    """

    def __init__(self, config: DiTCacheConfig, family: Family) -> None:
        self.config, self._family = config, family
        self._managers: list[Any] = []
        self._computed = False
        self._order: OrderedDict[str, None] = OrderedDict()
        self.evictions = 0

    @property
    def enabled(self) -> bool:
        """Whether hooks are installed."""
        return bool(self._managers)

    def install(self, modules: Sequence[Any]) -> None:
        """Put the hooks on the transformers.

        Raises:
            ConfigError: diffusers has no such cache for this transformer.
        """
        method = self.config.method
        if method == "none":
            return
        if method not in self._family.caches:
            raise ConfigError(
                f"cache {method!r} does not fit {type(modules[0]).__name__}; "
                f"allowed: none, {', '.join(self._family.caches)}"
            )
        self._family.prepare_cache()
        for module in modules:
            try:
                self._apply(module)
            except (ValueError, IndexError, KeyError, AttributeError) as exc:
                raise ConfigError(
                    f"cache {self.config.method!r} does not fit {type(module).__name__}: {exc}"
                ) from exc
            managers = _state_managers(module)
            managers += [CacheDitStates(module)] if method == "cache_dit" else []
            if not managers:
                raise ConfigError(
                    f"cache {self.config.method!r} found no blocks in {type(module).__name__}"
                )
            self._managers += managers
            self._probe(module)

    @property
    def hit(self) -> bool:
        """Whether the last :meth:`step` skipped blocks."""
        return not self._computed

    @property
    def decides_by_rows(self) -> bool:
        """Whether the rows of a forward decide together, so that they must stay together."""
        return self.config.method in ("first_block", "cache_dit")

    @contextlib.contextmanager
    def step(self, name: StateName) -> Iterator[None]:
        """Around one forward of one request (id, context): its state, then the bounds."""
        request_id = name[0]
        self._computed = False
        with self._context(name):
            yield
        if request_id not in self._order or self.config.eviction == "lru":
            self._order[request_id] = None
            self._order.move_to_end(request_id)
        self._evict(request_id)

    @contextlib.contextmanager
    def unused(self) -> Iterator[None]:
        """Around a forward that is to compute everything, for whichever requests."""
        if not self._managers:
            yield
            return
        try:
            with self._context(UNUSED):
                yield
        finally:
            self._forget(UNUSED[0])

    def drop(self, request_id: str) -> None:
        """Forget a request that ended, however it did."""
        self._forget(request_id)
        self._order.pop(request_id, None)

    def nbytes(self, request_id: str | None = None) -> int:
        """Bytes of all state, or of one request's."""
        return sum(
            _nbytes(vars(state))
            for manager in self._managers
            for name, state in manager._state_cache.items()
            if request_id is None or name[0] == request_id
        )

    def _evict(self, current: str) -> None:
        # Oldest first; the request that just ran goes last, if it alone is too large.
        victims = [r for r in self._order if r != current] + [current]
        while victims and (
            len(self._order) > self.config.max_requests or self.nbytes() > self.config.max_bytes
        ):
            victim = victims.pop(0)
            self._forget(victim)
            self._order.pop(victim, None)
            self.evictions += 1

    def _forget(self, request_id: str) -> None:
        for manager in self._managers:
            for name in [n for n in manager._state_cache if n[0] == request_id]:
                del manager._state_cache[name]

    @contextlib.contextmanager
    def _context(self, name: StateName) -> Iterator[None]:
        from diffusers.hooks.hooks import CacheContext  # noqa: PLC0415 - slow import

        context = CacheContext(name)  # to the hooks only a key of a dict
        for manager in self._managers:
            manager.set_context(context)
        try:
            yield
        finally:
            for manager in self._managers:
                manager.set_context(None)

    def _apply(self, module: Any) -> None:
        from diffusers import hooks  # noqa: PLC0415 - slow import

        config = self.config
        if config.method == "cache_dit":
            apply_cache_dit(module, config)
        elif config.method == "first_block":
            threshold = hooks.FirstBlockCacheConfig(threshold=config.threshold)
            hooks.apply_first_block_cache(module, threshold)
        elif config.method == "taylorseer":
            taylor = hooks.TaylorSeerCacheConfig(
                cache_interval=config.interval,
                disable_cache_before_step=config.warmup_steps,
                max_order=config.order,
                cache_identifiers=list(self._family.attention_modules),
            )
            hooks.apply_taylorseer_cache(module, taylor)
        else:
            magnitude = hooks.MagCacheConfig(
                threshold=config.threshold,
                num_inference_steps=config.num_inference_steps,
                mag_ratios=list(config.mag_ratios),
            )
            hooks.apply_mag_cache(module, magnitude)

    def _probe(self, module: Any) -> None:
        """Note when the last block's attention really computes: if it does not, it was a hit."""
        blocks = [m for m in module.children() if isinstance(m, torch.nn.ModuleList) and len(m)]
        names = [(n, m) for n, m in blocks[-1][-1].named_modules() if not list(m.children())]
        inside = [m for n, m in names if "attn" in n.split(".")[0] or n.startswith("attention.")]
        leaf = (inside or [m for _, m in names])[0]
        leaf.register_forward_pre_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._computed = True


def _state_managers(module: Any) -> list[Any]:
    from diffusers.hooks.hooks import StateManager  # noqa: PLC0415 - slow import

    found: dict[int, Any] = {}
    for part in module.modules():
        registry = getattr(part, "_diffusers_hook", None)
        for hook in registry.hooks.values() if registry is not None else ():
            for value in vars(hook).values():
                if isinstance(value, StateManager):
                    found[id(value)] = value
    return list(found.values())


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_nbytes(v) for v in value.values())
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return sum(_nbytes(v) for v in value)
    return 0

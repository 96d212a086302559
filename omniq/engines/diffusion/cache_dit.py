"""The cache policy of the package cache-dit (DBCache), with the state of each request kept apart.

cache-dit itself keeps one state for each transformer, or for each run of a pipeline. Its state is
a mapping from names of blocks to contexts, which is exchanged here before every forward.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from omniq.config.stage import DiTCacheConfig
from omniq.errors import ConfigError

#: Request and context (``cond``, ``uncond``, ``call``) of a forward.
StateName = tuple[str, str]
#: The state of forwards that compute everything.
UNUSED: StateName = ("", "")


def apply_cache_dit(module: Any, config: DiTCacheConfig) -> None:
    """Put cache-dit on a transformer: its first blocks decide whether the others are computed.

    Raises:
        ConfigError: cache-dit is not installed, or does not know this transformer.
    """
    if importlib.util.find_spec("cache_dit") is None:
        raise ConfigError(
            "cache 'cache_dit' needs the package cache-dit, which is not installed",
            hint="pip install 'omniq[cache-dit]', or method first_block, which needs nothing",
        )
    # Not enable_cache(): that also picks an attention backend for the whole process.
    from cache_dit import DBCacheConfig  # noqa: PLC0415 - optional
    from cache_dit.caching.cache_adapters import CachedAdapter  # noqa: PLC0415

    made = DBCacheConfig(
        Fn_compute_blocks=config.first_blocks,
        Bn_compute_blocks=0,
        residual_diff_threshold=config.threshold,
        max_warmup_steps=config.warmup_steps,
        # The halves of a guidance pair have a state each, whichever comes first.
        enable_separate_cfg=False,
    )
    try:
        CachedAdapter.apply(module, cache_config=made)
    except (ValueError, AssertionError) as exc:
        raise ConfigError(f"cache 'cache_dit' does not fit {type(module).__name__}: {exc}") from exc
    _check_blocks(module, config)


def _check_blocks(module: Any, config: DiTCacheConfig) -> None:
    """cache-dit itself finds out at the first step."""
    for name, blocks in module.named_children():
        cached = any(context.startswith(name) for context in module._context_names)
        if cached and len(blocks) < config.first_blocks:
            raise ConfigError(
                f"cache 'cache_dit': first_blocks {config.first_blocks} is more than the "
                f"{len(blocks)} blocks of {type(module).__name__}'s {name}"
            )


class CacheDitStates:
    """The states of one transformer by name; looks to the cache manager like diffusers' own."""

    def __init__(self, module: Any) -> None:
        self._module, self._manager = module, module._context_manager
        self._cached, self._plain = module.forward, module._original_forward
        self._kwargs = {
            name: context._init_kwargs
            for name, context in self._manager._cached_context_manager.items()
        }
        self._state_cache: dict[StateName, _State] = {}
        self.set_context(None)

    def set_context(self, context: Any) -> None:
        """The state that the next forward uses; None or one named UNUSED: it computes all."""
        name = None if context is None else context.name
        if name is None or name == UNUSED:
            self._module.forward = self._plain
            self._manager._cached_context_manager = {}
            return
        if name not in self._state_cache:
            self._manager._cached_context_manager = {}
            for block, kwargs in self._kwargs.items():
                self._manager.reset_context(block, **kwargs)
            self._state_cache[name] = _State(self._manager._cached_context_manager)
        self._manager._cached_context_manager = self._state_cache[name].contexts
        self._module.forward = self._cached


class _State:
    """Contexts by blocks; ``buffers`` are their tensors, which count as this state's bytes."""

    def __init__(self, contexts: dict[str, Any]) -> None:
        self.contexts = contexts
        self.buffers = [context.buffers for context in contexts.values()]

"""Cache acceleration: as diffusers' own, but with each request's state its own, and bounded."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_helpers import (
    ALWAYS,
    cfg,
    condition,
    dit_stage,
    held,
    latents_of,
    loaded_now,
    off,
    params,
    send,
    whole,
)  # fmt: skip
from engine_helpers import Recorder, until
from pydantic import ValidationError

from omniq.config.stage import DiTCacheConfig
from omniq.errors import ConfigError

STEPS = 10
FIRST_BLOCK = {"method": "first_block", "threshold": 0.5}
TAYLOR = {"method": "taylorseer", "interval": 3, "warmup_steps": 3}
RATIOS = [1.0 - 0.01 * i for i in range(STEPS)]
MAGNITUDE = {
    "method": "magcache", "mag_ratios": RATIOS, "threshold": 0.2, "num_inference_steps": STEPS,
}  # fmt: skip
CACHE_DIT = {"method": "cache_dit", "threshold": 0.5, "warmup_steps": 2, "first_blocks": 1}
CACHES = {
    "first_block": FIRST_BLOCK, "taylorseer": TAYLOR, "magcache": MAGNITUDE,
    "cache_dit": CACHE_DIT,
}  # fmt: skip
needs_cache_dit = pytest.mark.skipif(
    importlib.util.find_spec("cache_dit") is None, reason="the extra cache-dit is not installed"
)
METHODS = [pytest.param(m, marks=needs_cache_dit if m == "cache_dit" else ()) for m in CACHES]


@pytest.fixture(scope="module")
def engines(models: Callable[[str], Path]) -> Callable[..., Any]:
    """A DiT stage with a cache, made once for each configuration."""
    found: dict[str, Any] = {}

    def get(name: str, cache: dict[str, Any]) -> Any:
        key = f"{name}{cache}"
        if key not in found:
            found[key] = loaded_now(dit_stage(models(name), dit={**ALWAYS, "cache": cache}))
        return found[key]

    return get


def request(name: str, seed: int, **more: Any) -> dict[str, Any]:
    return params(name, **{"num_inference_steps": STEPS, "seed": seed, **off(name), **more})


async def one(engine: Any, name: str, seed: int, **more: Any) -> Any:
    return await send(
        engine, request(name, seed, **more), request_id=f"r{seed}",
        condition=condition(name, 6, seed),
    )  # fmt: skip


def enable_stock(transformer: Any, method: str) -> None:
    """The method as its own library puts it on a transformer."""
    from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig

    if method == "cache_dit":
        from cache_dit import DBCacheConfig
        from cache_dit.caching.cache_adapters import CachedAdapter

        config = DBCacheConfig(
            Fn_compute_blocks=1,
            residual_diff_threshold=0.5,
            max_warmup_steps=2,
            enable_separate_cfg=True,
        )
        CachedAdapter.apply(transformer, cache_config=config)
    elif method == "first_block":
        transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    elif method == "taylorseer":
        taylor = TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=3, max_order=1)
        transformer.enable_cache(taylor)
    else:
        transformer.enable_cache(
            MagCacheConfig(mag_ratios=RATIOS, threshold=0.2, num_inference_steps=STEPS)
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["flux", "qwen_image"])
async def test_cached_equals_the_stock_pipeline_with_that_cache(
    models: Callable[[str], Path], engines: Callable[..., Any], name: str, method: str
) -> None:
    """With guidance: both calls of a step have state of their own."""
    engine = engines(name, CACHES[method])
    out = await one(engine, name, 1, **cfg(name, 3.0))
    pipeline = whole(models(name))
    enable_stock(pipeline.transformer, method)
    made = {k: v[None] for k, v in condition(name, 6, 1).items()}
    given = request(name, 1, **cfg(name, 3.0))
    del given["seed"]
    if name == "qwen_image":
        given["true_cfg_scale"] = given.pop("guidance_scale")
    expected = pipeline(
        **given, **made, generator=torch.Generator().manual_seed(1), output_type="latent"
    ).images
    unpacked = engine.part.family.latents(pipeline, expected, (32, 32))
    torch.testing.assert_close(latents_of(out), unpacked, atol=1e-5, rtol=0)
    assert out.metrics["cache_steps_skipped"] > 0
    assert 0 < out.metrics["cache_hit_ratio"] < 1


@pytest.mark.parametrize(
    ("name", "method"),
    [(n, "first_block") for n in ("z_image", "flux", "qwen_image", "wan")]
    + [(n, "taylorseer") for n in ("z_image", "wan", "sd3")]
    + [("qwen_image", "magcache"), ("z_image", "magcache")]
    + [
        pytest.param(n, "cache_dit", marks=needs_cache_dit)
        for n in ("z_image", "flux", "qwen_image", "wan")
    ],
)
async def test_interleaved_requests_keep_their_own_state(
    engines: Callable[..., Any], name: str, method: str
) -> None:
    """Bit for bit what each gets alone, and nothing is left of any."""
    cache = CACHES[method]
    if name == "z_image" and method in ("first_block", "cache_dit"):
        cache = {**cache, "threshold": 20.0}  # its random blocks change more from step to step
    engine = engines(name, cache)
    alone = [await one(engine, name, seed) for seed in (1, 2)]
    async with held(engine) as go:
        both = [asyncio.create_task(one(engine, name, seed)) for seed in (1, 2)]
        await until(lambda: len(engine.part.loop._inbox) == 2)
        go.set()
        together = await asyncio.gather(*both)
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(latents_of(a), latents_of(b))
        assert a.metrics["cache_steps_skipped"] == b.metrics["cache_steps_skipped"] > 0
    assert engine.part.cache.nbytes() == 0
    assert not engine.part.cache._order


async def test_a_cache_that_never_hits_changes_nothing(
    models: Callable[[str], Path], engines: Callable[..., Any]
) -> None:
    plain: Any = loaded_now(dit_stage(models("flux")))
    expected = await one(plain, "flux", 3)
    strict = engines("flux", {"method": "first_block", "threshold": 1e-9})
    out = await one(strict, "flux", 3)
    torch.testing.assert_close(latents_of(out), latents_of(expected), atol=1e-6, rtol=0)
    assert out.metrics["cache_steps_skipped"] == 0
    assert "cache_hit_ratio" not in expected.metrics


@pytest.mark.parametrize("method", ["first_block", METHODS[-1]])
async def test_a_request_may_do_without_beside_one_that_does_not(
    models: Callable[[str], Path], engines: Callable[..., Any], method: str
) -> None:
    plain: Any = loaded_now(dit_stage(models("z_image")))
    expected = await one(plain, "z_image", 4)
    engine = engines("z_image", CACHES[method])
    cached = await one(engine, "z_image", 5)
    without, beside = await asyncio.gather(
        one(engine, "z_image", 4, use_cache=False), one(engine, "z_image", 5)
    )
    torch.testing.assert_close(latents_of(without), latents_of(expected), atol=1e-6, rtol=0)
    assert torch.equal(latents_of(beside), latents_of(cached))


async def test_magcache_leaves_other_step_counts_alone(
    models: Callable[[str], Path], engines: Callable[..., Any]
) -> None:
    """Its ratios belong to one number of steps."""
    plain: Any = loaded_now(dit_stage(models("flux")))
    engine = engines("flux", MAGNITUDE)
    a, b = [await one(e, "flux", 1, num_inference_steps=7) for e in (plain, engine)]
    torch.testing.assert_close(latents_of(a), latents_of(b), atol=1e-6, rtol=0)


async def test_cancel_drops_the_state(engines: Callable[..., Any]) -> None:
    engine = engines("flux", FIRST_BLOCK)
    expected = await one(engine, "flux", 1)
    loop, third = asyncio.get_running_loop(), asyncio.Event()

    class Watch(Recorder):
        def progress(self, step: int, total: int) -> None:
            if step == 3:
                loop.call_soon_threadsafe(third.set)

    given = request("flux", 2, num_inference_steps=900)
    task = asyncio.create_task(
        send(engine, given, Watch(), request_id="gone", condition=condition("flux", 6, 2))
    )
    await third.wait()
    assert engine.part.cache.nbytes() > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.part.cache.nbytes() == 0
    assert torch.equal(latents_of(await one(engine, "flux", 1)), latents_of(expected))


@pytest.mark.parametrize("eviction", ["lru", "fifo"])
async def test_state_is_bounded(models: Callable[[str], Path], eviction: str) -> None:
    """Two requests, room for one: each evicts the other, and both end, only slower."""
    cache = {**FIRST_BLOCK, "max_requests": 1, "eviction": eviction}
    engine: Any = loaded_now(dit_stage(models("flux"), dit={**ALWAYS, "cache": cache}))
    states: list[int] = []
    model = engine.part.pipeline.transformer
    model.register_forward_pre_hook(lambda *_: states.append(len(engine.part.cache._order)))
    async with held(engine) as go:
        both = [asyncio.create_task(one(engine, "flux", seed)) for seed in (1, 2)]
        await until(lambda: len(engine.part.loop._inbox) == 2)
        go.set()
        outs = await asyncio.gather(*both)
    assert engine.part.cache.evictions > 0
    assert max(states) == 1
    assert all(torch.isfinite(latents_of(o)).all() for o in outs)


async def test_bytes_are_bounded(models: Callable[[str], Path]) -> None:
    """State that alone is too large is dropped after every step: nothing is ever skipped."""
    cache = {**FIRST_BLOCK, "max_bytes": 1}
    engine: Any = loaded_now(dit_stage(models("flux"), dit={"cache": cache}))
    out = await one(engine, "flux", 1)
    assert out.metrics["cache_steps_skipped"] == 0
    assert engine.part.cache.evictions == STEPS


def test_cache_dit_that_is_not_installed_says_so(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "cache_dit" else find(name, *a),
    )
    with pytest.raises(ConfigError, match="needs the package cache-dit") as caught:
        loaded_now(dit_stage(models("flux"), dit={"cache": CACHE_DIT}))
    assert "omniq[cache-dit]" in (caught.value.hint or "")


@needs_cache_dit
def test_cache_dit_needs_fewer_first_blocks_than_the_model_has(
    models: Callable[[str], Path],
) -> None:
    with pytest.raises(ConfigError, match=r"first_blocks 8 .* 2 blocks"):
        loaded_now(dit_stage(models("flux"), dit={"cache": {"method": "cache_dit"}}))


def test_presets_and_bad_configurations(models: Callable[[str], Path]) -> None:
    balanced, fast = (DiTCacheConfig(preset=p) for p in ("balanced", "fast"))
    assert balanced.method == fast.method == "first_block"
    assert balanced.threshold < fast.threshold
    assert DiTCacheConfig(preset="fast", threshold=0.5).threshold == 0.5
    assert DiTCacheConfig().method == "none"
    with pytest.raises(ConfigError, match=r"does not fit SD3\w+; allowed: none, taylorseer"):
        loaded_now(dit_stage(models("sd3"), dit={"cache": FIRST_BLOCK}))
    with pytest.raises(ValidationError, match="needs the model's mag_ratios"):
        DiTCacheConfig(method="magcache")
    with pytest.raises(ValidationError, match="'balanced' or 'fast'"):
        DiTCacheConfig(preset="turbo")

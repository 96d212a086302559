"""Cache acceleration: as diffusers' own, but with each request's state its own, and bounded."""

from __future__ import annotations

import asyncio
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
CACHES = {"first_block": FIRST_BLOCK, "taylorseer": TAYLOR, "magcache": MAGNITUDE}


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


def stock(method: str) -> Any:
    from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig

    if method == "first_block":
        return FirstBlockCacheConfig(threshold=0.5)
    if method == "taylorseer":
        return TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=3, max_order=1)
    return MagCacheConfig(mag_ratios=RATIOS, threshold=0.2, num_inference_steps=STEPS)


@pytest.mark.parametrize("method", list(CACHES))
@pytest.mark.parametrize("name", ["flux", "qwen_image"])
async def test_cached_equals_the_stock_pipeline_with_that_cache(
    models: Callable[[str], Path], engines: Callable[..., Any], name: str, method: str
) -> None:
    """With guidance: both calls of a step have state of their own."""
    engine = engines(name, CACHES[method])
    out = await one(engine, name, 1, **cfg(name, 3.0))
    pipeline = whole(models(name))
    pipeline.transformer.enable_cache(stock(method))
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
    + [("qwen_image", "magcache"), ("z_image", "magcache")],
)
async def test_interleaved_requests_keep_their_own_state(
    engines: Callable[..., Any], name: str, method: str
) -> None:
    """Bit for bit what each gets alone, and nothing is left of any."""
    cache = CACHES[method]
    if (name, method) == ("z_image", "first_block"):
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


async def test_a_request_may_do_without_beside_one_that_does_not(
    models: Callable[[str], Path], engines: Callable[..., Any]
) -> None:
    plain: Any = loaded_now(dit_stage(models("z_image")))
    expected = await one(plain, "z_image", 4)
    engine = engines("z_image", FIRST_BLOCK)
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

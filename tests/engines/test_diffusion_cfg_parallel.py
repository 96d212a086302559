"""CFG parallelism: two processes share guided and unguided requests, and give what one gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_helpers import (
    ALWAYS,
    Condition,
    cfg,
    condition,
    dit_stage,
    held,
    latents_of,
    loaded_now,
    off,
    params,
    send,
)
from engine_helpers import Recorder, until

from omniq.engines import create_engine
from omniq.engines.diffusion.devices import Share
from omniq.engines.families.flux import Flux
from omniq.errors import ConfigError, EngineDead, EngineError

TOLERANCE = 2e-5
STEPS = 8
FIRST_BLOCK = {"method": "first_block", "threshold": 0.5}
TAYLOR = {"method": "taylorseer", "interval": 3, "warmup_steps": 3}
CACHED_STEPS = 10
MAGNITUDE = {
    "method": "magcache",
    "mag_ratios": [1.0 - 0.01 * i for i in range(CACHED_STEPS)],
    "threshold": 0.2,
    "num_inference_steps": CACHED_STEPS,
}


@dataclass(slots=True)
class Pair:
    """A stage on two devices and the same on one; both have a cache."""

    name: str
    one: Any
    two: Any
    #: Of cached requests. diffusers keeps Taylor factors in bfloat16, where the last bit of a
    #: float32, which depends on a forward's rows, may become a whole step.
    cached_tolerance: float

    def at_once(self) -> list[int]:
        """From now on: how many branches were at work, one entry a forward."""
        group, seen = self.two.part._group, []
        inner = type(group).forward

        def forward(shares: Any) -> Any:
            seen.append(sum(s is not None for s in shares))
            return inner(group, shares)

        self.two.part.runner._devices = _Spy(group, forward)
        return seen


class _Spy:
    def __init__(self, group: Any, forward: Callable[[Any], Any]) -> None:
        self.branches, self.drop, self.forward = group.branches, group.drop, forward


@pytest.fixture(
    scope="module",
    params=[
        ("z_image", MAGNITUDE),  # one call of two rows a step
        ("qwen_image", FIRST_BLOCK),  # two calls a step, the result scaled to the norm
        ("wan", FIRST_BLOCK),
        pytest.param(("sd3", TAYLOR), marks=pytest.mark.slow),
        pytest.param(("z_image", {**FIRST_BLOCK, "threshold": 20.0}), marks=pytest.mark.slow),
        pytest.param(("flux", FIRST_BLOCK), marks=pytest.mark.slow),
    ],
    ids=lambda p: f"{p[0]}-{p[1]['method']}",
)
def pair(request: pytest.FixtureRequest, models: Callable[[str], Path]) -> Iterator[Pair]:
    name, cache = request.param
    dit = {**ALWAYS, "cache": cache}
    one, two = (
        loaded_now(dit_stage(models(name), engine_args=args, dit=dit))
        for args in ({}, {"parallel": {"cfg_degree": 2, "timeout": 60}})
    )
    yield Pair(name, one, two, 2e-3 if cache is TAYLOR else TOLERANCE)
    for engine in (one, two):
        asyncio.run(engine.unload())
    assert not torch.distributed.is_initialized()


def guided(name: str, scale: float, seed: int, **more: Any) -> dict[str, Any]:
    given = {"num_inference_steps": STEPS, "seed": seed, "use_cache": False, **more}
    return params(name, **{**given, **cfg(name, scale)})


def unguided(name: str, seed: int) -> dict[str, Any]:
    given = guided(name, 1.0, seed)
    return {**given, **off(name)}


async def test_mixed_requests_equal_those_of_one_device(pair: Pair) -> None:
    """Guided and not, several text lengths, step counts and sizes, sharing forwards."""
    name = pair.name
    fixed = name in ("sd3", "wan")  # their encoders pad to one length
    kinds: list[tuple[dict[str, Any], int]] = [
        (guided(name, 3.0, 0), 6),
        (guided(name, 1.5, 1, num_inference_steps=5), 6 if fixed else 4),
        (unguided(name, 2), 6 if fixed else 9),
        (guided(name, 2.0, 3, width=64), 6),
    ]

    async def of(engine: Any) -> list[torch.Tensor]:
        outputs = await asyncio.gather(
            *(
                send(engine, given, request_id=str(i), condition=condition(name, tokens, i))
                for i, (given, tokens) in enumerate(kinds)
            )
        )
        return [latents_of(o) for o in outputs]

    expected = await of(pair.one)
    seen = pair.at_once()
    async with held(pair.two) as go:
        ended = asyncio.create_task(of(pair.two))
        await until(lambda: len(pair.two.part.loop._inbox) == len(kinds))
        go.set()
        found = await ended
    assert seen.count(2) >= STEPS - 1
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


async def test_both_halves_of_a_step_run_at_the_same_time(pair: Pair) -> None:
    """Where they are two calls, from the second step on: the first one shows what the pair is."""
    name = pair.name
    seen = pair.at_once()
    await send(pair.two, guided(name, 3.0, 1), condition=condition(name, 6))
    assert seen == ([2] * STEPS if name in ("z_image", "sd3") else [1, 1] + [2] * (STEPS - 1))
    seen.clear()
    await send(pair.two, unguided(name, 1), condition=condition(name, 6))
    assert seen == [1] * STEPS


async def test_deterministic_requests_have_the_same_bits_in_company(pair: Pair) -> None:
    """Where a step is two calls, also those of one device."""
    name = pair.name
    given = guided(name, 3.0, 1, deterministic=True)
    alone = await send(pair.two, given, request_id="alone", condition=condition(name, 6))
    together, _ = await asyncio.gather(
        send(pair.two, given, request_id="a", condition=condition(name, 6)),
        send(pair.two, guided(name, 2.0, 2), request_id="b", condition=condition(name, 6, 2)),
    )
    assert torch.equal(latents_of(together), latents_of(alone))
    expected = await send(pair.one, given, condition=condition(name, 6))
    torch.testing.assert_close(latents_of(alone), latents_of(expected), rtol=0, atol=TOLERANCE)
    if name in ("qwen_image", "wan", "flux"):
        assert torch.equal(latents_of(alone), latents_of(expected))


async def test_cached_requests_keep_their_own_state_on_both_devices(pair: Pair) -> None:
    """Results and hits of one device; an id that comes again finds nothing of the one before."""
    name = pair.name

    async def of(engine: Any) -> list[Any]:
        return await asyncio.gather(
            *(
                send(
                    engine,
                    guided(name, 3.0, seed, use_cache=True, num_inference_steps=CACHED_STEPS),
                    request_id=f"r{i}",
                    condition=condition(name, 6, seed),
                )
                for i, seed in enumerate((5, 6))
            )
        )

    expected = await of(pair.one)
    for engine in (pair.two, pair.two):
        found = await of(engine)
        for a, b in zip(found, expected, strict=True):
            close = pair.cached_tolerance
            torch.testing.assert_close(latents_of(a), latents_of(b), rtol=0, atol=close)
            assert a.metrics["cache_hit_ratio"] == b.metrics["cache_hit_ratio"] > 0
    assert pair.two.part.cache.nbytes() == 0


async def test_a_cancelled_request_leaves_its_mates_unharmed(pair: Pair) -> None:
    name = pair.name
    loop, second = asyncio.get_running_loop(), asyncio.Event()

    class Watch(Recorder):
        def progress(self, step: int, total: int) -> None:
            if step == 2:
                loop.call_soon_threadsafe(second.set)

    for cached in (False, True):
        mate = guided(name, 3.0, 1, use_cache=cached, num_inference_steps=CACHED_STEPS)
        expected = await send(pair.one, mate, condition=condition(name, 6))
        endless = guided(name, 3.0, 2, use_cache=cached, num_inference_steps=900)
        second.clear()
        gone = asyncio.create_task(
            send(pair.two, endless, Watch(), request_id="gone", condition=condition(name, 6, 2))
        )
        await second.wait()
        stays = asyncio.create_task(send(pair.two, mate, condition=condition(name, 6)))
        await until(lambda: len(pair.two.part.loop._jobs) == 2)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        found = latents_of(await stays)
        close = pair.cached_tolerance if cached else TOLERANCE
        torch.testing.assert_close(found, latents_of(expected), rtol=0, atol=close)


async def test_nan_on_the_other_device_fails_its_request_only(pair: Pair) -> None:
    name = pair.name
    broken: Condition = condition(name, 6)
    broken["negative_prompt_embeds"][0, 0] = float("nan")
    calm = guided(name, 3.0, 2)
    expected = await send(pair.one, calm, condition=condition(name, 6, 2))
    bad, good = await asyncio.gather(
        send(pair.two, guided(name, 3.0, 1), request_id="bad", condition=broken),
        send(pair.two, calm, request_id="good", condition=condition(name, 6, 2)),
        return_exceptions=True,
    )
    assert isinstance(bad, EngineError)
    assert "NaN or infinity after 1 steps" in str(bad)
    assert not isinstance(good, BaseException)
    torch.testing.assert_close(latents_of(good), latents_of(expected), rtol=0, atol=TOLERANCE)


async def test_a_forward_that_fails_on_one_branch_fails_alone(pair: Pair) -> None:
    """Branches exchange nothing inside a forward, so that the others go on."""
    group = pair.two.part._group
    model = pair.two.part.pipeline.transformer
    async with held(pair.two):
        with pytest.raises(EngineError, match="rank 1: denoise step: TypeError") as caught:
            group.forward([None, Share(model, {"nonsense": torch.zeros(3)})])
        assert not isinstance(caught.value, EngineDead)
    output = await send(pair.two, guided(pair.name, 3.0, 1), condition=condition(pair.name, 6))
    assert latents_of(output).isfinite().all()


@pytest.mark.parametrize(
    ("form", "says"),
    [
        (None, "knows no guidance pairs of this pipeline"),
        (replace(Flux.form, state={"kv_caches": bool}), "keeps kv_caches from call to call"),
    ],
    ids=["no form", "state"],
)
async def test_pipelines_whose_calls_cannot_be_shared_are_refused(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, form: Any, says: str
) -> None:
    monkeypatch.setattr(Flux, "form", form)
    engine = create_engine(dit_stage(models("flux"), engine_args={"parallel": {"cfg_degree": 2}}))
    with pytest.raises(ConfigError, match=says):
        await engine.load()
    await engine.unload()

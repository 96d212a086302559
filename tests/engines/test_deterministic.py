"""``deterministic`` requests: bit for bit what each gives alone, whatever else is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_helpers import (
    Condition,
    cfg,
    condition,
    dit_stage,
    latents_of,
    loaded_now,
    off,
    params,
    send,
    whole,
)
from engine_helpers import Recorder, ask, loaded, stage

from omniq.engines.base import StageOutput
from omniq.errors import EngineOutOfMemory

FAMILIES = ["z_image", "flux", "sd3", "qwen_image", "wan"]
DETERMINISTIC = {"deterministic": True}
Send = Callable[[Any], Any]


class _Reports(Recorder):
    """Sets an event, from the model thread, once step ``at`` is done."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at, self._loop, self.reached = at, asyncio.get_running_loop(), asyncio.Event()

    def progress(self, step: int, total: int) -> None:
        super().progress(step, total)
        if step == self._at:
            self._loop.call_soon_threadsafe(self.reached.set)


async def among(mates: list[Send], one: Send) -> StageOutput:
    """What ``one`` gives: half of the mates run before it comes, half come while it runs."""
    early, late = mates[: (len(mates) + 1) // 2], mates[(len(mates) + 1) // 2 :]
    tasks = []
    for i, mate in enumerate(early):
        report = _Reports(1 + i % 2)
        tasks.append(asyncio.create_task(mate(report)))
        await report.reached.wait()
    report = _Reports(2)
    made = asyncio.create_task(one(report))
    await report.reached.wait()
    tasks += [asyncio.create_task(mate(_Reports(1))) for mate in late]
    await asyncio.gather(*tasks)
    output: StageOutput = await made
    return output


@pytest.mark.parametrize("name", FAMILIES)
async def test_latents_are_those_of_the_request_alone(
    models: Callable[[str], Path], name: str
) -> None:
    """With 1, 3 and 7 mates of other prompt lengths, guidance and step counts.

    Some mates are deterministic themselves, some share forwards; the engine batches all it can.
    """
    engine = loaded_now(dit_stage(models(name)))
    runner: Any = engine.part.runner  # type: ignore[attr-defined]

    def request(i: int, steps: int, exact: bool, made: Condition) -> Send:
        guidance = off(name) if i % 3 == 2 else cfg(name, 2.0 + i % 3)
        given = params(name, num_inference_steps=steps, seed=i, **guidance, deterministic=exact)
        return lambda emit: send(engine, given, emit, request_id=f"r{i}", condition=made)

    one = request(1, 6, True, condition(name, 7, 1))
    before = runner.forwards, runner.rows
    alone = latents_of(await one(None))
    forwards, rows = runner.forwards - before[0], runner.rows - before[1]
    for count in (1, 3, 7):
        mates = [
            request(2 + i, 5 + 2 * i, i == 2, condition(name, 4 + 2 * (i % 4), i))
            for i in range(count)
        ]
        got = latents_of(await among(mates, one))
        assert torch.equal(got, alone), float((got - alone).abs().max())
    # Not even the two calls of a guidance pair are one forward.
    assert (forwards, rows) == ((6, 12) if name in ("z_image", "sd3") else (12, 12))


@pytest.mark.parametrize("name", ["z_image", "flux", "qwen_image"])
async def test_latents_are_those_of_the_stock_pipeline(
    models: Callable[[str], Path], name: str
) -> None:
    """Bit for bit, since its calls run as they are."""
    engine = loaded_now(dit_stage(models(name)))
    given = params(name, num_inference_steps=5, seed=3, **cfg(name, 3.0))
    made = condition(name, 6, 2)
    got = latents_of(await send(engine, given | DETERMINISTIC, condition=made))
    part: Any = engine.part  # type: ignore[attr-defined]
    stock = whole(models(name))
    arguments = {"height": 32, "width": 32, "num_inference_steps": 5}
    arguments |= part.family.guidance(given, stock.transformer.config)
    with torch.no_grad():
        expected = stock(
            **arguments,
            **part.family.arguments(made),
            generator=torch.Generator().manual_seed(3),
            output_type="latent",
            return_dict=False,
        )[0]
    assert torch.equal(got, part.family.latents(stock, expected, (32, 32)))


async def test_a_forward_without_memory_is_not_split(models: Callable[[str], Path]) -> None:
    """Halves would round otherwise: the request fails, and its retry gives the same bits."""
    engine = loaded_now(dit_stage(models("z_image")))
    part: Any = engine.part  # type: ignore[attr-defined]
    given = params("z_image", seed=1, **cfg("z_image", 2.0)) | DETERMINISTIC
    alone = latents_of(await send(engine, given, condition=condition("z_image", 6)))

    def too_large(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        if len(kwargs["x"]) > 1:
            torch.empty(1 << 50, dtype=torch.uint8)  # a petabyte

    hook = part.pipeline.transformer.register_forward_pre_hook(too_large, with_kwargs=True)
    with pytest.raises(EngineOutOfMemory):
        await send(engine, given, condition=condition("z_image", 6))
    hook.remove()
    again = latents_of(await send(engine, given, condition=condition("z_image", 6)))
    assert torch.equal(again, alone)


async def test_it_computes_every_step_where_the_stage_has_a_cache(
    models: Callable[[str], Path],
) -> None:
    """Other requests evict cache state, and what is evicted changes the result."""
    plain = loaded_now(dit_stage(models("z_image")))
    cache = {"method": "first_block", "threshold": 0.5}
    cached = loaded_now(dit_stage(models("z_image"), dit={"cache": cache}))
    given = params("z_image", num_inference_steps=8, **off("z_image")) | DETERMINISTIC
    made = condition("z_image", 6)
    expected = latents_of(await send(plain, given, condition=made))
    output = await send(cached, given, condition=made)
    assert torch.equal(latents_of(output), expected)
    assert "cache_hit_ratio" not in output.metrics


async def test_text_and_hidden_states_are_those_of_the_request_alone(model: Path) -> None:
    """With 1, 3 and 7 mates of other prompt lengths, some of them in the shared batch."""
    engine: Any = await loaded(stage(model, "ar"))

    def request(i: int, tokens: int, exact: bool) -> Send:
        given = {"max_tokens": tokens, "temperature": 0.8, "seed": i, "deterministic": exact}
        prompt = " ".join(["a red circle"] * (1 + i % 3)) + f" {i}"
        return lambda emit: ask(
            engine, given | {"ignore_eos": True, "n": 1 + i % 2}, emit, prompt=prompt
        )

    one = request(1, 12, True)
    alone = await one(None)
    for count in (1, 3, 7):
        got = await among([request(2 + i, 8 + 3 * i, i == 2) for i in range(count)], one)
        assert got.values["choices"] == alone.values["choices"]
        for name in ("token_ids", "hidden_states"):
            assert torch.equal(got.tensors[name][name], alone.tensors[name][name])


async def test_pixels_do_not_depend_on_the_memory_that_is_free(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode that runs out of memory is tiled, which moves pixels, unless deterministic."""
    engine = loaded_now(stage(models("flux"), "decode"))
    part: Any = engine.part  # type: ignore[attr-defined]
    latents = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    alone = await ask(engine, DETERMINISTIC, latents=latents)
    others = [ask(engine, {}, latents=latents + i) for i in range(3)]
    among_others, *_ = await asyncio.gather(ask(engine, DETERMINISTIC, latents=latents), *others)
    pixels = alone.tensors["image"]["image"]
    assert torch.equal(among_others.tensors["image"]["image"], pixels)
    decode = part.vae.decode

    def too_large(*args: Any, **kwargs: Any) -> Any:
        if not part.vae.use_tiling:
            torch.empty(1 << 50, dtype=torch.uint8)  # a petabyte
        return decode(*args, **kwargs)

    monkeypatch.setattr(part.vae, "decode", too_large)
    assert (await ask(engine, {}, latents=latents)).tensors["image"]["image"].shape == pixels.shape
    with pytest.raises(EngineOutOfMemory):
        await ask(engine, DETERMINISTIC, latents=latents)

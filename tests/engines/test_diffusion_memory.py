"""Offloading, sleeping and budgets: less of the device, the same results."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_helpers import (
    condition,
    dit_stage,
    held,
    latents_of,
    loaded_now,
    params,
    picture,
    send,
)  # fmt: skip
from engine_helpers import ask, loaded, stage, until

from omniq.engines import create_engine
from omniq.engines.base import Engine, StageOutput
from omniq.engines.diffusion.memory import Weights, component_modules
from omniq.errors import ConfigError, EngineOutOfMemory

SOON = {"sleep_after": 0.02}
LEAVES = {"enable_group_offload": True}
BLOCKS = {"enable_group_offload": {"offload_type": "block_level", "num_blocks_per_group": 1}}
ONE_AT_A_TIME = {"enable_model_cpu_offload": True}


@pytest.fixture(scope="module")
def plain(models: Callable[[str], Path]) -> Callable[[str], Engine]:
    """A DiT stage that takes pictures, with all weights resident."""
    found: dict[str, Engine] = {}

    def get(name: str) -> Engine:
        if name not in found:
            found[name] = loaded_now(dit_stage(models(name), input_modalities=["image"]))
        return found[name]

    return get


async def denoised(engine: Engine, name: str, seed: int = 1, **more: Any) -> StageOutput:
    return await send(
        engine, params(name, seed=seed), request_id=f"r{seed}", condition=condition(name, 7), **more
    )


async def same(engine: Engine, reference: Engine, name: str) -> None:
    """Two requests together, from text and from a picture, equal the reference's."""
    edit = {"image": picture()}
    got = await asyncio.gather(denoised(engine, name), denoised(engine, name, 2, **edit))
    expected = [await denoised(reference, name), await denoised(reference, name, 2, **edit)]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(latents_of(one), latents_of(other), rtol=0, atol=2e-5)


# -- sleep and wake ----------------------------------------------------------------------------


async def test_an_idle_stage_sleeps_and_the_next_request_wakes_it(
    models: Callable[[str], Path], plain: Callable[[str], Engine]
) -> None:
    """Also after the warm-up; the result is bit for bit what it is without sleep."""
    small = {"height": 32, "width": 32}
    engine = await loaded(dit_stage(models("z_image"), engine_args=SOON, defaults=small))
    await engine.warmup()
    weights = engine.part.weights  # type: ignore[attr-defined]
    await until(lambda: weights.asleep)
    expected = latents_of(await denoised(plain("z_image"), "z_image"))
    for _ in range(2):
        output = await denoised(engine, "z_image")
        assert output.metrics["wake_seconds"] > 0
        assert torch.equal(latents_of(output), expected)
        await until(lambda: weights.asleep)
    await engine.unload()


async def test_a_stage_with_requests_in_flight_stays_awake(models: Callable[[str], Path]) -> None:
    engine: Any = await loaded(dit_stage(models("z_image"), engine_args=SOON))
    async with held(engine) as go:
        running = asyncio.create_task(denoised(engine, "z_image"))
        await asyncio.sleep(0.1)  # five times what it would take to fall asleep
        asked = asyncio.create_task(engine.sleep())
        await until(asked.done)  # it does not wait for the model thread
        assert not asked.result()
        assert not engine.part.weights.asleep
        go.set()
        assert "wake_seconds" not in (await running).metrics
    await engine.unload()


async def test_a_request_that_comes_while_a_stage_falls_asleep_wakes_it(
    models: Callable[[str], Path], plain: Callable[[str], Engine]
) -> None:
    engine: Any = await loaded(dit_stage(models("z_image")))
    async with held(engine) as go:
        falling = asyncio.create_task(engine.sleep())
        await until(engine._sleeper._lock.locked)
        running = asyncio.create_task(denoised(engine, "z_image"))
        await asyncio.sleep(0)
        go.set()
        output = await running
    assert await falling, "it slept before the request went on"
    assert output.metrics["wake_seconds"] > 0
    assert torch.equal(latents_of(output), latents_of(await denoised(plain("z_image"), "z_image")))
    await engine.unload()


async def test_a_request_that_is_cancelled_while_it_wakes_a_stage_leaves_it_awake(
    models: Callable[[str], Path],
) -> None:
    engine: Any = await loaded(dit_stage(models("z_image")))
    assert await engine.sleep()
    async with held(engine) as go:
        running = asyncio.create_task(denoised(engine, "z_image"))
        await until(engine._sleeper._lock.locked)
        engine._executor.submit(int)  # what the model thread does next; waking is before it
        running.cancel()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert await engine.sleep(), "nothing is in flight any more"
    assert latents_of(await denoised(engine, "z_image")).isfinite().all()
    await engine.unload()


async def test_unloading_ends_the_timer(models: Callable[[str], Path]) -> None:
    engine: Any = await loaded(stage(models("z_image"), "encode", engine_args={"sleep_after": 60}))
    await ask(engine, {}, prompt="a cat")
    timer = engine._sleeper._timer
    assert timer is not None
    await engine.unload()
    assert timer.cancelled()


async def test_pipelines_that_fit_a_device_only_in_turn_serve_in_turn(
    models: Callable[[str], Path], plain: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that finds no room fails retryably and whole; when the other sleeps, it is served.

    A CPU has no second memory, so the room of the device is counted here.
    """
    names = ("z_image", "qwen_image")
    engines: dict[str, Any] = {
        n: await loaded(dit_stage(models(n), engine_args=SOON if n == "z_image" else {}))
        for n in names
    }
    weights = {n: e.part.weights for n, e in engines.items()}
    room = max(w.bytes for w in weights.values())
    for engine in engines.values():
        assert await engine.sleep()
    move = Weights._move

    def counted(self: Weights, device: torch.device, *, back: torch.device) -> None:
        if self.asleep:  # it wakes
            taken = sum(w.bytes for w in weights.values() if not w.asleep)
            if taken + self.bytes > room:
                raise torch.OutOfMemoryError("no room")
        move(self, device, back=back)

    monkeypatch.setattr(Weights, "_move", counted)
    first, second = engines["z_image"], engines["qwen_image"]

    async def served(name: str) -> None:
        output = await denoised(engines[name], name)
        assert torch.equal(latents_of(output), latents_of(await denoised(plain(name), name)))
        assert output.metrics["wake_seconds"] > 0

    await served("z_image")
    await until(lambda: weights["z_image"].asleep)
    await served("qwen_image")
    with pytest.raises(EngineOutOfMemory) as caught:
        await denoised(first, "z_image")
    assert caught.value.retryable
    assert weights["z_image"].asleep
    assert all(p.device.type == "cpu" for p in first.part.pipeline.transformer.parameters())
    assert await second.sleep()
    await served("z_image")
    for engine in engines.values():
        await engine.unload()


# -- offloading --------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [LEAVES, BLOCKS, ONE_AT_A_TIME], ids=["leaves", "blocks", "one"])
@pytest.mark.parametrize("name", ["z_image", "flux", "qwen_image", "sd3"])
async def test_an_offloaded_transformer_gives_the_same(
    models: Callable[[str], Path],
    plain: Callable[[str], Engine],
    name: str,
    args: dict[str, Any],
) -> None:
    """With pictures, so that the VAE and the transformer take turns on the device."""
    config = dit_stage(models(name), input_modalities=["image"], engine_args=args)
    engine: Any = await loaded(config)
    await same(engine, plain(name), name)
    weights = engine.part.weights
    assert weights.most_bytes < weights.bytes
    await engine.unload()


async def test_weights_offloaded_to_a_disk_really_leave_memory_and_come_back(
    models: Callable[[str], Path], plain: Callable[[str], Engine], tmp_path: Path
) -> None:
    """Two stages with different weights under one folder; unloading removes their files."""
    for name in ("z_image", "qwen_image"):
        args = {"enable_group_offload": {"offload_to_disk_path": str(tmp_path)}}
        config = dit_stage(models(name), input_modalities=["image"], engine_args=args)
        engine: Any = await loaded(config)
        module = engine.part.pipeline.transformer
        reference = plain(name).part.pipeline.transformer  # type: ignore[attr-defined]
        inside, outside = module.state_dict(), reference.state_dict()
        assert any(not torch.equal(inside[n], t) for n, t in outside.items())
        files = sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
        assert files >= engine.part.weights.bytes
        await same(engine, plain(name), name)
        await engine.unload()
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("args", [LEAVES, ONE_AT_A_TIME], ids=["leaves", "one"])
@pytest.mark.parametrize("name", ["flux", "sd3", "qwen_image", "wan"])
async def test_offloaded_encoders_and_decoders_give_the_same(
    models: Callable[[str], Path], name: str, args: dict[str, Any]
) -> None:
    model = models(name)
    for kind in ("encode", "decode"):
        whole, part = [
            await loaded(stage(model, kind, engine_args=more)) for more in ({}, args)
        ]  # fmt: skip
        example = whole.part.example()[1]  # type: ignore[attr-defined]
        made = []
        for engine in (whole, part):
            output = await send(engine, {"seed": 1}, **_random(example)) if kind == "decode" else (
                await ask(engine, {}, prompt="a red cat")
            )  # fmt: skip
            ((_, tensors),) = output.tensors.items()
            made.append(tensors)
        assert made[0].keys() == made[1].keys()
        for key, tensor in made[0].items():
            assert torch.equal(tensor, made[1][key]), key
        await whole.unload()
        await part.unload()


def _random(example: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(i.tensor.shape, generator=generator) for n, i in example.items()}


async def test_only_the_component_at_work_is_on_the_device(models: Callable[[str], Path]) -> None:
    """Encoders and transformer follow each other; sleeping leaves nothing there."""
    engine: Any = await loaded(
        dit_stage(models("z_image"), input_modalities=["image"], engine_args=ONE_AT_A_TIME)
    )
    weights, parts = engine.part.weights, component_modules(engine.part.pipeline)
    one = weights._one
    assert one.resident is None
    await denoised(engine, "z_image")
    assert (one.resident, one.moves) == (parts["transformer"], 1)
    await denoised(engine, "z_image", image=picture())
    assert (one.resident, one.moves) == (parts["transformer"], 3)  # VAE, transformer
    assert await engine.sleep()
    assert one.resident is None
    await denoised(engine, "z_image")
    assert (one.resident, one.moves) == (parts["transformer"], 4)
    await engine.unload()


# -- budgets and bad arguments ------------------------------------------------------------------


async def test_weights_beyond_the_budget_are_refused_and_offloading_makes_them_fit(
    models: Callable[[str], Path], plain: Callable[[str], Engine]
) -> None:
    size = plain("qwen_image").part.weights.bytes  # type: ignore[attr-defined]

    def config(budget: int, **more: Any) -> Any:
        return dit_stage(
            models("qwen_image"),
            input_modalities=["image"],
            engine_args={"max_memory": budget, **more},
        )

    await (await loaded(config(size))).unload()
    with pytest.raises(ConfigError, match=r"'dit': its weights need .* MiB on cpu") as caught:
        await loaded(config(size - 1))
    assert "enable_group_offload" in (caught.value.hint or "")
    engine = await loaded(config(size // 2, **LEAVES))
    await same(engine, plain("qwen_image"), "qwen_image")
    await engine.unload()


@pytest.mark.parametrize("kind", ["encode", "dit", "decode"])
@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"max_memory": "much"}, "max_memory: .*20GiB"),
        ({"max_memory": 0}, "max_memory"),
        ({"sleep_after": 0}, "sleep_after"),
        ({"enable_group_offload": {"offload_type": "rows"}}, "offload_type: .*leaf_level"),
        ({"enable_group_offload": {"blocks": 1}}, "blocks"),
        ({"enable_group_offload": {"offload_type": "block_level"}}, "needs num_blocks_per_group"),
        ({"enable_group_offload": {"record_stream": True}}, "record_stream needs use_stream"),
        ({"enable_group_offload": {"use_stream": True}}, "streams.*cpu"),
        ({**LEAVES, **ONE_AT_A_TIME}, "exclude each other"),
        ({**LEAVES, **SOON}, "sleep_after has nothing to do"),
        ({"offload": True}, "unknown engine_args 'offload'.*enable_group_offload"),
    ],
    ids=str,
)
async def test_wrong_arguments_are_refused_at_load(
    models: Callable[[str], Path], kind: str, args: dict[str, Any], says: str
) -> None:
    engine = create_engine(stage(models("z_image"), kind, engine_args=args))
    with pytest.raises(ConfigError, match=f"(?s)stage '{kind}'.*{says}"):
        await engine.load()
    await engine.unload()


@pytest.mark.parametrize("kind", ["encode", "dit", "decode"])
async def test_an_unloaded_stage_frees_its_weights(
    models: Callable[[str], Path], kind: str
) -> None:
    engine: Any = await loaded(stage(models("z_image"), kind))
    await asyncio.sleep(0)  # asyncio's callback that brought what was loaded holds it
    modules = engine.part.weights._modules.values()
    kept = [weakref.ref(p) for m in modules for p in m.parameters()]
    del modules
    assert kept
    await engine.unload()
    assert not [ref for ref in kept if ref() is not None]


# -- on a GPU: what the CPU cannot show ---------------------------------------------------------

on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="device memory exists on a CUDA device only"
)


def device_memory() -> int:
    """Bytes in use, without garbage and what cuBLAS keeps for itself."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("args", [{}, ONE_AT_A_TIME], ids=["plain", "one"])
async def test_a_sleeping_stage_holds_no_device_memory(
    models: Callable[[str], Path], args: dict[str, Any]
) -> None:
    config = dit_stage(models("flux"), input_modalities=["image"], engine_args=args)
    engine: Any = create_engine(config, "cuda:0")
    before = device_memory()
    await engine.load()
    expected = latents_of(await denoised(engine, "flux", image=picture()))
    weights = list(engine.part.pipeline.transformer.parameters())
    assert device_memory() - before >= sum(p.nbytes for p in weights)
    assert await engine.sleep()
    assert all(p.device.type == "cpu" for p in engine.part.pipeline.transformer.parameters())
    del weights
    output = await denoised(engine, "flux", image=picture())
    torch.testing.assert_close(latents_of(output), expected, rtol=0, atol=2e-5)
    await engine.unload()
    assert device_memory() <= before


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "offload",
    [
        {"offload_type": "leaf_level"},
        {"offload_type": "leaf_level", "use_stream": True},
        {"offload_type": "block_level", "num_blocks_per_group": 1, "use_stream": True},
    ],
    ids=str,
)
async def test_offloaded_weights_rest_on_the_cpu_of_a_gpu_stage(
    models: Callable[[str], Path], offload: dict[str, Any]
) -> None:
    made = []
    for args in ({}, {"enable_group_offload": offload}):
        config = dit_stage(models("flux"), input_modalities=["image"], engine_args=args)
        engine: Any = create_engine(config, "cuda:0")
        await engine.load()
        made += [latents_of(await denoised(engine, "flux", image=picture())) for _ in range(2)]
        if args:
            parts = component_modules(engine.part.pipeline).values()
            assert all(p.device.type == "cpu" for m in parts for p in m.parameters())
        await engine.unload()
    for other in made[1:]:
        torch.testing.assert_close(other, made[0], rtol=0, atol=2e-5)

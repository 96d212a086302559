"""The DiT and decode engines against a monolithic pipeline of the same components."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import Recorder, ask, loaded, stage
from tiny_models import HIDDEN

from omniq.errors import ConfigError, EngineDead, EngineError, EngineOutOfMemory, InvalidRequest

SIZES = [(32, 32), (48, 32)]


@pytest.fixture(scope="module")
def dit(model: Path) -> Any:
    return asyncio.run(loaded(stage(model, "dit")))


@pytest.fixture(scope="module")
def decode(model: Path) -> Any:
    return asyncio.run(loaded(stage(model, "decode")))


@pytest.fixture(scope="module")
def engines(model: Path, dit: Any, decode: Any) -> tuple[Any, Any, Any]:
    """AR, DiT and decode engine."""
    return asyncio.run(loaded(stage(model, "ar"))), dit, decode


@pytest.fixture(scope="module")
def monolith(model: Path) -> Any:
    """Stock pipeline with everything in it."""
    from diffusers import ZImagePipeline

    pipeline = ZImagePipeline.from_pretrained(str(model), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture
def calls(dit: Any) -> Iterator[list[int]]:
    """One entry a forward of the transformer."""
    seen: list[int] = []
    hook = dit.part.pipeline.transformer.register_forward_pre_hook(lambda *_: seen.append(1))
    yield seen
    hook.remove()


def params(**more: Any) -> dict[str, Any]:
    return {
        "height": 32,
        "width": 32,
        "num_inference_steps": 4,
        "guidance_scale": 0.0,
        "seed": 7,
        **more,
    }


EMBEDS = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("size", "guidance"), list(itertools.product(SIZES, [0.0, 2.5])))
async def test_staged_run_equals_the_monolithic_one(
    engines: tuple[Any, Any, Any], monolith: Any, size: tuple[int, int], guidance: float
) -> None:
    """Text to pixels through three engines; the reference generates with its own encoder."""
    ar, dit, decode = engines
    height, width = size
    prompt = "a red circle above a blue square"
    text = await ask(ar, {"max_tokens": 12, "temperature": 0.0}, prompt=prompt)
    given = params(height=height, width=width, guidance_scale=guidance)
    latents = await ask(dit, given, prompt_embeds=text.tensors["hidden_states"]["hidden_states"])
    picture = await ask(decode, {}, latents=latents.tensors["latents"]["latents"])

    rows = _generate(monolith, prompt, 12)
    call = {
        "prompt_embeds": [rows],
        "negative_prompt_embeds": [torch.zeros(1, HIDDEN)],
        **{k: v for k, v in given.items() if k != "seed"},
    }
    expected = monolith(
        **call, generator=torch.Generator().manual_seed(7), output_type="latent"
    ).images
    image = monolith(**call, generator=torch.Generator().manual_seed(7), output_type="pil").images
    got = latents.tensors["latents"]["latents"]
    assert got.shape == (1, 16, height // 2, width // 2)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    pixels = picture.tensors["image"]["image"]
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (height, width, 3)
    assert pixels.numpy().tobytes() == image[0].tobytes()


@torch.no_grad()
def _generate(monolith: Any, prompt: str, n: int) -> torch.Tensor:
    inputs = monolith.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = monolith.text_encoder.generate(
        **inputs,
        max_new_tokens=n,
        do_sample=False,
        return_dict_in_generate=True,
        output_hidden_states=True,
    )
    return torch.cat([step[-1][0, -1:] for step in out.hidden_states])


def test_only_transformer_and_scheduler_are_resident(dit: Any, monolith: Any) -> None:
    components = dit.part.pipeline.components
    assert {k for k, v in components.items() if v is not None} == {"transformer", "scheduler"}
    assert dit.part.pipeline.vae_scale_factor == monolith.vae_scale_factor == 2


async def test_guidance_and_seed_and_size_matter(dit: Any) -> None:
    runs = [
        await ask(dit, params(**more), prompt_embeds=EMBEDS)
        for more in ({}, {"guidance_scale": 3.0}, {"seed": 8}, {"num_inference_steps": 5})
    ]
    latents = [r.tensors["latents"]["latents"] for r in runs]
    for a, b in itertools.combinations(latents, 2):
        assert not torch.allclose(a, b, atol=1e-3)


async def test_sent_negative_embeds_replace_the_null_condition(dit: Any) -> None:
    negative = torch.randn(4, HIDDEN)
    given = params(guidance_scale=3.0)
    null = await ask(dit, given, prompt_embeds=EMBEDS)
    zeros = torch.zeros(1, 1, HIDDEN)
    same = await ask(dit, given, prompt_embeds=EMBEDS, negative_prompt_embeds=zeros)
    other = await ask(dit, given, prompt_embeds=EMBEDS, negative_prompt_embeds=negative)
    assert torch.equal(null.tensors["latents"]["latents"], same.tensors["latents"]["latents"])
    assert not torch.equal(null.tensors["latents"]["latents"], other.tensors["latents"]["latents"])


async def test_guidance_without_any_negative_is_refused(model: Path) -> None:
    engine = await loaded(stage(model, "dit", dit={"null_condition": "none"}))
    with pytest.raises(InvalidRequest, match="needs negative_prompt_embeds"):
        await ask(engine, params(guidance_scale=1.0), prompt_embeds=EMBEDS)
    await ask(engine, params(), prompt_embeds=EMBEDS)


async def test_seeds_do_not_depend_on_concurrency(dit: Any) -> None:
    """Eight at once give what each gives alone, but for the rounding of batched kernels."""

    async def one(seed: int) -> torch.Tensor:
        out = await ask(dit, params(seed=seed, guidance_scale=2.0), prompt_embeds=EMBEDS + seed)
        return out.tensors["latents"]["latents"]

    alone = [await one(seed) for seed in range(8)]
    together = await asyncio.gather(*[one(seed) for seed in range(8)])
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


async def test_progress_counts_every_step(dit: Any) -> None:
    seen = Recorder()
    out = await ask(dit, params(num_inference_steps=6), seen, prompt_embeds=EMBEDS)
    assert seen.steps == [(i, 6) for i in range(1, 7)]
    assert out.metrics["steps"] == 6


async def test_cancel_stops_within_one_step_and_leaves_nothing_behind(
    dit: Any, calls: list[int]
) -> None:
    before = await ask(dit, params(), prompt_embeds=EMBEDS)
    seen, loop, third = Recorder(), asyncio.get_running_loop(), asyncio.Event()

    class Watch(Recorder):
        def progress(self, step: int, total: int) -> None:
            seen.progress(step, total)
            if step == 3:
                loop.call_soon_threadsafe(third.set)

    task = asyncio.create_task(
        ask(dit, params(num_inference_steps=500), Watch(), prompt_embeds=EMBEDS)
    )
    waiting = asyncio.create_task(ask(dit, params(num_inference_steps=400), prompt_embeds=EMBEDS))
    await third.wait()
    at_cancel = len(calls)
    waiting.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stopped = len(calls)
    assert stopped <= at_cancel + 2  # the step that ran, and one that began before the flag
    after = await ask(dit, params(), prompt_embeds=EMBEDS)
    assert len(calls) == stopped + 4  # neither went on, nor did the waiting one start
    assert torch.equal(before.tensors["latents"]["latents"], after.tensors["latents"]["latents"])


@pytest.fixture
def failing(dit: Any) -> Iterator[Any]:
    """Makes the transformer call a function before each forward."""
    hooks: list[Any] = []
    yield lambda fn: hooks.append(
        dit.part.pipeline.transformer.register_forward_pre_hook(lambda *_: fn())
    )
    for hook in hooks:
        hook.remove()


def _raise(exc: Exception) -> None:
    raise exc


async def test_out_of_memory_fails_only_its_own_request(
    dit: Any, failing: Any, model: Path
) -> None:
    """The allocation is real: a petabyte."""
    failing(lambda: torch.empty(1 << 50, dtype=torch.uint8))
    with pytest.raises(EngineOutOfMemory, match="out of memory") as caught:
        await ask(dit, params(), prompt_embeds=EMBEDS)
    assert caught.value.retryable
    assert caught.value.hint


async def test_cuda_errors_are_mapped(dit: Any, failing: Any) -> None:
    failing(lambda: _raise(torch.OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(EngineOutOfMemory):
        await ask(dit, params(), prompt_embeds=EMBEDS)


async def test_broken_device_is_fatal(dit: Any, failing: Any) -> None:
    failing(lambda: _raise(torch.AcceleratorError("CUDA error: device-side assert triggered")))
    with pytest.raises(EngineDead):
        await ask(dit, params(), prompt_embeds=EMBEDS)


async def test_nan_latents_are_an_engine_error(model: Path) -> None:
    engine: Any = await loaded(stage(model, "dit"))
    with torch.no_grad():
        for parameter in engine.part.pipeline.transformer.layers.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(EngineError, match="NaN or infinity after 1 steps") as caught:
        await ask(engine, params(), prompt_embeds=EMBEDS)
    assert not caught.value.retryable


async def test_wrong_requests_are_refused(dit: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"must be \[tokens, 64\]"):
        await ask(dit, params(), prompt_embeds=torch.zeros(3, 5))
    with pytest.raises(InvalidRequest, match=r"must be \[tokens, 64\]"):
        await ask(dit, params(), prompt_embeds=torch.zeros(2, 3, HIDDEN))
    with pytest.raises(InvalidRequest, match="floating point"):
        await ask(dit, params(), prompt_embeds=torch.zeros(3, HIDDEN, dtype=torch.int64))
    with pytest.raises(
        InvalidRequest,
        match="height: must be a multiple of 4 for this model, for example 32 or 36; got 33",
    ):
        await ask(dit, params(height=33), prompt_embeds=EMBEDS)
    with pytest.raises(InvalidRequest, match="'prompt_embeds': missing"):
        await ask(dit, params())


async def test_wrong_configuration_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_index\.json: cannot be read"):
        await loaded(stage(tmp_path, "dit"))
    with pytest.raises(
        ConfigError, match="unknown engine_args 'x'; allowed: attention_backend, compile"
    ):
        await loaded(stage(model, "dit", engine_args={"x": 1}))


async def test_auto_dtype_is_that_of_the_weights(monolith: Any, tmp_path: Path) -> None:
    from diffusers import DiffusionPipeline

    monolith.save_pretrained(tmp_path)
    half = DiffusionPipeline.from_pretrained(str(tmp_path), dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    engine: Any = await loaded(stage(tmp_path, "dit", dtype="auto"))
    assert engine.part.pipeline.transformer.dtype == torch.bfloat16
    await engine.warmup()
    decoder: Any = await loaded(stage(tmp_path, "decode", dtype="auto"))
    assert decoder.part.vae.dtype == torch.bfloat16
    await decoder.warmup()


async def test_decoder_refuses_what_it_cannot_decode(decode: Any, model: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"must be \[n, 16, h, w\], is \[1, 4, 8, 8\]"):
        await ask(decode, {}, latents=torch.zeros(1, 4, 8, 8))
    with pytest.raises(EngineError, match="NaN or infinity"):
        await ask(decode, {}, latents=torch.full((1, 16, 8, 8), float("nan")))
    with pytest.raises(ConfigError, match="holds a ZImageTransformer2DModel"):
        await loaded(stage(model, "decode", subfolder="transformer"))

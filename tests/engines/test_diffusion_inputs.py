"""What a request may ask of a DiT stage, and how it is told what it may not."""

from __future__ import annotations

import asyncio
import base64
import io
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
    latents_of,
    loaded_now,
    params,
    picture,
    send,
    whole,
)
from engine_helpers import Recorder, ask, stage, until

from omniq.errors import ConfigError, EngineOutOfMemory, InvalidRequest

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def engines(models: Callable[[str], Path]) -> Callable[[str], Any]:
    found: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in found:
            found[name] = loaded_now(dit_stage(models(name)))
        return found[name]

    return get


REFUSED = [
    ("flux", {"height": 33}, {}, r"parameters.height: must be a multiple of 4 for this model, "
     r"for example 32 or 36; got 33"),
    ("sd3", {"width": 35}, {}, r"parameters.width: must be a multiple of 4"),
    ("wan", {"num_frames": 6}, {}, r"num_frames: must be 1 more than a multiple of 4 .* 5; got 6"),
    ("wan", {"sigmas": [1.0, 0.5]}, {}, r"sigmas: WanPipeline takes: height, width, num_frames"),
    ("sd3", {"strength": 0.5}, {}, r"strength: needs an input picture"),
    ("sd3", {"num_frames": 5}, {}, r"num_frames: StableDiffusion3Pipeline takes: height, width"),
    ("sd3", {"sigmas": [1.0, 0.5]}, {}, r"as many entries as num_inf.*4"),
    ("sd3", {"scheduler": "ddim"}, {}, r"scheduler: must be one of euler, heun, unipc, dpmpp"),
    ("sd3", {"lora": {"x": 1.0}}, {}, r"no LoRA 'x'; allowed: none"),
    ("sd3", {}, {"pooled_prompt_embeds": None}, r"'pooled_prompt_embeds': missing"),
    ("sd3", {"guidance_scale": 4.0}, {"negative": None}, r"needs negative_prompt_embeds"),
    ("flux", {}, {"prompt_embeds": torch.zeros(3, 5)}, r"must be \[tokens, 32\]"),
    ("flux", {}, {"pooled_prompt_embeds": torch.zeros(2, 2, 2)}, r"must be \[n\]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "asked", "inputs", "message"), REFUSED)
async def test_wrong_requests_name_the_field_and_what_is_allowed(
    engines: Callable[[str], Any],
    name: str,
    asked: dict[str, Any],
    inputs: dict[str, Any],
    message: str,
) -> None:
    made: dict[str, Any] = condition(name, 5)
    for key, value in inputs.items():
        if key == "negative":
            made = {k: v for k, v in made.items() if not k.startswith("negative")}
        elif value is None:
            del made[key]
        else:
            made[key] = value
    engine = engines(name)
    before = engine.part.runner.forwards
    with pytest.raises(InvalidRequest, match=message):
        await send(engine, params(name, **asked), condition=made)
    assert engine.part.runner.forwards == before


async def test_every_fault_is_listed(engines: Callable[[str], Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await send(
            engines("sd3"), params("sd3", width=33, height=31, strength=0.5),
            condition=condition("sd3", 5),
        )  # fmt: skip
    fields = {f["field"] for f in caught.value.fields}
    assert fields == {"parameters.width", "parameters.height", "parameters.strength"}


async def test_own_sigmas_equal_the_pipelines(
    engines: Callable[[str], Any], models: Callable[[str], Path]
) -> None:
    sigmas = [1.0, 0.8, 0.3]
    given = params("flux", sigmas=sigmas)
    del given["num_inference_steps"]
    out = await send(engines("flux"), given, condition=condition("flux", 5))
    made = {k: v[None] for k, v in condition("flux", 5).items() if not k.startswith("neg")}
    expected = whole(models("flux"))(
        **made, height=32, width=32, sigmas=sigmas, guidance_scale=1.0,
        generator=torch.Generator().manual_seed(1), output_type="latent",
    ).images  # fmt: skip
    part = engines("flux").part
    unpacked = part.family.latents(part.pipeline, expected, (32, 32))
    torch.testing.assert_close(latents_of(out), unpacked, atol=1e-5, rtol=0)
    assert out.metrics["steps"] == 3


@pytest.mark.parametrize("name", ["euler", "heun", "unipc", "dpmpp"])
async def test_schedulers_by_name_equal_the_pipelines(
    engines: Callable[[str], Any], models: Callable[[str], Path], name: str
) -> None:
    """Wan takes any; their state is each request's own, beside others."""
    import diffusers

    engine = engines("wan")
    given = params("wan", num_inference_steps=5, scheduler=name, **cfg("wan", 3.0))
    other = params("wan", num_inference_steps=7, seed=5)
    out, _ = await asyncio.gather(
        send(engine, given, request_id="a", condition=condition("wan", 6)),
        send(engine, other, request_id="b", condition=condition("wan", 6, 1)),
    )
    pipeline = whole(models("wan"))
    config = pipeline.scheduler.config
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
    classes: dict[str, Any] = {
        "euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler.from_config(config),
        "heun": lambda: diffusers.FlowMatchHeunDiscreteScheduler.from_config(config),
        "unipc": lambda: diffusers.UniPCMultistepScheduler.from_config(config, **flow),
        "dpmpp": lambda: diffusers.DPMSolverMultistepScheduler.from_config(config, **flow),
    }
    pipeline.scheduler = classes[name]()
    made = {k: v[None] for k, v in condition("wan", 6).items()}
    expected = pipeline(
        **made, height=32, width=32, num_frames=5, num_inference_steps=5, guidance_scale=3.0,
        generator=torch.Generator().manual_seed(1), output_type="latent",
    ).frames  # fmt: skip
    torch.testing.assert_close(latents_of(out), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["z_image", "flux", "sd3", "qwen_image", "wan"])
async def test_latents_that_a_request_brings(engines: Callable[[str], Any], name: str) -> None:
    """In the form they leave the stage in; the seed's own noise gives the seed's result."""
    engine = engines(name)
    made = condition(name, 6)
    given = params(name, num_inference_steps=3, **({"guidance_scale": 0.0}))
    expected = await send(engine, given, condition=made)
    shape = latents_of(expected).shape
    generator = torch.Generator().manual_seed(given["seed"])
    if name == "qwen_image":  # its noise has frames before channels
        noise = torch.randn((1, 1, shape[1], *shape[3:]), generator=generator).transpose(1, 2)
    else:
        noise = torch.randn(shape, generator=generator)
    out = await send(engine, {**given, "seed": 99}, condition=made, latents=noise)
    torch.testing.assert_close(latents_of(out), latents_of(expected), atol=1e-5, rtol=0)
    with pytest.raises(InvalidRequest, match=r"'latents': must be \[n, C, h, w\]"):
        await send(engine, given, condition=made, latents=noise[0, 0])


def make_lora(model: Path, folder: Path, seed: int) -> Path:
    """Random LoRA weights for the attention of an SD3 transformer."""
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel.from_pretrained(model / "transformer")
    transformer.add_adapter(
        LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    )
    StableDiffusion3Pipeline.save_lora_weights(folder, get_peft_model_state_dict(transformer))
    return folder


async def test_loras_of_batch_mates_do_not_mix(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two LoRAs, one of them at two weights, and none: each as the stock pipeline makes it."""
    model = models("sd3")
    paths = {f"l{i}": str(make_lora(model, tmp_path / f"l{i}", i)) for i in range(2)}
    engine: Any = loaded_now(dit_stage(model, dit={**ALWAYS, "loras": paths}))
    asked: list[dict[str, float]] = [{}, {"l0": 1.0}, {"l1": 1.0}, {"l0": 0.5}, {}]
    outs = await asyncio.gather(
        *[
            send(
                engine, params("sd3", lora=lora), request_id=f"r{i}",
                condition=condition("sd3", 5),
            )
            for i, lora in enumerate(asked)
        ]
    )  # fmt: skip
    pipeline = whole(model)
    made = {k: v[None] for k, v in condition("sd3", 5).items() if not k.startswith("neg")}
    results = []
    for lora, out in zip(asked, outs, strict=True):
        pipeline.unload_lora_weights()
        for name in lora:
            pipeline.load_lora_weights(paths[name], adapter_name=name)
        if lora:
            pipeline.set_adapters(list(lora), list(lora.values()))
        expected = pipeline(
            **made, height=32, width=32, num_inference_steps=4, guidance_scale=1.0,
            generator=torch.Generator().manual_seed(1), output_type="latent",
        ).images  # fmt: skip
        torch.testing.assert_close(latents_of(out), expected, atol=TOLERANCE, rtol=0)
        results.append(expected)
    assert not torch.allclose(results[0], results[1], atol=1e-3)
    assert not torch.allclose(results[1], results[3], atol=1e-3)
    with pytest.raises(InvalidRequest, match="no LoRA 'x'; allowed: l0, l1"):
        await send(engine, params("sd3", lora={"x": 1.0}), condition=condition("sd3", 5))
    with pytest.raises(ConfigError, match="cannot load"):
        loaded_now(dit_stage(model, dit={"loras": {"x": str(tmp_path / "none")}}))


class _Previews(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def preview(self, value: dict[str, Any]) -> None:
        self.seen.append(value)


@pytest.mark.parametrize("name", ["z_image", "flux", "flux2_klein", "qwen_image", "wan"])
async def test_previews_every_few_steps(models: Callable[[str], Path], name: str) -> None:
    """Small pictures as JSON; asking for them changes nothing."""
    from PIL import Image

    engine: Any = loaded_now(dit_stage(models(name)))
    seen = _Previews()
    given = params(name, num_inference_steps=5, guidance_scale=0.0)
    without = await send(engine, given, seen, condition=condition(name, 5))
    assert not seen.seen, "off by default"
    assert engine.part._previewer is None
    given["preview_every"] = 2
    out = await send(engine, given, seen, condition=condition(name, 5))
    assert torch.equal(latents_of(out), latents_of(without))
    if name != "flux2_klein":  # which denoises with it
        assert engine.part.pipeline.vae is None  # was there for the fit only
    assert [p["step"] for p in seen.seen] == [2, 4]
    assert seen.seen[-1]["url"].startswith("data:image/webp;base64,")
    height, width = latents_of(out).shape[-2:]
    shown = Image.open(io.BytesIO(base64.b64decode(seen.seen[-1]["url"].partition(",")[2])))
    assert shown.size == (width, height) == (seen.seen[-1]["width"], seen.seen[-1]["height"])


async def test_the_first_preview_does_not_wait_for_other_requests(
    models: Callable[[str], Path],
) -> None:
    """What it needs is loaded between two steps of theirs; a model without a VAE says so."""
    engine: Any = loaded_now(dit_stage(models("flux")))
    made = condition("flux", 5)
    long = Recorder()
    endless = asyncio.create_task(
        send(engine, params("flux", num_inference_steps=1000), long, condition=made)
    )
    await until(lambda: bool(long.steps), endless)
    seen = _Previews()
    await send(engine, params("flux", preview_every=1), seen, request_id="p", condition=made)
    assert [p["step"] for p in seen.seen] == [1, 2, 3, 4]
    assert not endless.done()
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    engine.part._previewer = None
    del engine.part._index.components["vae"]
    with pytest.raises(InvalidRequest, match="preview_every: must be 0: FluxPipeline has no VAE"):
        await send(engine, params("flux", preview_every=1), condition=made)


async def test_previews_are_few(models: Callable[[str], Path]) -> None:
    """At most 64 a request, however many are asked for."""
    engine: Any = loaded_now(dit_stage(models("flux")))
    seen = _Previews()
    given = params("flux", num_inference_steps=50, num_images_per_prompt=2, preview_every=1)
    await send(engine, given, seen, condition=condition("flux", 5))
    assert len(seen.seen) == 50
    assert {p["image"] for p in seen.seen} == {0, 1}


async def test_previews_of_a_trained_model_show_its_pictures() -> None:
    """The built-in model: the last preview goes with the decoded picture, although 64 pixels of a
    small VAE are far from linear (0.47 measured; a wrong scale, shift or order gives about 0).
    """
    from omniq.config import get_pipeline
    from omniq.config.stage import DiTConfig

    ar, dit, decode = get_pipeline("tiny-omni").stages
    config = dit.model_copy(update={"dit": DiTConfig(preview_every=5, null_condition="zeros")})
    engine: Any = loaded_now(config)
    text = await ask(loaded_now(ar), {**ar.defaults, "seed": 1}, prompt="a red circle")
    latents = latents_of(
        await send(
            engine, {**dit.defaults, "seed": 1},
            prompt_embeds=text.tensors["hidden_states"]["hidden_states"],
        )
    )  # fmt: skip
    decoded = await ask(loaded_now(decode), {}, latents=latents)
    pixels = decoded.tensors["image"]["image"].float().permute(2, 0, 1)[None]
    small = torch.nn.functional.interpolate(pixels, latents.shape[-2:], mode="area")[0]
    preview = engine.part._previewer.picture(latents).float().permute(2, 0, 1)
    alike = torch.corrcoef(torch.stack([small.flatten(), preview.flatten()]))[0, 1]
    assert alike > 0.4


async def test_encoded_prompts_are_remembered(models: Callable[[str], Path]) -> None:
    engine: Any = loaded_now(stage(models("sd3"), "encode", engine_args={"remember": 2}))
    calls: list[int] = []
    engine.part._pipeline.text_encoder_3.register_forward_pre_hook(lambda *_: calls.append(1))
    asked = {"guidance_scale": 4.0, "negative_prompt": "b"}
    first = await ask(engine, asked, prompt="a")
    again = await ask(engine, asked, prompt="a")
    assert len(calls) == 2
    assert (first.metrics["remembered_prompts"], again.metrics["remembered_prompts"]) == (0, 2)
    for name, tensor in first.tensors["condition"].items():
        assert torch.equal(tensor, again.tensors["condition"][name])
    await ask(engine, {"guidance_scale": 1.0}, prompt="c")  # "a" goes
    await ask(engine, {"guidance_scale": 1.0, "max_sequence_length": 64}, prompt="b")
    assert len(calls) == 4
    assert len(engine.part._kept) == 2


async def test_a_stage_that_edits_needs_a_picture(models: Callable[[str], Path]) -> None:
    model = models("qwen_image_edit")
    with pytest.raises(ConfigError, match="add image to the stage's input_modalities"):
        loaded_now(dit_stage(model))
    engine = loaded_now(dit_stage(model, input_modalities=["image"]))
    made = condition("qwen_image_edit", 5)
    with pytest.raises(InvalidRequest, match="'image': missing"):
        await send(engine, params("qwen_image_edit"), condition=made)
    with pytest.raises(InvalidRequest, match=r"pictures are uint8 \[H, W, 3\]"):
        await send(engine, params("qwen_image_edit"), condition=made, image=torch.zeros(3, 8, 8))
    encode = loaded_now(stage(model, "encode"))
    with pytest.raises(InvalidRequest, match="'image': missing"):
        await ask(encode, {}, prompt="a")
    out = await ask(encode, {}, prompt="a", image=picture(0))
    assert set(out.tensors["condition"]) == {"prompt_embeds"}


async def test_warmup_of_every_part(models: Callable[[str], Path]) -> None:
    for name in ("flux", "sd3", "wan", "qwen_image"):
        defaults = {"height": 32, "width": 32}
        if name == "wan":
            defaults["num_frames"] = 5
        for config in (
            stage(models(name), "encode"),
            dit_stage(models(name), defaults=defaults),
            stage(models(name), "decode"),
        ):
            await loaded_now(config).warmup()


async def test_decoding_that_runs_out_of_memory_is_tiled(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = loaded_now(stage(models("flux"), "decode"))
    family, latents = engine.part._family, torch.randn(1, 4, 8, 8)
    expected = await ask(engine, {}, latents=latents)
    decode, tiled = family.decode, []

    def small(vae: Any, given: torch.Tensor) -> torch.Tensor:
        tiled.append(vae.use_tiling)
        if not vae.use_tiling:
            torch.empty(1 << 50, dtype=torch.uint8)  # a petabyte
        return decode(vae, given)

    monkeypatch.setattr(family, "decode", small)
    out = await ask(engine, {}, latents=latents)
    assert tiled == [False, True]
    assert out.tensors["image"]["image"].shape == expected.tensors["image"]["image"].shape
    assert not engine.part.vae.use_tiling  # the next one is tried whole again
    never: Any = loaded_now(stage(models("flux"), "decode", engine_args={"tiling": False}))
    monkeypatch.setattr(never.part._family, "decode", small)
    with pytest.raises(EngineOutOfMemory):
        await ask(never, {}, latents=latents)
    with pytest.raises(ConfigError, match="must be auto, true or false"):
        loaded_now(stage(models("flux"), "decode", engine_args={"tiling": "maybe"}))

"""Masks and several pictures: staged runs against the stock pipelines, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_helpers import (
    ALWAYS,
    Staged,
    condition,
    dit_stage,
    latents_of,
    loaded_now,
    params,
    picture,
    send,
    whole,
)
from PIL import Image

from omniq.errors import ConfigError, InvalidRequest

PROMPT = "a red circle above a blue square"


@pytest.fixture(scope="module")
def staged(models: Callable[[str], Path]) -> Callable[[str], Staged]:
    """The three stages of a model, its pictures on; made once."""
    found: dict[str, Staged] = {}

    def get(name: str) -> Staged:
        if name not in found:
            sees = name.startswith("qwen_image_edit")
            found[name] = Staged(models(name), pictures=True, encoder_sees=sees)
        return found[name]

    return get


def mask_of(height: int = 32, width: int = 32) -> torch.Tensor:
    """White (made anew) on the right half, uint8 [H, W, 3]."""
    mask = torch.zeros(height, width, 3, dtype=torch.uint8)
    mask[:, width // 2 :] = 255
    return mask


def pil(pixels: torch.Tensor) -> Image.Image:
    return Image.fromarray(pixels.numpy())


def expected(pipeline: Any, seed: int, **arguments: Any) -> np.ndarray:
    """The stock pipeline's uint8 pixels."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    made = pipeline(**arguments, generator=generator, output_type="np", return_dict=False)[0][0]
    return (made * 255).round().astype("uint8")


def assert_same(pixels: torch.Tensor, image: np.ndarray) -> None:
    """A value on the edge between two integers may round either way."""
    assert pixels.shape == image.shape
    assert np.abs(pixels.numpy().astype(int) - image.astype(int)).max() <= 1


@pytest.mark.parametrize("name", ["z_image", "flux", "sd3_16", "qwen_image"])
@pytest.mark.parametrize("strength", [0.5, 1.0])
async def test_inpainting_equals_whole(
    staged: Callable[[str], Staged], models: Callable[[str], Path], name: str, strength: float
) -> None:
    """White of the mask is made anew, black stays: as the stock inpainting pipeline."""
    from diffusers import AutoPipelineForInpainting

    pipeline = AutoPipelineForInpainting.from_pipe(whole(models(name)))
    size = {"height": 32, "width": 32, "num_inference_steps": 4, "strength": strength}
    guidance = {"guidance_scale": 2.0 if name in ("z_image", "sd3_16") else 1.0}
    shown, mask = picture(3), mask_of()
    _, pixels = await staged(name)(PROMPT, {**size, **guidance, "seed": 5}, shown, mask)
    if name == "qwen_image":
        guidance = {"true_cfg_scale": 1.0}
    arguments = {"image": pil(shown), "mask_image": pil(mask).convert("L"), **size, **guidance}
    if name == "sd3_16":
        # Its end leaves out the VAE's shift, which every other pipeline of the family applies.
        decode, shift = pipeline.vae.decode, pipeline.vae.config.shift_factor
        pipeline.vae.decode = lambda latents, **more: decode(latents + shift, **more)
    assert_same(pixels, expected(pipeline, 5, prompt=PROMPT, **arguments))
    _, whole_anew = await staged(name)(PROMPT, {**size, **guidance, "seed": 5}, shown)
    assert not torch.equal(pixels, whole_anew), "the mask counts"


@pytest.fixture
def small_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipelines edit at a megapixel, which is too much for a test on a CPU."""
    from diffusers.pipelines.qwenimage import (
        pipeline_qwenimage_edit,
        pipeline_qwenimage_edit_inpaint,
        pipeline_qwenimage_edit_plus,
    )

    for module in (
        pipeline_qwenimage_edit,
        pipeline_qwenimage_edit_inpaint,
        pipeline_qwenimage_edit_plus,
    ):
        dimensions: Any = module.calculate_dimensions

        def small(area: int, ratio: float, dimensions: Any = dimensions) -> Any:
            return dimensions(96 * 96 if area > 512 * 512 else 64 * 64, ratio)

        monkeypatch.setattr(module, "calculate_dimensions", small)


@pytest.mark.usefixtures("small_edits")
@pytest.mark.parametrize("guidance", [1.0, 3.0])
async def test_editing_with_several_pictures_equals_whole(
    staged: Callable[[str], Staged], models: Callable[[str], Path], guidance: float
) -> None:
    """Qwen-Image-Edit-Plus: encoder and transformer see each picture, the last gives the shape."""
    shown = {"0": picture(1, 40, 56), "1": picture(2, 48, 32)}
    given = {"num_inference_steps": 2, "guidance_scale": guidance, "negative_prompt": "a star"}
    _, pixels = await staged("qwen_image_edit_plus")("mix", {**given, "seed": 3}, shown)
    del given["guidance_scale"]
    images = [pil(p) for p in shown.values()]
    pipeline = whole(models("qwen_image_edit_plus"))
    image = expected(pipeline, 3, prompt="mix", image=images, true_cfg_scale=guidance, **given)
    assert_same(pixels, image)
    backwards = dict(reversed(shown.items()))
    _, other = await staged("qwen_image_edit_plus")("mix", {**given, "seed": 3}, backwards)
    assert other.shape != pixels.shape, "the order of the pictures counts"


@pytest.mark.usefixtures("small_edits")
async def test_editing_inside_a_mask_equals_whole(
    staged: Callable[[str], Staged], models: Callable[[str], Path]
) -> None:
    from diffusers import AutoPipelineForInpainting

    shown, mask = picture(1, 40, 56), mask_of(40, 56)
    given = {"num_inference_steps": 2, "strength": 1.0}
    _, pixels = await staged("qwen_image_edit")("red", {**given, "seed": 3}, shown, mask)
    pipeline = AutoPipelineForInpainting.from_pipe(whole(models("qwen_image_edit")))
    arguments = {"image": pil(shown), "mask_image": pil(mask).convert("L"), "true_cfg_scale": 1.0}
    assert_same(pixels, expected(pipeline, 3, prompt="red", **arguments, **given))


async def test_pictures_of_another_size_are_scaled(
    staged: Callable[[str], Staged], models: Callable[[str], Path]
) -> None:
    """Also by Z-Image, whose stock pipelines fail on them; without a size it is the picture's."""
    from diffusers import ZImageInpaintPipeline

    shown, mask = picture(3, 40, 56), mask_of(40, 56)
    given = {"num_inference_steps": 3, "strength": 0.7, "guidance_scale": 0.0}
    size = {"height": 32, "width": 48}
    _, pixels = await staged("z_image")(PROMPT, {**given, **size, "seed": 1}, shown, mask)
    pipeline = ZImageInpaintPipeline.from_pipe(whole(models("z_image")))
    resized = pil(shown).resize((48, 32), Image.Resampling.LANCZOS)
    arguments = {"image": resized, "mask_image": pil(mask), **size, **given}
    assert_same(pixels, expected(pipeline, 1, prompt=PROMPT, **arguments))
    _, own = await staged("z_image")(PROMPT, {**given, "seed": 1}, shown)
    assert own.shape == (40, 56, 3)


async def test_pictures_masks_and_texts_share_forwards(staged: Callable[[str], Staged]) -> None:
    """Different tasks of one model batch, and each equals its own run alone."""
    engine: Any = staged("flux").dit
    made = condition("flux", 5)
    given = params("flux", num_inference_steps=4)
    asked: list[dict[str, Any]] = [
        {},
        {"image": picture(1)},
        {"image": picture(2), "mask_image": mask_of()},
    ]
    strength = [{}, {"strength": 1.0}, {"strength": 1.0}]
    alone = [
        latents_of(await send(engine, {**given, **s}, condition=made, **a))
        for a, s in zip(asked, strength, strict=True)
    ]
    before = engine.part.runner.forwards
    together = await asyncio.gather(
        *[
            send(engine, {**given, **s}, request_id=f"r{i}", condition=made, **a)
            for i, (a, s) in enumerate(zip(asked, strength, strict=True))
        ]
    )
    assert engine.part.runner.forwards - before < 3 * 4
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(latents_of(other), one, atol=2e-5, rtol=0)


REFUSED = [
    ("flux", {"mask_image": mask_of()}, r"'mask_image': needs an image"),
    ("flux", {"image": {"0": picture(0), "1": picture(1)}}, r"FluxPipeline takes 1; got 2"),
    (
        "flux",
        {"image": picture(0), "mask_image": {"0": mask_of(), "1": mask_of()}},
        r"'mask_image': must be one mask; got 2",
    ),
    (
        "qwen_image_edit_plus",
        {"image": picture(0), "mask_image": mask_of()},
        r"QwenImageEditPlusPipeline has no form that takes a mask",
    ),
    (
        "flux",
        {"latents": torch.zeros(1, 4, 8, 8)},
        r"'latents': must be \[n, 4, 16, 16\] for 32 x 32 pixels .* is \[1, 4, 8, 8\]",
    ),
    ("flux", {"latents": torch.full((1, 4, 16, 16), torch.inf)}, r"'latents': must be finite"),
    (
        "flux",
        {"latents": torch.full((1, 4, 16, 16), 1e300, dtype=torch.float64)},
        r"'latents': must be finite, holds NaN or infinity as torch\.float32",
    ),
    ("flux", {"latents": torch.zeros(2, 4, 16, 16)}, r"with n = 1, .* is \[2, 4, 16, 16\]"),
    (
        "qwen_image_edit",
        {"image": picture(0), "latents": torch.zeros(1, 4, 8, 8)},
        r"'latents': must be \[n, 4, 1, 8, 8\]",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "inputs", "message"), REFUSED)
async def test_wrong_pictures_and_latents_are_refused(
    staged: Callable[[str], Staged], name: str, inputs: dict[str, Any], message: str
) -> None:
    """Before the first step, with what is allowed."""
    engine: Any = staged(name).dit
    before = engine.part.runner.forwards
    with pytest.raises(InvalidRequest, match=message):
        await send(engine, params(name), condition=condition(name, 5), **inputs)
    assert engine.part.runner.forwards == before


async def test_a_model_without_pictures_says_so(models: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="WanPipeline has no form that takes pictures"):
        loaded_now(dit_stage(models("wan"), input_modalities=["image"]))
    plain = loaded_now(dit_stage(models("flux"), dit=ALWAYS))
    with pytest.raises(InvalidRequest, match="'image': this stage takes no pictures"):
        await send(plain, params("flux"), condition=condition("flux", 5), image=picture(0))

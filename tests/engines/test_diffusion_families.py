"""Staged runs of every family against the whole stock pipeline on the same weights and seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_helpers import Staged, picture, whole

Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def both(models: Made) -> Callable[..., tuple[Staged, Any]]:
    """(staged, whole) of a model, made once."""
    found: dict[tuple[str, bool], tuple[Staged, Any]] = {}

    def get(name: str, *, pictures: bool = False) -> tuple[Staged, Any]:
        if (name, pictures) not in found:
            sees = name in ("qwen_image_edit", "wan_i2v")
            staged = Staged(models(name), pictures=pictures, encoder_sees=sees)
            found[name, pictures] = (staged, whole(models(name)))
        return found[name, pictures]

    return get


PROMPT = "a red circle above a blue square"
# (family, request parameters, arguments of the whole pipeline that differ from them)
CASES = [
    ("z_image", {"guidance_scale": 0.0}, {}),
    ("z_image", {"guidance_scale": 3.0}, {}),
    ("z_image", {"guidance_scale": 3.0, "negative_prompt": "a star"}, {}),
    ("z_image", {"guidance_scale": 2.0, "height": 48, "width": 32}, {}),
    ("flux", {"guidance_scale": 3.5}, {}),
    ("flux", {"guidance_scale": 1.0, "height": 32, "width": 48}, {}),
    ("flux", {"guidance_scale": 2.0, "true_cfg_scale": 3.0, "negative_prompt": "a star"}, {}),
    ("flux", {"max_sequence_length": 64}, {}),
    ("sd3", {"guidance_scale": 1.0}, {}),
    ("sd3", {"guidance_scale": 5.0}, {}),
    ("sd3", {"guidance_scale": 5.0, "negative_prompt": "a star", "height": 48}, {}),
    ("qwen_image", {}, {"negative_prompt": None}),
    (
        "qwen_image",
        {"guidance_scale": 4.0, "negative_prompt": "a star", "height": 32, "width": 64},
        {"true_cfg_scale": 4.0, "guidance_scale": None},
    ),
    (
        "qwen_image",
        {"guidance_scale": 1.0, "negative_prompt": "a star"},
        {"true_cfg_scale": 1.0, "guidance_scale": None},
    ),
    ("flux2", {"guidance_scale": 3.5}, {}),
    ("flux2", {"height": 32, "width": 48, "max_sequence_length": 64}, {}),
    ("flux2_klein", {"guidance_scale": 1.0}, {}),
    ("flux2_klein", {"guidance_scale": 4.0, "height": 48}, {}),
    ("wan", {"guidance_scale": 1.0, "num_frames": 5}, {}),
    ("wan_5b", {"guidance_scale": 4.0, "num_frames": 5}, {}),
    ("wan", {"guidance_scale": 4.0, "num_frames": 9}, {}),
    (
        "wan",
        {"guidance_scale": 4.0, "num_frames": 5, "negative_prompt": "a star", "height": 48},
        {},
    ),
]


def _name(case: tuple[str, dict[str, Any], dict[str, Any]]) -> str:
    return "-".join([case[0], *map(str, case[1].values())]).replace(" ", "_")


def reference(
    pipeline: Any, arguments: dict[str, Any], seed: int
) -> tuple[torch.Tensor, np.ndarray]:
    """Latents as the pipeline leaves them, and uint8 pixels."""

    def run(output_type: str) -> Any:
        generator = torch.Generator().manual_seed(seed)
        made = pipeline(
            **arguments, generator=generator, output_type=output_type, return_dict=False
        )
        return made[0]

    return run("latent"), (run("np")[0] * 255).round().astype("uint8")


@pytest.mark.parametrize("case", CASES, ids=_name)
async def test_staged_equals_whole(
    both: Callable[..., tuple[Staged, Any]], case: tuple[str, dict[str, Any], dict[str, Any]]
) -> None:
    """Same latents and pixels from three stages as from one pipeline."""
    name, more, differing = case
    staged, pipeline = both(name)
    params = {"height": 32, "width": 32, "num_inference_steps": 3, "seed": 7, **more}
    latents, pixels = await staged(PROMPT, params)
    arguments = {"prompt": PROMPT, **params, **differing}
    del arguments["seed"]
    expected, image = reference(pipeline, {k: v for k, v in arguments.items() if v is not None}, 7)
    unpacked = staged.dit.part.family.latents(
        pipeline, expected, (params["height"], params["width"])
    )
    torch.testing.assert_close(latents, unpacked, atol=1e-5, rtol=0)
    assert pixels.shape == image.shape
    # A value on the edge between two integers may round either way.
    assert np.abs(pixels.numpy().astype(int) - image.astype(int)).max() <= 1
    assert (pixels.numpy() != image).mean() < 0.001


@pytest.mark.parametrize("name", ["z_image", "flux", "sd3", "qwen_image"])
@pytest.mark.parametrize("strength", [0.4, 0.9])
async def test_image_to_image_equals_whole(
    both: Callable[..., tuple[Staged, Any]], name: str, strength: float
) -> None:
    """A picture, a strength: as the stock image-to-image pipeline of the same components."""
    from diffusers import AutoPipelineForImage2Image
    from PIL import Image

    staged, pipeline = both(name, pictures=True)
    task = AutoPipelineForImage2Image.from_pipe(pipeline)
    task.set_progress_bar_config(disable=True)
    size = {"height": 32, "width": 32, "num_inference_steps": 5, "strength": strength}
    guidance = {"guidance_scale": 1.0} if name != "z_image" else {"guidance_scale": 2.0}
    shown = picture(3)
    _, pixels = await staged(PROMPT, {**size, **guidance, "seed": 5}, shown)
    if name == "qwen_image":
        guidance = {"true_cfg_scale": 1.0}
    arguments = {"prompt": PROMPT, "image": Image.fromarray(shown.numpy()), **size, **guidance}
    _, image = reference(task, arguments, 5)
    assert np.abs(pixels.numpy().astype(int) - image.astype(int)).max() <= 1


@pytest.mark.parametrize("name", ["flux2", "flux2_klein"])
async def test_flux2_reference_pictures_equal_whole(
    both: Callable[..., tuple[Staged, Any]], name: str
) -> None:
    """One and several pictures; without a size it is the first one's; with text they batch."""
    from PIL import Image

    staged, pipeline = both(name, pictures=True)
    shown = {"0": picture(1, 70, 88), "1": picture(2, 64, 64)}
    params = {"num_inference_steps": 2, "guidance_scale": 3.0}
    for pictures in ({"0": shown["0"]}, shown):
        _, pixels = await staged(PROMPT, {**params, "seed": 3}, pictures)
        images = [Image.fromarray(p.numpy()) for p in pictures.values()]
        _, image = reference(pipeline, {"prompt": PROMPT, "image": images, **params}, 3)
        assert pixels.shape == image.shape == (68, 88, 3)
        assert np.abs(pixels.numpy().astype(int) - image.astype(int)).max() <= 1
    size = {"height": 32, "width": 32}
    _, alone = await staged(PROMPT, {**params, **size, "seed": 3})
    _, image = reference(pipeline, {"prompt": PROMPT, **params, **size}, 3)
    assert np.abs(alone.numpy().astype(int) - image.astype(int)).max() <= 1


async def test_flux2_latents_start_another_run(both: Callable[..., tuple[Staged, Any]]) -> None:
    """What leaves the stage goes back in as it was: patched and normalised again."""
    staged, _ = both("flux2")
    pipeline, family = staged.dit.part.pipeline, staged.dit.part.family
    latents, _ = await staged(PROMPT, {"height": 32, "width": 48, "num_inference_steps": 2})
    grid = family.to_pipeline(pipeline, latents)
    assert grid.shape == (1, 16, 8, 12)
    back = family.latents(pipeline, pipeline._pack_latents(grid), (32, 48))
    torch.testing.assert_close(back, latents, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("wan_i2v", {"guidance_scale": 1.0}),
        ("wan_i2v", {"guidance_scale": 4.0, "negative_prompt": "a star", "height": 48}),
        ("wan22_i2v", {"guidance_scale": 4.0}),
        ("wan22_i2v", {"guidance_scale": 4.0, "guidance_scale_2": 2.0}),
        ("wan_5b", {"guidance_scale": 4.0}),
    ],
)
async def test_video_of_a_first_frame_equals_whole(
    both: Callable[..., tuple[Staged, Any]], name: str, more: dict[str, Any]
) -> None:
    """Wan 2.1, whose encode stage sees the picture; Wan 2.2, of two transformers; its 5B model."""
    from diffusers import WanImageToVideoPipeline
    from PIL import Image

    staged, pipeline = both(name, pictures=True)
    pipeline = WanImageToVideoPipeline.from_pipe(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    assert staged.encode.part._looks == (name == "wan_i2v")
    params = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4, **more}
    shown = picture(2, 40, 56)
    latents, pixels = await staged(PROMPT, {**params, "seed": 4}, shown)
    arguments = {"prompt": PROMPT, "image": Image.fromarray(shown.numpy()), **params}
    expected, video = reference(pipeline, arguments, 4)
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=0)
    assert pixels.shape == video.shape
    assert np.abs(pixels.numpy().astype(int) - video.astype(int)).max() <= 1
    _, other = await staged(PROMPT, {**params, "seed": 4}, picture(5, 40, 56))
    assert not torch.equal(pixels, other), "the picture counts"


@pytest.mark.parametrize("guidance", [1.0, 3.0])
async def test_edit_equals_whole(
    both: Callable[..., tuple[Staged, Any]], monkeypatch: pytest.MonkeyPatch, guidance: float
) -> None:
    """Qwen-Image-Edit: the picture goes to the text encoder and, as latents, to the transformer."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit
    from PIL import Image

    # The pipeline edits at a megapixel, which is too much for a test on a CPU.
    areas = edit.calculate_dimensions
    monkeypatch.setattr(edit, "calculate_dimensions", lambda _, ratio: areas(96 * 96, ratio))
    staged, pipeline = both("qwen_image_edit", pictures=True)
    params = {
        "height": 32, "width": 32, "num_inference_steps": 2,
        "guidance_scale": guidance, "negative_prompt": "a star",
    }  # fmt: skip
    shown = picture(1, 40, 56)
    _, pixels = await staged("make it red", {**params, "seed": 3}, shown)
    del params["guidance_scale"]
    arguments = {
        "prompt": "make it red", "image": Image.fromarray(shown.numpy()),
        "true_cfg_scale": guidance, **params,
    }  # fmt: skip
    _, image = reference(pipeline, arguments, 3)
    assert np.abs(pixels.numpy().astype(int) - image.astype(int)).max() <= 1


async def test_several_pictures_of_one_prompt(both: Callable[..., tuple[Staged, Any]]) -> None:
    """Picture i has seed + i; each equals the pipeline's with that seed."""
    staged, pipeline = both("sd3")
    params = {"height": 32, "width": 32, "num_inference_steps": 2, "guidance_scale": 3.0}
    _, pixels = await staged(PROMPT, {**params, "seed": 9, "num_images_per_prompt": 3})
    assert pixels.shape == (3, 32, 32, 3)
    for i in range(3):
        _, image = reference(pipeline, {"prompt": PROMPT, **params}, 9 + i)
        assert np.abs(pixels[i].numpy().astype(int) - image.astype(int)).max() <= 1

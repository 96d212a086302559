"""GLM-Image staged (AR, glyph encoder, DiT, VAE) against the whole pipeline of diffusers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_helpers import dit_stage, latents_of, loaded_now, picture, send
from engine_helpers import Recorder, ask, stage
from tiny_glm_image import make_glm_image, whole_glm_image

from omniq.config import OmniStageConfig
from omniq.engines.base import NullEmit, StageInput, StageRequest
from omniq.engines.families.glm_image import PriorPlan, doubled, source_tensors
from omniq.errors import EngineError, InvalidRequest

SIGN = "a sign that says 'HELLO' and \"bye\""


def ar_stage(model: Path, **more: Any) -> OmniStageConfig:
    settings = {"subfolder": None, "engine": "glm_image", "more_parameters": ["height", "width"]}
    return stage(model, "ar", **settings, input_modalities=["text", "image"], **more)


class GlmImageStages:
    """The four stages of one tiny model."""

    def __init__(self, model: Path) -> None:
        self.ar = loaded_now(ar_stage(model))
        self.encode = loaded_now(stage(model, "encode"))
        self.dit = loaded_now(dit_stage(model, input_modalities=["image"]))
        self.decode = loaded_now(stage(model, "decode"))

    async def prior(
        self,
        prompt: str,
        params: Mapping[str, Any],
        pictures: Sequence[torch.Tensor] = (),
        emit: Any = None,
    ) -> dict[str, dict[str, torch.Tensor]]:
        inputs = {"prompt": StageInput(prompt)}
        if pictures:
            inputs["image"] = StageInput(tensors={f"image.{i}": p for i, p in enumerate(pictures)})
        names = ("height", "width", "seed", "temperature", "top_k", "top_p", "deterministic")
        own = {n: params[n] for n in names if n in params}
        out = await self.ar.run(StageRequest("test", own), inputs, emit or NullEmit())
        return out.tensors

    async def __call__(
        self,
        prompt: str,
        params: Mapping[str, Any],
        pictures: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents, and uint8 pixels."""
        encoding = {n: params[n] for n in ("guidance_scale",) if n in params}
        prior = await self.prior(prompt, params, pictures)
        encoded = await ask(self.encode, encoding, prompt=prompt)
        more = {}
        if pictures:
            more["image"] = {f"image.{i}": p for i, p in enumerate(pictures)}
        made = await send(
            self.dit,
            params,
            condition=encoded.tensors["condition"],
            prior=prior["prior"],
            **more,
        )
        decoded = await ask(self.decode, {}, latents=latents_of(made))
        return latents_of(made), decoded.tensors["image"]["image"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_glm_image(tmp_path_factory.mktemp("models") / "glm_image")


@pytest.fixture(scope="module")
def staged(model: Path) -> GlmImageStages:
    return GlmImageStages(model)


@pytest.fixture(scope="module")
def pipeline(model: Path) -> Any:
    return whole_glm_image(model)


def reference(
    pipeline: Any,
    prompt: str,
    params: Mapping[str, Any],
    pictures: Sequence[torch.Tensor] = (),
    seeds: Sequence[int] = (),
) -> tuple[torch.Tensor, np.ndarray]:
    """Latents, and uint8 pixels, of one call."""
    from PIL import Image

    arguments = {n: v for n, v in params.items() if n != "seed"}
    if pictures:
        arguments["image"] = [Image.fromarray(p.numpy()) for p in pictures]

    def run(output_type: str) -> Any:
        made = [torch.Generator().manual_seed(s) for s in seeds or [params["seed"]]]
        generator = made if seeds else made[0]
        return pipeline(
            prompt, **arguments, generator=generator, output_type=output_type, return_dict=False
        )[0]

    return run("latent"), (run("np") * 255).round().astype("uint8")


def same_pixels(pixels: torch.Tensor, expected: np.ndarray) -> None:
    """A value on the edge between two integers may round either way."""
    assert pixels.shape == expected.shape
    assert np.abs(pixels.numpy().astype(int) - expected.astype(int)).max() <= 1


CASES: list[tuple[str, dict[str, Any]]] = [
    (SIGN, {"guidance_scale": 1.5}),
    (SIGN, {"guidance_scale": 1.0}),
    ("a red circle", {"height": 64, "width": 128, "guidance_scale": 3.0}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[1].values())))
async def test_picture_of_text_equals_whole(
    staged: GlmImageStages, pipeline: Any, case: tuple[str, dict[str, Any]]
) -> None:
    """Same seed, same latents and pixels; the tokens are those of ``generate``."""
    prompt, more = case
    params = {"height": 64, "width": 64, "num_inference_steps": 3, "seed": 7, **more}
    latents, pixels = await staged(prompt, params)
    expected, image = reference(pipeline, prompt, params)
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=0)
    same_pixels(pixels, image[0])


@pytest.mark.parametrize("guidance", [1.0, 2.5])
async def test_edit_equals_whole(staged: GlmImageStages, pipeline: Any, guidance: float) -> None:
    """Pictures go to the AR model as tokens, and to the DiT as tokens and latents."""
    size = {"height": 64, "width": 96, "num_inference_steps": 3}
    params = {**size, "guidance_scale": guidance, "seed": 3}
    shown = [picture(1, 64, 96), picture(2, 64, 96)]
    latents, pixels = await staged(SIGN, params, shown)
    expected, image = reference(pipeline, SIGN, params, shown)
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=0)
    same_pixels(pixels, image[0])


async def test_edit_without_pictures_differs(staged: GlmImageStages) -> None:
    """So that the test above compares something."""
    params = {"height": 64, "width": 64, "num_inference_steps": 2, "seed": 3}
    with_one, _ = await staged("a star", params, [picture(1, 64, 64)])
    with_other, _ = await staged("a star", params, [picture(2, 64, 64)])
    without, _ = await staged("a star", params)
    assert not torch.allclose(with_one, with_other, atol=1e-3)
    assert not torch.allclose(with_one, without, atol=1e-3)


async def test_tokens_condition_the_picture(staged: GlmImageStages) -> None:
    """The same noise and glyphs with other tokens give another picture."""
    params = {"height": 64, "width": 64, "num_inference_steps": 2, "seed": 3}
    one = (await staged.prior("a star", params))["prior"]
    other = (await staged.prior("a star", {**params, "seed": 4}))["prior"]
    assert not torch.equal(one["prior_token_ids"], other["prior_token_ids"])
    encoded = await ask(staged.encode, {}, prompt="a star")
    condition = encoded.tensors["condition"]
    first, second = [
        latents_of(await send(staged.dit, params, condition=condition, prior=prior))
        for prior in (one, other)
    ]
    assert not torch.allclose(first, second, atol=1e-3)


async def test_together_equals_alone(staged: GlmImageStages) -> None:
    """Requests in flight at once, of text and with a picture, give what each gives alone."""
    base = {"num_inference_steps": 3, "guidance_scale": 2.0}
    requests: list[tuple[str, dict[str, Any], list[torch.Tensor]]] = [
        ("a red circle", {**base, "height": 64, "width": 64, "seed": 1}, []),
        ("a blue square", {**base, "height": 64, "width": 64, "seed": 2}, []),
        (SIGN, {**base, "height": 64, "width": 96, "seed": 3}, []),
        ("a star", {**base, "height": 64, "width": 64, "seed": 4}, [picture(5, 64, 64)]),
    ]
    alone = [await staged(*request) for request in requests]
    runner = staged.dit.part.runner
    before = runner.forwards, runner.rows
    together = await asyncio.gather(*(staged(*request) for request in requests))
    for (latents, pixels), (expected, image) in zip(together, alone, strict=True):
        torch.testing.assert_close(latents, expected, atol=1e-4, rtol=0)
        same_pixels(pixels, image.numpy())
    assert runner.rows - before[1] > runner.forwards - before[0], "some have shared a forward"


async def test_several_pictures_of_one_prompt(staged: GlmImageStages, pipeline: Any) -> None:
    """They share their tokens; picture i has the noise of seed + i."""
    params = {"height": 64, "width": 64, "num_inference_steps": 2, "num_images_per_prompt": 2}
    latents, _ = await staged("a star", {**params, "seed": 5})
    expected, _ = reference(pipeline, "a star", params, seeds=[5, 6])
    torch.testing.assert_close(latents, expected, atol=1e-5, rtol=0)


async def test_sampling_parameters_reach_the_tokens(staged: GlmImageStages, pipeline: Any) -> None:
    """Greedy tokens are those of ``generate(do_sample=False)``."""
    params = {"height": 64, "width": 64, "seed": 1, "temperature": 0.0}
    made = (await staged.prior("a star", params))["token_ids"]["token_ids"]
    inputs = pipeline.processor.apply_chat_template(
        [[{"role": "user", "content": [{"type": "text", "text": "a star"}]}]],
        tokenize=True, target_h=64, target_w=64, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    ids = pipeline.vision_language_encoder.generate(
        **inputs, max_new_tokens=len(made), do_sample=False
    )
    assert made.tolist() == ids[0, inputs["input_ids"].shape[1] :].tolist()


async def test_deterministic_is_bit_for_bit(staged: GlmImageStages) -> None:
    """Tokens and latents of a deterministic request do not depend on what runs beside it."""
    params = {
        "height": 64, "width": 64, "num_inference_steps": 2, "seed": 1, "deterministic": True,
    }  # fmt: skip
    alone, _ = await staged("a star", params)
    (beside, _), _ = await asyncio.gather(
        staged("a star", params), staged("a red circle", {**params, "deterministic": False})
    )
    assert torch.equal(alone, beside)


async def test_cancelled_request_leaves_the_others_alone(staged: GlmImageStages) -> None:
    """Within a step, and without a trace in the batch."""
    params = {"height": 64, "width": 64, "seed": 1}
    expected = (await staged.prior("a star", params))["token_ids"]["token_ids"]
    told = Recorder()
    going = asyncio.create_task(staged.prior("a red circle", params, emit=told))
    other = asyncio.create_task(staged.prior("a star", params))
    while len(told.steps) < 5:
        await asyncio.sleep(0.001)
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
    assert torch.equal((await other)["token_ids"]["token_ids"], expected)
    assert len(told.steps) < told.steps[0][1]
    assert not staged.ar._loop._rows


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"height": 48, "width": 64}, "parameters.height"),
        ({"height": 64}, "parameters.width"),
        ({"height": 64, "width": 64, "max_tokens": 3}, "parameters.max_tokens"),
        ({"height": 2048, "width": 4096}, "input.prompt"),
    ],
)
async def test_wrong_requests_of_the_ar_stage(
    staged: GlmImageStages, params: dict[str, Any], field: str
) -> None:
    """Refused before anything is written, by name."""
    with pytest.raises(InvalidRequest) as refused:
        await ask(staged.ar, params, prompt="a")
    assert [f["field"] for f in refused.value.fields] == [field]


async def test_tokens_of_another_size_are_refused(staged: GlmImageStages) -> None:
    """The DiT says which number it needs, and which tokens there are."""
    condition = (await ask(staged.encode, {}, prompt="a")).tensors["condition"]
    params = {"height": 64, "width": 64, "num_inference_steps": 1}
    with pytest.raises(InvalidRequest, match="must be 16 tokens for 64 x 64"):
        await send(staged.dit, params, condition=condition, prior_token_ids=torch.zeros(8).long())
    with pytest.raises(InvalidRequest, match="must be 0 to 63"):
        await send(staged.dit, params, condition=condition, prior_token_ids=torch.full((16,), 64))
    with pytest.raises(InvalidRequest, match="must be integers"):
        await send(staged.dit, params, condition=condition, prior_token_ids=torch.zeros(16))
    with pytest.raises(InvalidRequest, match=r"prior_token_ids.*missing"):
        await send(staged.dit, params, condition=condition)


def test_plan_and_prior() -> None:
    """The preview comes first and is not drawn; each token covers four of the DiT's."""
    plan = PriorPlan.of(torch.tensor([[1, 1, 2], [1, 2, 2]]), from_text=True)
    assert (plan.before, plan.height, plan.width, plan.tokens) == (4, 1, 2, 6)
    assert plan.prior([9, 9, 9, 9, 5, 6, 8]).tolist() == [5, 5, 6, 6, 5, 5, 6, 6]
    with pytest.raises(EngineError, match="after 5 of 6 tokens"):
        plan.prior([9, 9, 9, 9, 5])
    edit = PriorPlan.of(torch.tensor([[1, 3, 3], [1, 1, 2]]), from_text=False)
    assert (edit.before, edit.tokens) == (0, 2)
    assert doubled(torch.tensor([1, 2]), 2, 1).tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    sources = source_tensors([torch.tensor([1, 2])], torch.tensor([[1, 1, 2]]))
    assert sources["source_image_grid_thw"].tolist() == [[1, 2, 4]]
    assert sources["prior_token_image_ids"].tolist() == [1, 1, 2, 2, 1, 1, 2, 2]

"""The built-in pipeline's real model on the real engines."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import ask, loaded

from omniq.config import get_pipeline
from omniq.config.request import validate_request


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_picture_shows_what_the_prompt_says(seed: int) -> None:
    """Red pixels lie above blue ones, and there are enough of both."""
    pipeline = get_pipeline("tiny-omni")
    prompt = "a red circle above a blue square"
    params = validate_request(pipeline, {"prompt": prompt}, {"seed": seed})
    ar, dit, decode = [await loaded(s) for s in pipeline.stages]
    text = await ask(ar, params["ar"], prompt=prompt)
    embeds = text.tensors["hidden_states"]["hidden_states"]
    latents = await ask(dit, params["dit"], prompt_embeds=embeds)
    out = await ask(decode, params["decode"], latents=latents.tensors["latents"]["latents"])

    assert "red circle above" in text.values["text"]
    assert text.values["finish_reason"] == "stop"
    pixels = out.tensors["image"]["image"].float()
    assert pixels.shape == (64, 64, 3)
    red, blue = (_rows_of(pixels, torch.tensor(c)) for c in ([220.0, 40, 40], [40.0, 95, 225]))
    assert min(len(red), len(blue)) > 60
    assert red.mean() < 28
    assert blue.mean() > 36


def _rows_of(pixels: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
    """Row of every pixel near ``colour``."""
    near = (pixels - colour).norm(dim=-1) < 60
    return near.nonzero()[:, 0].float()

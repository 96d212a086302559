"""A diffusion model's text encoder on vLLM against the stock pipeline's own encoding."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from diffusion_helpers import Staged, loaded_now, whole
from engine_helpers import loaded, stage
from resolve_helpers import resolved

from omniq.engines.base import NullEmit, StageInput, StageRequest
from omniq.errors import ConfigError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]
GUIDED = {"guidance_scale": 4.0, "negative_prompt": "a star, blurred"}
PROMPTS = ["a red circle above a blue square", "a {green} triangle", "a word " * 60]


def on_vllm(model: Path) -> Any:
    args = {"in_process": True, "kv_cache_memory_bytes": 32 << 20}
    return stage(model, "encode", engine="vllm", dtype="float32", engine_args=args, max_in_flight=4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def qwen(models: Callable[[str], Path]) -> AsyncIterator[Any]:
    """As ``omniq serve FOLDER --encoder vllm`` has it."""
    args = {"dtype": "float32", "in_process": True, "kv_cache_memory_bytes": 32 << 20}
    pipeline = resolved(models("qwen_image"), encoder="vllm", engine_args=args)
    engine = await loaded(pipeline.stage("encode"))
    yield engine
    await engine.unload()


async def encode(engine: Any, prompt: str, params: dict[str, Any]) -> dict[str, torch.Tensor]:
    request = StageRequest("test", params)
    out = await engine.run(request, {"prompt": StageInput(prompt)}, NullEmit())
    return out.tensors["condition"]


async def test_embeds_equal_the_pipelines_own(qwen: Any, models: Callable[[str], Path]) -> None:
    """Prompts in one batch, guided and not, cut and not: as ``encode_prompt`` of diffusers."""
    asked = [
        (PROMPTS[0], {}),
        (PROMPTS[1], GUIDED),
        (PROMPTS[2], {**GUIDED, "max_sequence_length": 16}),
    ]
    made = await asyncio.gather(*(encode(qwen, *a) for a in asked))
    pipeline = whole(models("qwen_image"))
    for (prompt, params), condition in zip(asked, made, strict=True):
        most = params.get("max_sequence_length", 512)
        texts = {"prompt_embeds": prompt}
        if params:
            texts["negative_prompt_embeds"] = params["negative_prompt"]
        assert condition.keys() == texts.keys()
        for name, text in texts.items():
            with torch.no_grad():
                expected, mask = pipeline.encode_prompt(text, max_sequence_length=most)
            assert mask is None
            torch.testing.assert_close(condition[name], expected[0], atol=1e-4, rtol=1e-4)
    assert len(made[2]["prompt_embeds"]) == 16


async def test_pictures_equal_those_of_the_whole_pipeline(
    qwen: Any, models: Callable[[str], Path]
) -> None:
    staged = Staged(models("qwen_image"))
    staged.encode = qwen
    size = {"height": 32, "width": 48, "num_inference_steps": 3}
    _, pixels = await staged(PROMPTS[0], {**size, **GUIDED, "seed": 7})
    image = whole(models("qwen_image"))(
        PROMPTS[0], **size, negative_prompt=GUIDED["negative_prompt"], true_cfg_scale=4.0,
        generator=torch.Generator().manual_seed(7), output_type="np",
    ).images[0]  # fmt: skip
    assert np.abs(pixels.numpy().astype(int) - (image * 255).round().astype(int)).max() <= 1


async def test_another_layer_without_a_template_of_its_own(models: Callable[[str], Path]) -> None:
    """Z-Image: the last but one layer, behind the tokenizer's chat template."""
    engine = await loaded(on_vllm(models("z_image")))
    made = await encode(engine, PROMPTS[0], {"guidance_scale": 2.0})
    await engine.unload()
    pipeline = whole(models("z_image"))
    with torch.no_grad():
        expected, negative = pipeline.encode_prompt(PROMPTS[0], negative_prompt="")
    torch.testing.assert_close(made["prompt_embeds"], expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(made["negative_prompt_embeds"], negative[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["flux", "qwen_image_edit"])
async def test_other_encoders_are_refused(models: Callable[[str], Path], name: str) -> None:
    with pytest.raises(ConfigError, match=r"'vllm' cannot encode for .*Pipeline"):
        loaded_now(on_vllm(models(name)))

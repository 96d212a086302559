"""Attention backends, compiled blocks and quantization by a stage's engine arguments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_helpers import dit_stage
from engine_helpers import ask, loaded
from tiny_models import HIDDEN
from torch._dynamo.utils import counters

from omniq.errors import ConfigError

EMBEDS = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(0))
PARAMS = {
    "height": 32, "width": 32, "num_inference_steps": 4, "guidance_scale": 2.5, "seed": 7,
}  # fmt: skip


async def latents(model: Path, **engine_args: Any) -> torch.Tensor:
    engine = await loaded(dit_stage(model, engine_args=engine_args))
    out = await ask(engine, PARAMS, prompt_embeds=EMBEDS, negative_prompt_embeds=EMBEDS.flip(0))
    await engine.unload()
    return out.tensors["latents"]["latents"]


@pytest.fixture
def backend() -> Iterator[None]:
    """diffusers keeps the backend that was set last for the whole process."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    yield
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


async def test_another_attention_backend_gives_the_same(
    model: Path, backend: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = await latents(model)
    kernels: list[int] = []
    real = torch.nn.attention.sdpa_kernel

    def noted(*args: Any, **kwargs: Any) -> Any:
        kernels.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", noted)
    math = await latents(model, attention_backend="_native_math")
    assert kernels, "the other backend was not used"
    torch.testing.assert_close(math, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
async def test_compiled_blocks_give_the_same(model: Path) -> None:
    plain = await latents(model)
    counters.clear()
    compiled = await latents(model, compile_repeated_blocks={"backend": "aot_eager"})
    assert counters["stats"]["unique_graphs"], "nothing was compiled"
    torch.testing.assert_close(compiled, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("engine_args", "message"),
    [
        ({"attention_backend": "warp"}, "engine_args attention_backend: .*one of.*native"),
        ({"compile_repeated_blocks": "yes"}, "engine_args compile_repeated_blocks: must be true"),
        ({"compile_repeated_blocks": {"speed": 3}}, "engine_args compile_repeated_blocks: .*speed"),
        ({"quantization_config": "int8"}, "engine_args quantization_config: must be a mapping"),
        (
            {"quantization_config": {"quant_backend": "magic", "quant_kwargs": {"bits": 1}}},
            "engine_args quantization_config: .*magic",
        ),
        ({"compile": True}, "unknown engine_args 'compile'; allowed: attention_backend"),
    ],
)
async def test_what_cannot_be_done_is_said(
    model: Path, engine_args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await latents(model, **engine_args)

"""Running tiny pipelines staged, and whole with the same weights."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from engine_helpers import ask, stage, until
from tiny_families import SIDE, WIDTH
from tiny_models import HIDDEN

from omniq.config import OmniStageConfig
from omniq.engines import create_engine
from omniq.engines.base import Engine, NullEmit, StageInput, StageOutput, StageRequest

ALWAYS = {"batching": {"when": "always"}}
#: Families whose guidance pairs must have equally long texts.
EQUALLY_LONG = ("flux", "flux2_klein", "sd3", "wan", "wan_i2v")
Condition = dict[str, torch.Tensor]
Pictures = torch.Tensor | dict[str, torch.Tensor]


def dit_stage(model: Path, **more: Any) -> OmniStageConfig:
    """A DiT stage that batches whatever it can, without defaults."""
    more.setdefault("dit", ALWAYS)
    return stage(model, "dit", **{"defaults": {}, **more})


def loaded_now(config: OmniStageConfig) -> Engine:
    """A loaded engine, whether or not a loop runs here."""
    engine = create_engine(config)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, engine.load()).result()
    return engine


def whole(model: Path) -> Any:
    """The stock pipeline with everything in it."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(str(model), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def picture(seed: int = 0, height: int = SIDE, width: int = SIDE) -> torch.Tensor:
    """Smooth noise, uint8 [H, W, 3]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    return (smooth[0].permute(1, 2, 0) * 255).to(torch.uint8)


async def send(
    engine: Engine,
    params: Mapping[str, Any],
    emit: Any = None,
    *,
    request_id: str = "test",
    priority: int = 5,
    deadline: float | None = None,
    **inputs: Any,
) -> StageOutput:
    """Run one request; an input is a tensor, or a mapping of tensors."""
    given = {n: StageInput(tensors=v if isinstance(v, dict) else {n: v}) for n, v in inputs.items()}
    request = StageRequest(request_id, params, priority, deadline)
    return await engine.run(request, given, emit or NullEmit())


def latents_of(output: StageOutput) -> torch.Tensor:
    """The latents a DiT stage made."""
    return output.tensors["latents"]["latents"]


def condition(name: str, tokens: int, seed: int = 0) -> Condition:
    """Random conditions of a family, positive and negative; pairs need not be equally long where
    the pipeline allows it.
    """
    generator = torch.Generator().manual_seed(seed)
    width = {"z_image": HIDDEN, "sd3": 2 * WIDTH, "flux2_klein": 3 * WIDTH}.get(name, WIDTH)
    other = tokens if name in EQUALLY_LONG else tokens + 3

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    made = {
        "prompt_embeds": rand(tokens, width),
        "negative_prompt_embeds": rand(other, width),
    }
    if name in ("flux", "sd3"):
        made |= {"pooled_prompt_embeds": rand(width), "negative_pooled_prompt_embeds": rand(width)}
    return made


def params(name: str, **more: Any) -> dict[str, Any]:
    made = {"height": 32, "width": 32, "num_inference_steps": 4, "seed": 1, "guidance_scale": 1.0}
    return {**made, **({"num_frames": 5} if name == "wan" else {}), **more}


def cfg(name: str, scale: float) -> dict[str, float]:
    """Classifier-free guidance at ``scale``."""
    if name == "flux":
        return {"true_cfg_scale": scale, "guidance_scale": 3.0}
    return {"guidance_scale": scale}


def off(name: str) -> dict[str, float]:
    return {"guidance_scale": 0.0 if name == "z_image" else 1.0}


@contextlib.asynccontextmanager
async def held(engine: Any) -> AsyncIterator[threading.Event]:
    """The model thread, idle, waits for the event, so that requests begin together."""
    await until(lambda: not engine.part.loop._running)
    go = threading.Event()
    engine._executor.submit(go.wait)
    try:
        yield go
    finally:
        go.set()


class Staged:
    """The three stages of one tiny model."""

    def __init__(self, model: Path, *, pictures: bool = False, encoder_sees: bool = False) -> None:
        modalities = ["image"] if pictures else []
        self.encode = loaded_now(stage(model, "encode"))
        self.dit = loaded_now(dit_stage(model, input_modalities=modalities))
        self.decode = loaded_now(stage(model, "decode"))
        self._encoder_sees = encoder_sees

    async def condition(
        self, prompt: str, params: Mapping[str, Any], image: Pictures | None = None
    ) -> dict[str, torch.Tensor]:
        """What the encode stage hands on."""
        inputs = {"prompt": StageInput(prompt)}
        if self._encoder_sees and image is not None:
            tensors = image if isinstance(image, dict) else {"image": image}
            inputs["image"] = StageInput(tensors=tensors)
        out = await self.encode.run(StageRequest("test", params), inputs, NullEmit())
        return out.tensors["condition"]

    async def __call__(
        self,
        prompt: str,
        params: Mapping[str, Any],
        image: Pictures | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents, and uint8 pixels [H, W, 3] or [F, H, W, 3].

        ``image`` is a picture, or several by name.
        """
        names = ("negative_prompt", "guidance_scale", "true_cfg_scale", "max_sequence_length")
        encoding = {n: params[n] for n in names if n in params}
        condition = await self.condition(prompt, encoding, image)
        rest = {
            n: v for n, v in params.items() if n not in ("negative_prompt", "max_sequence_length")
        }
        more: dict[str, Any] = {} if image is None else {"image": image}
        more |= {} if mask is None else {"mask_image": mask}
        latents = latents_of(await send(self.dit, rest, condition=condition, **more))
        decoded = await ask(self.decode, {}, latents=latents)
        ((_, tensors),) = decoded.tensors.items()
        return latents, next(iter(tensors.values()))

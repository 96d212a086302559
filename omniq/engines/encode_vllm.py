"""The text encoder of a diffusion model on vLLM: prompts of all requests in one batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import torch

from omniq.config import EngineType, OmniStageConfig
from omniq.engines.ar_vllm import VLLMAREngine
from omniq.engines.base import Emit, Engine, NullEmit, StageInput, StageOutput, StageRequest
from omniq.engines.diffusion.encode import PARTS, Prompts
from omniq.engines.diffusion.inputs import CONDITION
from omniq.engines.diffusion.loading import (
    ModelIndex,
    load_pipeline,
    pipeline_folder,
    read_index,
)
from omniq.engines.families.base import NEGATIVE
from omniq.engines.faults import engine_faults
from omniq.engines.inputs import text_input
from omniq.errors import ConfigError, EngineError
from omniq.json_file import read_json

TEXT_ENCODER = "text_encoder"
#: Positions for which vLLM keeps room where the stage does not say; prompts have at most 1,059.
MAX_MODEL_LEN = 2048
#: omniq's classes for the language half of a model, by the model's own.
WITHOUT_VISION = {"Qwen2_5_VLForConditionalGeneration": "OmniqQwenVLTextEncoder"}


class VLLMPromptEncoder(Engine):
    """Encodes as the ``diffusers`` engine of encode stages does, with the language model on vLLM.

    For families whose prompt embeds are one layer's states of a causal language model, such as
    Qwen-Image (Qwen2.5-VL) and Z-Image (Qwen3); the template around the prompt and which tokens
    are dropped are the pipeline's. Prompts, also the two of a guided request, run in vLLM's
    continuous batch.

    Input ``prompt`` (text). Output ``condition``: ``prompt_embeds`` [tokens, dim], and
    ``negative_prompt_embeds`` when the request's guidance needs them.

    Engine arguments: vLLM's, as of an AR stage on it.
    """

    name = "vllm"
    _language_model: VLLMAREngine | None = None

    async def load(self) -> None:
        """Start vLLM with the model's text encoder.

        Raises:
            ConfigError: the model is no pipeline with an encoder that vLLM can run, or an engine
                argument is wrong.
        """
        index = await self.in_thread(self._read)
        self._language_model = VLLMAREngine(self._inner(index), self.device)
        await self._language_model.load()

    def _read(self) -> ModelIndex:
        stage = self.stage
        index = read_index(pipeline_folder(stage, PARTS))
        self._family = index.family
        if self._family.encoder_layer is None:
            raise ConfigError(
                f"stage {stage.stage_id!r}: engine 'vllm' cannot encode for {index.class_name}, "
                "whose condition is not one layer of a language model's states",
                hint="engine: diffusers runs the encoders of any pipeline",
            )
        self._pipeline = load_pipeline(stage, index, lambda n: n.startswith("tokenizer"), "cpu")
        self._prompts = Prompts(index, self._pipeline)
        return index

    def _inner(self, index: ModelIndex) -> OmniStageConfig:
        """The AR stage that encodes."""
        config = read_json(index.folder / TEXT_ENCODER / "config.json")
        text = config.get("text_config") or config
        replaced = WITHOUT_VISION.get(config["architectures"][0])
        args: dict[str, Any] = {
            "max_model_len": min(MAX_MODEL_LEN, text.get("max_position_embeddings", MAX_MODEL_LEN)),
            **({"hf_overrides": {"architectures": [replaced]}} if replaced else {}),
            **self.stage.engine_args,
            "text_encoder": True,
            "chat_template": False,
            "hidden_states": {"positions": "prompt", "layers": self._family.encoder_layer},
        }
        return OmniStageConfig(
            stage_id=self.stage.stage_id,
            engine_type=EngineType.AR,
            engine="vllm",
            model=str(index.folder),
            subfolder=TEXT_ENCODER,
            dtype=self.stage.dtype,
            # A guided request is two prompts.
            max_in_flight=2 * self.max_in_flight,
            engine_args=args,
        )

    async def warmup(self) -> None:
        """Encode a letter."""
        request = StageRequest("warmup", dict(self.stage.defaults))
        await self.run(request, {"prompt": StageInput("a")}, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Encode a request's prompts; cancelling aborts them in vLLM."""
        started = time.perf_counter()
        prompts = {"": text_input(inputs, "prompt")}
        if (negative := self._prompts.negative(request.params)) is not None:
            prompts[NEGATIVE] = negative
        most = self._prompts.most_tokens(request.params)
        tokens = await self.in_thread(self._tokens, list(prompts.values()), most)
        made = await asyncio.gather(*(self._states(request, *t) for t in tokens))
        condition = {
            f"{twin}prompt_embeds": states for twin, states in zip(prompts, made, strict=True)
        }
        return StageOutput(
            tensors={CONDITION: condition},
            metrics={
                "encode_seconds": time.perf_counter() - started,
                "prompt_tokens": sum(len(ids) for ids, _ in tokens),
            },
        )

    async def unload(self) -> None:
        """Stop vLLM."""
        if self._language_model is not None:
            await self._language_model.unload()
        await super().unload()

    def _tokens(self, prompts: list[str], most: int | None) -> list[tuple[list[int], slice]]:
        with engine_faults(f"stage {self.stage.stage_id!r}"):
            return [self._family.encoder_tokens(self._pipeline, p, most) for p in prompts]

    async def _states(self, request: StageRequest, ids: list[int], kept: slice) -> torch.Tensor:
        asked = StageRequest(
            request.request_id, {}, request.priority, request.deadline, stream=False
        )
        assert self._language_model is not None, "the engine is loaded"
        output = await self._language_model.run(asked, {"token_ids": StageInput(ids)}, NullEmit())
        states = output.tensors["prompt_embeds"]["prompt_embeds"][kept]
        if not torch.isfinite(states).all():
            raise EngineError("the encoded prompt holds NaN or infinity")
        return states.contiguous()

"""AR engine on vLLM: continuous batching, paged attention, streaming, hidden states."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from omniq.config import Modality
from omniq.engines.base import Emit, Engine, NullEmit, StageInput, StageOutput, StageRequest
from omniq.engines.inputs import text_input
from omniq.engines.loading import check_engine_args, loading, part_folder, tokenizer_folder
from omniq.engines.sampling import Sampling
from omniq.engines.text import PromptEncoder
from omniq.engines.vllm_hidden_states import TAP, RowCollector
from omniq.errors import ConfigError, EngineDead, EngineError

# What vLLM reads from the environment; set only where the operator has not.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # The worker has threads by now, and a forked child of a process with threads may hang.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# One thread a core-bound stage process; vLLM would bind and take every core otherwise.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
CPU_ARGS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    # vLLM 0.32 rewinds the generator of a seeded request after each prompt chunk, which CPU
    # generators refuse: one such request would end the engine process.
    "enable_chunked_prefill": False,
}
OWN_ARGS = frozenset({"chat_template"})
# Given by the stage's own fields.
RESERVED = frozenset({"model", "tokenizer", "dtype", "worker_extension_cls"})
WARMUP_TOKENS = 4
# vLLM's default of 5 s is all the time a supervisor gives the whole worker.
SHUTDOWN_SECONDS = 1.0


class VLLMAREngine(Engine):
    """Autoregressive generation by vLLM's ``AsyncLLM``, which batches the requests in flight.

    Inputs, outputs and the meaning of hidden-state rows are those of
    :class:`~omniq.engines.ar_transformers.TransformersAREngine`.

    Engine arguments: ``chat_template`` (default true), and every field of vLLM's
    ``AsyncEngineArgs`` under its own name.
    """

    name = "vllm"

    _engine: Any = None
    _collector: RowCollector | None = None
    _joined: tempfile.TemporaryDirectory[str] | None = None

    async def load(self) -> None:
        """Start vLLM's engine process and load the model there.

        Raises:
            ConfigError: folder, tokenizer or engine arguments are wrong, or hidden states are asked
                for together with speculative decoding.
        """
        self._want_hidden = Modality.HIDDEN_STATES in self.stage.output_modalities
        await self.in_thread(self._start)
        if self._want_hidden:
            self._collector = RowCollector(self._engine.output_processor)
            await self._engine.collective_rpc("install_tap")

    def _start(self) -> None:
        on_cpu = self.device == "cpu"
        for name, value in {**ENVIRONMENT, **(CPU_ENVIRONMENT if on_cpu else {})}.items():
            os.environ.setdefault(name, value)
        from vllm import AsyncEngineArgs  # noqa: PLC0415 - reads the environment, and is slow
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        known = {f.name for f in fields(AsyncEngineArgs)} - RESERVED
        given = check_engine_args(self.stage, known | OWN_ARGS)
        folder = part_folder(self.stage)
        chat_template = bool(given.pop("chat_template", True))
        with loading(self.stage, folder):
            tokenizer = tokenizer_folder(folder)
            self._encoder = PromptEncoder(tokenizer, chat_template=chat_template)
            tokenizer = self._with_config(tokenizer, folder)
            args = AsyncEngineArgs(**self._arguments(folder, tokenizer, given, on_cpu))
            config = args.create_engine_config()
        if self._want_hidden and config.speculative_config is not None:
            raise ConfigError(
                f"stage {self.stage.stage_id!r}: hidden_states and speculative_config exclude "
                "each other"
            )
        self._context = int(config.model_config.max_model_len)
        try:
            self._engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        except (RuntimeError, ValueError) as exc:
            raise EngineDead(f"stage {self.stage.stage_id!r}: vLLM did not start: {exc}") from exc

    def _with_config(self, tokenizer: Path, model: Path) -> Path:
        """``tokenizer``, or a folder of links to its files beside the model's ``config.json``.

        vLLM looks for the model type beside the tokenizer, and without it retries for seconds in
        each of its processes.
        """
        if (tokenizer / "config.json").is_file():
            return tokenizer
        self._joined = tempfile.TemporaryDirectory(prefix="omniq-tokenizer-")
        joined = Path(self._joined.name)
        for file in [*tokenizer.iterdir(), model / "config.json"]:
            (joined / file.name).symlink_to(file.resolve())
        return joined

    def _arguments(
        self, folder: Path, tokenizer: Path, given: dict[str, Any], on_cpu: bool
    ) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": str(folder),
            "tokenizer": str(tokenizer),
            "dtype": self.stage.dtype,
            "max_num_seqs": self.max_in_flight,
            **(CPU_ARGS if on_cpu else {}),
            **given,
        }
        if self._want_hidden:
            arguments["worker_extension_cls"] = TAP
        return arguments

    async def warmup(self) -> None:
        """Generate a few tokens."""
        request = StageRequest("warmup", {"max_tokens": WARMUP_TOKENS, "temperature": 0.0})
        await self.run(request, {"prompt": StageInput("a")}, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Generate; cancelling the task aborts the request in vLLM."""
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - loaded by now

        prompt = text_input(inputs, "prompt")
        # A retried job may arrive while vLLM still cleans up after its first run.
        request_id = f"{request.request_id}-{uuid.uuid4().hex[:8]}"
        try:
            return await self._generate(request_id, prompt, request.params, emit)
        except EngineDeadError as exc:
            raise EngineDead(f"stage {self.stage.stage_id!r}: vLLM has died: {exc}") from exc
        finally:
            if self._collector is not None:
                self._collector.take(request_id)

    async def unload(self) -> None:
        """Stop vLLM's processes, as far as they were started."""
        if self._engine is not None:
            # On the loop, although it blocks: it cancels vLLM's own task there, which would take
            # the end of the engine process for a crash if it ran in between.
            self._engine.shutdown(timeout=SHUTDOWN_SECONDS)
            self._engine = self._collector = None
            # AsyncLLM is in reference cycles, and its finaliser fails in an interpreter that ends.
            await asyncio.sleep(0)
            gc.collect()
        await super().unload()
        if self._joined is not None:
            self._joined.cleanup()

    async def _generate(
        self, request_id: str, prompt: str, params: Mapping[str, Any], emit: Emit
    ) -> StageOutput:
        ids = await self.in_thread(self._encoder.encode, prompt, self._context)
        sampling = Sampling.from_params(params)
        room = self._context - len(ids)
        budget = min(sampling.max_tokens or room, room)
        started = time.perf_counter()
        first_token = 0.0
        tokens: list[int] = []
        pieces: list[str] = []
        finish_reason = None
        try:
            async for output in self._engine.generate(
                {"type": "token", "prompt_token_ids": ids},
                _sampling_params(sampling, budget),
                request_id,
            ):
                delta = output.outputs[0]
                tokens += delta.token_ids
                first_token = first_token or time.perf_counter() - started
                finish_reason = delta.finish_reason
                if delta.text:
                    pieces.append(delta.text)
                    emit.delta("text", {"text": delta.text})
                emit.progress(len(tokens), budget)
        except ValueError as exc:
            raise EngineError(f"stage {self.stage.stage_id!r}: vLLM refused: {exc}") from exc
        if finish_reason not in ("stop", "length"):
            raise EngineError(f"stage {self.stage.stage_id!r}: vLLM ended with {finish_reason!r}")
        return StageOutput(
            values={"text": "".join(pieces), "finish_reason": finish_reason},
            tensors=self._tensors(request_id, tokens),
            metrics={
                "prompt_tokens": len(ids),
                "completion_tokens": len(tokens),
                "first_token_seconds": first_token,
                "generation_seconds": time.perf_counter() - started,
            },
        )

    def _tensors(self, request_id: str, tokens: list[int]) -> dict[str, dict[str, torch.Tensor]]:
        tensors = {"token_ids": {"token_ids": torch.tensor(tokens, dtype=torch.int64)}}
        if self._collector is not None:
            rows = self._collector.take(request_id)
            if len(rows) < len(tokens):
                raise EngineError(
                    f"stage {self.stage.stage_id!r}: vLLM gave {len(rows)} hidden states for "
                    f"{len(tokens)} tokens"
                )
            tensors["hidden_states"] = {"hidden_states": torch.cat(rows[: len(tokens)])}
        return tensors


def _sampling_params(sampling: Sampling, budget: int) -> Any:
    from vllm import SamplingParams  # noqa: PLC0415 - loaded by now
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop),
        seed=sampling.seed,
        max_tokens=budget,
        output_kind=RequestOutputKind.DELTA,
    )

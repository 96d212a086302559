"""AR engine on vLLM: continuous batching, paged attention, streaming, hidden states."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from omniq import vllm_orphans
from omniq.engines.base import Emit, Engine, NullEmit, StageInput, StageOutput, StageRequest
from omniq.engines.loading import loading, part_folder, tokenizer_folder
from omniq.engines.text import PromptEncoder
from omniq.engines.vllm import arguments, contract, scheduler
from omniq.engines.vllm.chunks import Chunks
from omniq.engines.vllm.hidden_states import StateCollector, States
from omniq.engines.vllm.inproc import in_process
from omniq.engines.vllm.outputs import Generation
from omniq.engines.vllm.parsers import Parsers
from omniq.engines.vllm.requests import ModelLimits, Prompt, PromptReader
from omniq.engines.vllm.sampling import pooling_params, refusal, refused, sampling_params
from omniq.errors import ConfigError, EngineDead, EngineError, InvalidRequest

WARMUP_TOKENS = 4
#: Ends of an answer that is as it should be; vLLM's others are ``abort`` and ``error``.
FINISHED = ("stop", "length", "repetition")
# vLLM's default of 5 s is all the time a supervisor gives the whole worker.
SHUTDOWN_SECONDS = 1.0
#: omniq's most urgent priority; vLLM's is 0 and counts up.
MOST_URGENT = 9
#: Requests ready to join at once, for each that vLLM runs, where the stage sets no window itself.
HEADROOM = 0.125


class VLLMAREngine(Engine):
    """Autoregressive generation by vLLM's ``AsyncLLM``, which batches the requests in flight.

    Inputs: exactly one of ``prompt`` (text), ``messages`` (a conversation, by the model's chat
    template), ``token_ids`` (list, or int tensor [n]) and ``prompt_embeds`` (float [n, hidden]);
    with a multimodal model also ``image``/``images`` (uint8 [H, W, 3]) and ``audio`` (float
    [samples]), or media within ``messages``.

    Outputs: values ``text``, ``finish_reason`` (``stop``, ``length``, ``repetition``), ``usage``,
    and where asked for ``logprobs``, ``prompt_logprobs``, ``reasoning``, ``tool_calls``,
    ``stop_reason`` and, with ``n`` > 1, ``choices``;
    tensors ``token_ids`` (int64 [n]), ``hidden_states`` and
    ``prompt_hidden_states`` ([positions, hidden] or [positions, layers, hidden]). Row i of
    ``hidden_states`` belongs to the position whose logits gave token i. With ``n`` > 1 a tensor
    output holds one tensor an answer, named by its number. A stage of a pooling model
    (``runner: pooling``) outputs ``pooling`` (float [dim] or [tokens, dim]); one with
    ``text_encoder: true`` outputs ``prompt_embeds``.

    Engine arguments: those of :class:`~omniq.engines.vllm.arguments.OwnArgs`, and every field of
    vLLM's ``AsyncEngineArgs`` under its own name.
    """

    name = "vllm"

    _engine: Any = None
    _collector: StateCollector | None = None
    _joined: tempfile.TemporaryDirectory[str] | None = None

    @property
    def max_in_flight(self) -> int:
        """The stage's window; if only vLLM's ``max_num_seqs`` is set, that and some headroom."""
        running = self.stage.engine_args.get("max_num_seqs")
        if "max_in_flight" in self.stage.model_fields_set or not isinstance(running, int):
            return self.stage.max_in_flight
        return running + max(1, int(running * HEADROOM))

    async def load(self) -> None:
        """Start vLLM's engine and load the model there.

        Raises:
            ConfigError: this vLLM is not supported; the folder, the tokenizer or an engine argument
                is wrong; or hidden states are asked for together with speculative decoding.
        """
        await self.in_thread(self._start)
        if self._pooling:
            tasks = [t for t in await self._engine.get_supported_tasks() if t in _POOLING_TASKS]
            self._task = self._pooling_task(tasks)
        elif self._options is not None:
            self._collector = StateCollector(self._engine.output_processor)

    def _start(self) -> None:
        contract.checked(on_cpu=self.device == "cpu")
        self._own, given = self._arguments()
        with in_process() if self._own.in_process else nullcontext():
            self._start_with(given)

    def _arguments(self) -> tuple[arguments.OwnArgs, dict[str, Any]]:
        """omniq's own engine arguments, and vLLM's."""
        return arguments.read(self.stage)

    def _start_with(self, given: dict[str, Any]) -> None:
        v = contract.names()
        self._options = arguments.state_options(self.stage, self._own)
        folder = part_folder(self.stage)
        with loading(self.stage, folder):
            tokenizer = tokenizer_folder(folder)
            pooling = given.get("runner") == "pooling"
            chat = self._own.chat_template and not pooling
            encoder = PromptEncoder(
                tokenizer,
                chat_template=chat,
                template=self._own.custom_chat_template,
                content_format=self._own.chat_template_content_format,
                variables=self._own.default_chat_template_kwargs,
            )
            complete = arguments.complete(
                self.stage,
                self._own,
                given,
                folder=folder,
                tokenizer=self._with_config(tokenizer, folder),
                max_in_flight=self.max_in_flight,
                on_cpu=self.device == "cpu",
            )
            try:
                config = v.AsyncEngineArgs(**complete).create_engine_config()
            except RuntimeError as exc:  # as a reasoning parser that misses its tokens
                raise ConfigError(
                    f"stage {self.stage.stage_id!r}: vLLM refuses the engine arguments: {exc}"
                ) from exc
        self._check(config)
        if self._options is not None:
            scheduler.use(config)
        model = config.model_config
        self._pooling = model.runner_type == "pooling"
        self._defaults = {} if self._pooling else dict(model.get_diff_sampling_param())
        self._parsers = Parsers(
            encoder.tokenizer,
            given.get("reasoning_parser"),
            self._own.tool_call_parser,
            model_config=model,
            strict=self._own.tool_strict_level,
            variables=self._own.default_chat_template_kwargs,
        )
        vllm_orphans.claim()
        try:
            self._engine = v.AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        except (RuntimeError, ValueError) as exc:
            raise EngineDead(f"stage {self.stage.stage_id!r}: vLLM did not start: {exc}") from exc
        self._limits = ModelLimits(
            context=int(model.max_model_len),
            vocabulary=int(model.get_vocab_size()),
            hidden=int(model.get_hidden_size()),
            dtype=model.dtype,
            embeds=bool(model.enable_prompt_embeds),
            media=self._media(),
        )
        self._reader = PromptReader(
            encoder,
            self._limits,
            lambda kind, number: _placeholder(model, kind, number),
            hide_unused_tools=self._own.exclude_tools_when_tool_choice_none,
        )
        self._loras = {
            name: v.LoRARequest(name, number, str(path))
            for number, (name, path) in enumerate(self._own.lora_modules.items(), 1)
        }

    def _media(self) -> dict[str, int]:
        """How many items of each kind of media the model takes in a prompt."""
        processor = self._engine.renderer.mm_processor
        return {} if processor is None else dict(processor.info.allowed_mm_limits)

    def _check(self, config: Any) -> None:
        where = f"stage {self.stage.stage_id!r}"
        if self._options is None:
            return
        if config.speculative_config is not None:
            raise ConfigError(f"{where}: hidden_states and speculative_config exclude each other")
        try:
            self._options.resolved(int(config.model_config.hf_text_config.num_hidden_layers))
        except ValueError as exc:
            raise ConfigError(f"{where}: engine_args.{exc}") from exc

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

    def _pooling_task(self, tasks: list[str]) -> str:
        wanted = self._own.pooling_task
        if not tasks or (wanted is not None and wanted not in tasks):
            raise ConfigError(
                f"stage {self.stage.stage_id!r}: engine_args.pooling_task: {wanted!r} is not "
                f"allowed for this model; allowed: {', '.join(tasks) or 'none'}"
            )
        return wanted or next(t for t in _POOLING_TASKS if t in tasks)

    async def warmup(self) -> None:
        """Generate a few tokens."""
        params = {} if self._pooling else {"max_tokens": WARMUP_TOKENS, "temperature": 0.0}
        await self.run(StageRequest("warmup", params), {"token_ids": StageInput([1])}, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Generate; cancelling the task aborts the request in vLLM."""
        lora = self._lora(request.params)
        prompt = await self._prompt(inputs, request.params)
        # A retried job may arrive while vLLM still cleans up after its first run.
        options = {
            "request_id": f"{request.request_id}-{uuid.uuid4().hex[:8]}",
            "lora_request": lora,
            "priority": MOST_URGENT - request.priority,
        }
        try:
            if self._pooling:
                return await self._pool(prompt, request.params, options)
            return await self._generate(prompt, request, emit, options)
        finally:
            if self._collector is not None:
                self._collector.take(options["request_id"])

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

    # -- one request -------------------------------------------------------------------------

    async def _prompt(self, inputs: Mapping[str, StageInput], params: Mapping[str, Any]) -> Prompt:
        if self._reader.is_quick(inputs):
            return self._reader.read(inputs, params)
        return await self.in_thread(self._reader.read, inputs, params)

    def _lora(self, params: Mapping[str, Any]) -> Any:
        name = params.get("lora")
        if name is None:
            return None
        if name not in self._loras:
            allowed = ", ".join(self._loras) or "none"
            raise refused("lora", f"no adapter {name!r}; allowed: {allowed}")
        return self._loras[name]

    async def _generate(
        self, prompt: Prompt, request: StageRequest, emit: Emit, options: Mapping[str, Any]
    ) -> StageOutput:
        params, stream = request.params, request.stream
        if self._own.text_encoder:
            emit = NullEmit()
        parser = self._parsers.of_request(params)
        # Chunks for the stages behind are made of tokens as they come.
        each = stream or bool(self._own.stream_tokens)
        sampling = self._sampling(prompt, params, parser, stream=each)
        generation = Generation(sampling.max_tokens, sampling.n, emit, parser, stream=stream)
        chunks = self._chunks(options["request_id"], generation, emit)
        if parser is not None:
            options = {**options, **parser.reasoning(prompt.ids)}
        with self._refusals(prompt, generation):
            try:
                async for output in self._engine.generate(prompt.engine_input, sampling, **options):
                    generation.add(output)
                    if self._own.stream_tokens:
                        await chunks.send(self._own.stream_tokens)
            finally:
                generation.quiet()
        for answer in generation.sequences:
            if answer.finish_reason not in FINISHED:
                if sampling.structured_outputs and not answer.tokens:
                    forced = parser is not None and parser.forces_a_call
                    name = "tools" if forced else "structured_outputs"
                    raise refused(name, "the grammar cannot be compiled")
                raise EngineError(
                    f"stage {self.stage.stage_id!r}: vLLM ended with {answer.finish_reason!r}"
                )
        generation.speak(last=True)
        if self._own.stream_tokens:
            await chunks.send(1, last=True)
        states = None
        if self._collector is not None:
            states = self._collector.take(options["request_id"])
        made = self._output(generation, states)
        return _embeds(made) if self._own.text_encoder else made

    def _chunks(self, request_id: str, generation: Generation, emit: Emit) -> Chunks:
        """What hands the answer on while it grows."""
        return Chunks(self._collector, self._options, request_id, generation, emit)

    def _output(self, generation: Generation, states: Mapping[int, States] | None) -> StageOutput:
        return generation.output(states, self._options)

    def _sampling(
        self, prompt: Prompt, params: Mapping[str, Any], parser: Any, *, stream: bool
    ) -> Any:
        # A prompt with media gets its length in vLLM, which then limits max_tokens itself.
        room = self._limits.context - (prompt.tokens or 1)
        more: dict[str, Any] = {}
        if self._options is not None and self._options.prompt:
            more["skip_reading_prefix_cache"] = True  # states of cached positions are not computed
        if parser is not None and parser.special_tokens:
            more["skip_special_tokens"] = False
        if parser is not None and parser.structured_outputs is not None:
            more["structured_outputs"] = parser.structured_outputs
        if self._own.text_encoder:
            params, room = {"temperature": 0.0}, 1
        return sampling_params(
            {k: x for k, x in params.items() if k not in more},
            self._defaults,
            room,
            stream=stream,
            **more,
        )

    async def _pool(
        self, prompt: Prompt, params: Mapping[str, Any], options: Mapping[str, Any]
    ) -> StageOutput:
        pooling = pooling_params(params, self._task)
        found = None
        with self._refusals(prompt, None):
            async for output in self._engine.encode(prompt.engine_input, pooling, **options):
                found = output
        assert found is not None, "vLLM ends a request with its output"
        data = found.outputs.data
        vector = data if isinstance(data, torch.Tensor) else torch.as_tensor(data)
        count = len(found.prompt_token_ids)
        return StageOutput(
            values={"usage": {"prompt_tokens": count, "total_tokens": count}},
            tensors={"pooling": {"pooling": vector.contiguous()}},
            metrics={"prompt_tokens": count},
        )

    @contextmanager
    def _refusals(self, prompt: Prompt, generation: Generation | None) -> Iterator[None]:
        """vLLM's errors as omniq's: what it says before the first output is about the request."""
        v = contract.names()
        where = f"stage {self.stage.stage_id!r}"
        try:
            yield
        except v.EngineDeadError as exc:
            raise EngineDead(f"{where}: vLLM has died: {exc}") from exc
        except (v.VLLMValidationError, ValueError, v.EngineGenerateError) as exc:
            if isinstance(exc, InvalidRequest):
                raise
            cause: Any = exc.__cause__ if isinstance(exc, v.EngineGenerateError) else exc
            early = generation is None or not generation.tokens
            if early and isinstance(cause, v.VLLMValidationError | ValueError):
                raise refusal(cause, prompt=prompt.name) from exc
            raise EngineError(f"{where}: vLLM failed: {cause or exc}") from exc


def _placeholder(model_config: Any, kind: str, number: int) -> str | None:
    """How the model's prompt has media; the class is imported only where a template needs it."""
    model: Any = contract.names().get_model_cls(model_config)
    word: str | None = model.get_placeholder_str(kind, number)
    return word


_POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")


def _embeds(output: StageOutput) -> StageOutput:
    """The output of a text encoder: its prompt's states, to condition a DiT with."""
    embeds = output.tensors["prompt_hidden_states"]["prompt_hidden_states"]
    usage = {**output.values["usage"], "completion_tokens": 0}
    return StageOutput(
        values={"usage": {**usage, "total_tokens": usage["prompt_tokens"]}},
        tensors={"prompt_embeds": {"prompt_embeds": embeds}},
        metrics={**output.metrics, "completion_tokens": 0},
    )

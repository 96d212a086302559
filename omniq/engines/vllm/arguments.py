"""A stage's ``engine_args``: omniq's own, and vLLM's by vLLM's names, read by vLLM's own parser."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from omniq.config import Modality, OmniStageConfig
from omniq.engines.loading import check_engine_args
from omniq.engines.vllm import contract
from omniq.engines.vllm.hidden_states import CONFIG_KEY, StateOptions
from omniq.engines.vllm.model_runner import WORKER
from omniq.errors import ConfigError

#: On the CPU as long as the stage does not say otherwise.
CPU_ARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
#: Given by the stage's own fields, or by omniq.
RESERVED = frozenset({"model", "tokenizer", "dtype", "worker_cls", "worker_extension_cls"})


class OwnArgs(BaseModel):
    """Engine arguments that are omniq's, not vLLM's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chat_template: bool = True
    """Whether ``prompt`` is a user turn in the model's chat template."""
    custom_chat_template: str | None = None
    """vLLM's ``--chat-template``: a file, or the template itself, instead of the model's."""
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """Whether the template reads a message's content as text or as a list of parts."""
    default_chat_template_kwargs: dict[str, Any] = {}
    """Variables of the template, as far as a request does not set them."""
    exclude_tools_when_tool_choice_none: bool = False
    """Whether the template sees no tools where ``tool_choice`` is ``none``."""
    hidden_states: StateOptions | None = None
    """Which ones; by default the last layer's of generated positions."""
    text_encoder: bool = False
    """Only encode: ``prompt_embeds`` [tokens, hidden] of the prompt, no text."""
    lora_modules: dict[str, Path] = {}
    """Adapters that requests may name."""
    tool_call_parser: str | None = None
    """vLLM's ``--tool-call-parser``."""
    tool_parser_plugin: str | None = None
    """Python file that registers more tool parsers."""
    tool_strict_level: str | None = None
    """vLLM's ``--tool-strict-level``: how closely grammars hold calls to their schemas."""
    in_process: bool = False
    """vLLM's engine core in a thread of the worker instead of a process."""
    stream_tokens: int | None = None
    """Chunks of ``hidden_states`` and ``token_ids`` every so many tokens, for window edges."""
    pooling_task: str | None = None
    """Of a pooling model; its first by default."""


def read(stage: OmniStageConfig) -> tuple[OwnArgs, dict[str, Any]]:
    """omniq's own arguments, and vLLM's.

    Raises:
        ConfigError: an argument is unknown or of a wrong type; the message says what is allowed.
    """
    v = contract.names()
    known = {f.name for f in fields(v.AsyncEngineArgs)} - RESERVED
    given = check_engine_args(stage, known | set(OwnArgs.model_fields))
    own = {k: given.pop(k) for k in list(given) if k in OwnArgs.model_fields}
    try:
        own_args = OwnArgs.model_validate(own)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        where = ".".join(map(str, error["loc"]))
        raise ConfigError(f"stage {stage.stage_id!r}: engine_args.{where}: {error['msg']}") from exc
    for name, path in own_args.lora_modules.items():
        if not (path / "adapter_config.json").is_file():
            raise ConfigError(
                f"stage {stage.stage_id!r}: engine_args.lora_modules.{name}: "
                f"no adapter_config.json in {path}"
            )
    vllms = {k: _parsed(stage, k, x) for k, x in given.items()}
    _import_plugins(stage, own_args.tool_parser_plugin, vllms.get("reasoning_parser_plugin"))
    return own_args, vllms


def _import_plugins(stage: OmniStageConfig, tools: str | None, reasoning: str | None) -> None:
    """Register the parsers that Python files bring.

    Raises:
        ConfigError: there is no such file.
    """
    v = contract.names()
    for argument, path, register in (
        ("tool_parser_plugin", tools, v.ToolParserManager.import_tool_parser),
        ("reasoning_parser_plugin", reasoning, v.ReasoningParserManager.import_reasoning_parser),
    ):
        if not path:
            continue
        if not Path(path).is_file():
            raise ConfigError(f"stage {stage.stage_id!r}: engine_args.{argument}: no file {path}")
        register(path)


def complete(
    stage: OmniStageConfig,
    own: OwnArgs,
    given: Mapping[str, Any],
    *,
    folder: Path,
    tokenizer: Path,
    max_in_flight: int,
    on_cpu: bool,
) -> dict[str, Any]:
    """All arguments for vLLM's ``AsyncEngineArgs``."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(tokenizer),
        "dtype": stage.dtype,
        "max_num_seqs": max_in_flight,
        "scheduling_policy": "priority",
        **(CPU_ARGS if on_cpu else {}),
        **given,
    }
    if Modality.HIDDEN_STATES in stage.input_modalities:
        arguments.setdefault("enable_prompt_embeds", True)
    if own.lora_modules:
        arguments.setdefault("enable_lora", True)
        _leave_a_place_free(stage, arguments, len(own.lora_modules), on_cpu=on_cpu)
    options = state_options(stage, own)
    if options is not None:
        more = dict(arguments.get("additional_config") or {})
        arguments["additional_config"] = {**more, CONFIG_KEY: options.model_dump(mode="json")}
    if arguments.get("runner") != "pooling" and (options is not None or on_cpu):
        arguments["worker_cls"] = WORKER
    return arguments


def _leave_a_place_free(
    stage: OmniStageConfig, arguments: dict[str, Any], adapters: int, *, on_cpu: bool
) -> None:
    """Have one more place for adapters than there are, on the CPU.

    vLLM 0.32's CPU kernels take the last place for requests without an adapter (index -1) that
    share a step with others; it must stay empty, which is all zeros.

    Raises:
        ConfigError: the stage's own ``max_loras`` leaves none.
    """
    places = arguments.setdefault("max_loras", adapters + 1 if on_cpu else min(adapters, 8))
    if on_cpu and places <= adapters:
        raise ConfigError(
            f"stage {stage.stage_id!r}: engine_args.max_loras must be at least {adapters + 1} for "
            f"{adapters} lora_modules on the CPU, is {places}"
        )


def state_options(stage: OmniStageConfig, own: OwnArgs) -> StateOptions | None:
    """Which hidden states the stage hands out; None if none."""
    if own.text_encoder:
        asked = own.hidden_states or StateOptions(positions="prompt")
        return asked.model_copy(update={"positions": "prompt"})
    if Modality.HIDDEN_STATES in stage.output_modalities or own.hidden_states is not None:
        return own.hidden_states or StateOptions()
    return None


def _parsed(stage: OmniStageConfig, name: str, value: Any) -> Any:
    """``value`` as vLLM's command line would read it: an object's fields as JSON there.

    Raises:
        ConfigError: vLLM's parser refuses it.
    """
    if value is None or isinstance(value, list):
        return value
    action = _actions().get(name)
    if action is None:
        return value
    try:
        if isinstance(action, argparse.BooleanOptionalAction | argparse._StoreTrueAction):
            if not isinstance(value, bool):
                raise ValueError("must be true or false")
            return value
        made = value
        if action.type is not None and not isinstance(value, bool):
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            made = action.type(text)  # type: ignore[operator]
        elif isinstance(value, bool) and action.type in (int, float):
            raise ValueError("must be a number")
    except (ValueError, TypeError, argparse.ArgumentTypeError) as exc:
        raise ConfigError(
            f"stage {stage.stage_id!r}: engine_args.{name}: vLLM refuses {value!r}: {exc}"
        ) from exc
    if action.choices is not None and made not in action.choices:
        allowed = ", ".join(map(str, action.choices))
        raise ConfigError(
            f"stage {stage.stage_id!r}: engine_args.{name}: {value!r} is not allowed; "
            f"allowed: {allowed}"
        )
    return made


def _actions() -> dict[str, argparse.Action]:
    v = contract.names()
    parser = v.AsyncEngineArgs.add_cli_args(v.FlexibleArgumentParser())
    return {action.dest: action for action in parser._actions}

"""The flags of ``omniq serve``: vLLM's own where it is installed, else those transformers can do.

vLLM's parser reads the command line, so every flag means what it means to ``vllm serve``, and its
errors are vLLM's. What was given is then sorted: engine arguments go to the AR stage by vLLM's
names, what concerns the HTTP server is omniq's, and what omniq's server has no equivalent for is
refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from omniq.config.loader import read_yaml
from omniq.engines.registry import vllm_installed
from omniq.engines.text import is_template
from omniq.engines.vllm import contract
from omniq.errors import ConfigError
from omniq.serve.overrides import read_overrides
from omniq.settings import can_be_sent

ENGINES = ("auto", "vllm", "transformers")
ENCODERS = ("diffusers", "vllm")
KNOWN_PORTS = range(1, 65536)
USAGE = "omniq serve MODEL [options]"

#: Options of vLLM's HTTP server that the AR stage takes as engine arguments, by their names there.
STAGE_OPTIONS = {
    "chat_template": "custom_chat_template",
    **{
        name: name
        for name in (
            *("chat_template_content_format", "default_chat_template_kwargs"),
            *("exclude_tools_when_tool_choice_none", "lora_modules", "tool_call_parser"),
            *("tool_parser_plugin", "tool_strict_level"),
        )
    },
}
#: Engine arguments that name a file: seen from the worker.
FILES = ("custom_chat_template", "tool_parser_plugin", "reasoning_parser_plugin")
#: Options of vLLM's HTTP server that are settings of omniq's API.
API_OPTIONS = {
    "response_role": "openai_role",
    "return_tokens_as_token_ids": "openai_tokens_as_ids",
    "enable_force_include_usage": "openai_always_usage",
    "sse_keep_alive_interval": "openai_keep_alive",
}
#: Options of vLLM's HTTP server that change nothing a client sees: accepted, without effect.
WITHOUT_EFFECT = frozenset(
    {
        "disable_uvicorn_access_log",
        "disable_access_log_for_endpoints",
        "enable_log_deltas",
        "enable_log_outputs",
        "enable_log_requests",
        "log_error_stack",
        "max_log_len",
        "uvicorn_log_level",
    }
)
OURS = frozenset({"host", "port", "api_key", "served_model_name"})
#: Of vLLM's parser, not its server: where the model is named, and where more flags are.
PARSERS_OWN = frozenset({"model", "model_tag", "config", "omni"})
#: omniq's own flags.
OMNIQS = frozenset({"engine", "encoder", "gpus", "stage_overrides"})
#: What is so anyway: calls are read where there is a parser, and usage tells cached tokens.
IMPLIED = frozenset({"enable_auto_tool_choice", "enable_prompt_tokens_details"})
_PROXY = "let a reverse proxy in front of the API do it"
_ROUTES = "omniq's API has no such routes"
_REPLICAS = "run more workers or API processes: docs/operating.md"
_DOCS = "the API's documentation is always there, at /docs, and needs no network"
_FINGERPRINT = "answers have no system_fingerprint"
#: Why the others are refused.
REFUSED = {
    **dict.fromkeys(("allow_credentials", "allowed_headers", "allowed_methods"), _PROXY),
    **dict.fromkeys(("allowed_origins", "root_path", "uds", "enable_ssl_refresh"), _PROXY),
    **dict.fromkeys(("ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_ciphers"), _PROXY),
    **dict.fromkeys(("ssl_keyfile", "h11_max_header_count"), _PROXY),
    "h11_max_incomplete_event_size": "OMNIQ_MAX_BODY_BYTES bounds what the API reads",
    "middleware": "omniq's API loads no foreign code; " + _PROXY,
    "enable_request_id_headers": "every answer's `id` names its job",
    **dict.fromkeys(("disable_fastapi_docs", "enable_offline_docs"), _DOCS),
    **dict.fromkeys(("fingerprint_mode", "fingerprint_value"), _FINGERPRINT),
    **dict.fromkeys(("api_server_count", "headless", "data_parallel_supervisor_port"), _REPLICAS),
    **dict.fromkeys(
        (
            *("dp_supervisor_probe_failure_threshold", "dp_supervisor_probe_interval_s"),
            "dp_supervisor_probe_timeout_s",
        ),
        _REPLICAS,
    ),
    **dict.fromkeys(
        (
            *("anthropic_disabled_thinking_effort", "cohere_format", "cohere_is_reasoning_model"),
            *(
                "enable_flash_late_interaction",
                "enable_scale_out",
                "enable_tokenizer_info_endpoint",
            ),
            *("enable_server_load_tracking", "grpc", "grpc_port", "tokens_only", "tool_server"),
        ),
        _ROUTES,
    ),
    "enable_per_request_metrics": "a job's metrics are in its record, GET /v1/jobs/ID",
    "trust_request_chat_template": "requests cannot bring a chat template; see --chat-template",
    "trust_request_mm_kwargs": "requests cannot set the processing of media; see "
    "--mm-processor-kwargs",
}


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """What a command line asks for.

    ``engine_args`` holds only what was given, by vLLM's names, as JSON values.
    """

    model: str
    engine: str = "auto"
    host: str | None = None
    port: int | None = None
    api_keys: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()
    engine_args: dict[str, Any] = field(default_factory=dict)
    encoder: str = "diffusers"
    """Engine of the stage that encodes prompts for a DiT."""
    gpus: int | None = None
    """GPUs to spread the stages over; None: those that are visible here."""
    stage_overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Fields of stages, by stage id."""
    settings: dict[str, Any] = field(default_factory=dict)
    """omniq's settings by their names."""
    without_effect: tuple[str, ...] = ()
    """Given flags that change nothing here, as they are typed."""


def parse(args: Sequence[str]) -> ServeFlags:
    """Read the arguments behind ``serve``.

    Raises:
        ConfigError: no model, or a flag that omniq cannot honour; the message names it.
        SystemExit: 2 with the parser's own message on stderr for a flag it does not know or a wrong
            value, 0 after ``--help=...``.
    """
    parsers, engine_names = _vllm_parsers() if vllm_installed() else _own_parsers()
    parsers.serve.add_argument("--omni", action="store_true", help=argparse.SUPPRESS)
    parsers.serve.add_argument("--engine", choices=ENGINES, help="Engine of the AR stage.")
    parsers.serve.add_argument("--encoder", choices=ENCODERS, help="Engine that encodes prompts.")
    parsers.serve.add_argument("--gpus", type=int, help="GPUs to spread the stages over.")
    parsers.serve.add_argument("--stage-overrides", help="YAML file, or the mapping itself.")
    if isinstance(parsers.top, _OwnParser):  # which is the one that meets unknown flags
        parsers.top.usage = parsers.serve.format_usage().removeprefix("usage: ").rstrip()
    given = _given(parsers, args)
    model = given.get("model_tag") or given.get("model")
    if not model:
        raise ConfigError(
            "omniq serve: no MODEL given", hint="`omniq serve --help` says what it is"
        )
    port = given.get("port")
    if port is not None and port not in KNOWN_PORTS:
        raise ConfigError(f"--port: must be 1 to 65535; got {port}")
    if not all(map(can_be_sent, given.get("api_key") or ())):
        raise ConfigError("--api-key: must not be empty, and have no spaces around it")
    if given.get("gpus", 0) < 0:
        raise ConfigError(f"--gpus: must be 0 or more; got {given['gpus']}")
    accepted = (STAGE_OPTIONS, API_OPTIONS, WITHOUT_EFFECT, OURS, OMNIQS, PARSERS_OWN, IMPLIED)
    if refused := sorted(set(given).difference(engine_names, *accepted)):
        why = "; ".join(
            f"{_flag(name)}: {REFUSED.get(name, 'omniq has no such option')}" for name in refused
        )
        raise ConfigError(why, hint="vLLM's own server has it: run `vllm serve` without --omni")
    return ServeFlags(
        model=model,
        engine=given.get("engine", "auto"),
        host=given.get("host"),
        port=port,
        api_keys=tuple(given.get("api_key") or ()),
        served_names=tuple(_list(given.get("served_model_name"))),
        engine_args={
            STAGE_OPTIONS.get(name, name): _json(STAGE_OPTIONS.get(name, name), value)
            for name, value in given.items()
            if (name in engine_names or name in STAGE_OPTIONS)
            and name not in OURS | OMNIQS | PARSERS_OWN
            and name not in WITHOUT_EFFECT
        },
        encoder=given.get("encoder", "diffusers"),
        gpus=given.get("gpus"),
        stage_overrides=read_overrides(given["stage_overrides"])
        if "stage_overrides" in given
        else {},
        settings={API_OPTIONS[name]: value for name, value in given.items() if name in API_OPTIONS},
        without_effect=tuple(_flag(n) for n in sorted(WITHOUT_EFFECT & set(given))),
    )


class _Parsers(NamedTuple):
    """The parser of the whole command line, and the one of its subcommand ``serve``."""

    top: argparse.ArgumentParser
    serve: argparse.ArgumentParser


def _vllm_parsers() -> tuple[_Parsers, frozenset[str]]:
    """vLLM's parser of ``vllm serve``, and which of its arguments are the engine's."""
    v = contract.names()
    # A subcommand, because vLLM's parser treats --config and --model behind the word "serve" only.
    top = v.FlexibleArgumentParser(prog="omniq", usage=USAGE)
    serve = top.add_subparsers(dest="subparser").add_parser("serve", usage=USAGE)
    v.make_arg_parser(serve)
    return _Parsers(top, serve), frozenset(f.name for f in fields(v.AsyncEngineArgs))


class _OwnParser(argparse.ArgumentParser):
    """Says why most of vLLM's flags are unknown."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, end with status 2."""
        super().error(
            f"{message}\nvLLM is not installed here, so only the flags above exist; "
            "the extra omniq[vllm] brings all of `vllm serve`"
        )


def _own_parsers() -> tuple[_Parsers, frozenset[str]]:
    """Without vLLM: the flags of ``vllm serve`` that the transformers engine can honour."""
    top = _OwnParser(prog="omniq")
    serve = top.add_subparsers(dest="subparser").add_parser("serve", allow_abbrev=False)
    serve.add_argument("model_tag", metavar="MODEL", nargs="?")
    serve.add_argument("--host", help="Address the API listens on.")
    serve.add_argument("--port", type=int, help="Port the API listens on.")
    serve.add_argument("--api-key", nargs="*", help="Keys that clients must send one of.")
    serve.add_argument("--served-model-name", nargs="*", help="Names clients may use.")
    serve.add_argument("--dtype", choices=("auto", "bfloat16", "float16", "float32"))
    serve.add_argument("--max-model-len", type=int, help="Tokens of prompt and answer.")
    serve.add_argument("--max-num-seqs", type=int, help="Requests in one forward pass.")
    serve.add_argument("--generation-config", help="auto, vllm, or a folder.")
    serve.add_argument("--chat-template", help="A file, or the template itself.")
    serve.add_argument("--chat-template-content-format", choices=("auto", "string", "openai"))
    serve.add_argument("--default-chat-template-kwargs", type=json.loads, metavar="JSON")
    serve.add_argument("--response-role", help="Role of answers.")
    serve.add_argument("--enable-force-include-usage", action="store_true")
    serve.add_argument("--return-tokens-as-token-ids", action="store_true")
    serve.add_argument("--sse-keep-alive-interval", type=int, help="Seconds.")
    engine = frozenset({"dtype", "max_model_len", "max_num_seqs", "generation_config"})
    return _Parsers(top, serve), engine


def _given(parsers: _Parsers, args: Sequence[str]) -> dict[str, Any]:
    """Only what the command line (or the file named by ``--config``) says, by destination.

    Values that the parser would make objects of (``--compilation-config``) stay what was written:
    they travel as JSON, and the engine makes the objects.

    Raises:
        ConfigError: vLLM's parser cannot read the file that ``--config`` names.
    """
    raw: dict[str, Any] = {}
    for action in parsers.serve._actions:
        if action.dest in ("help", argparse.SUPPRESS):
            continue
        action.default = argparse.SUPPRESS
        if action.type is not None and action.nargs not in ("+", "*"):
            action.type = _noting(action.dest, action.type, raw)
    try:
        found = vars(parsers.top.parse_args(["serve", *args]))
    except (ValueError, OSError) as exc:
        raise ConfigError(f"omniq serve: {exc}") from exc
    given = {n: v for n, v in found.items() if n != "subparser"}
    return {
        name: read_yaml(raw[name], _flag(name)) if name in raw and not _plain(value) else value
        for name, value in given.items()
    }


def _noting(dest: str, convert: Any, raw: dict[str, Any]) -> Callable[[str], Any]:
    """``convert``, which also notes the text of a single value."""

    def noting(text: str) -> Any:
        raw[dest] = text
        return convert(text)

    # argparse names the type in its errors.
    noting.__name__ = getattr(convert, "__name__", repr(convert))
    return noting


def _json(name: str, value: Any) -> Any:
    """``value`` as it can stand in a pipeline file; of adapters, name and path.

    Raises:
        ConfigError: it cannot.
    """
    if name == "lora_modules" and isinstance(value, list):
        return {adapter.name: adapter.path for adapter in value}
    if name in FILES and value:
        path = Path(value)
        if name == "custom_chat_template" and is_template(value):
            return value
        if not path.is_file():
            flag = next((f for f, arg in STAGE_OPTIONS.items() if arg == name), name)
            raise ConfigError(f"{_flag(flag)}: no file {value}")
        return str(path.resolve())
    if not _plain(value):
        raise ConfigError(f"{_flag(name)}: cannot be passed on to a worker: {value!r}")
    return list(value) if isinstance(value, tuple) else value


def _plain(value: Any) -> bool:
    """Whether it can stand in a pipeline file as it is."""
    if isinstance(value, dict):
        return all(type(k) is str and _plain(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(map(_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def _list(value: Any) -> Iterable[str]:
    return [value] if isinstance(value, str) else value or []


def _flag(dest: str) -> str:
    return f"--{dest.replace('_', '-')}"

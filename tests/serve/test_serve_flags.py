"""vLLM's flags as `omniq serve` sorts them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from omniq.errors import ConfigError
from omniq.serve import flags as serve_flags
from omniq.serve.flags import parse
from omniq.settings import Settings

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]


class TestWithVLLM:
    pytestmark = needs_vllm

    def test_engine_arguments_by_vllms_names_and_only_those_given(self) -> None:
        given = parse(
            [
                *("org/model", "--max-model-len", "1k", "-tp", "2", "--enforce-eager"),
                *("--no-enable-prefix-caching", "--compilation-config", '{"mode": 0}'),
                *("--hf-overrides", '{"a": 1}', "--speculative-config.method", "ngram"),
                *("--speculative-config.num_speculative_tokens", "2", "--omni"),
            ]
        )
        assert given.model == "org/model"
        assert given.engine_args == {
            "max_model_len": 1000,
            "tensor_parallel_size": 2,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "compilation_config": {"mode": 0},
            "hf_overrides": {"a": 1},
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
        }

    def test_what_concerns_the_server_is_omniqs(self) -> None:
        given = parse(
            [
                *("m", "--host", "0.0.0.0", "--port", "81", "--api-key", "k1", "k2"),
                *("--served-model-name", "a", "b", "--max-log-len", "3"),
                *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
                *("--lora-modules", "x=/tmp/x", "y=/tmp/y"),
            ]
        )
        assert (given.host, given.port, given.api_keys) == ("0.0.0.0", 81, ("k1", "k2"))
        assert given.served_names == ("a", "b")
        assert given.without_effect == ("--max-log-len",)
        assert given.engine_args == {
            "tool_call_parser": "hermes",
            "lora_modules": {"x": "/tmp/x", "y": "/tmp/y"},
        }

    def test_config_file(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("port: 12\ncompilation-config:\n  mode: 0\nmodel: from-file\n")
        given = parse(["--config", str(file)])
        assert (given.model, given.port) == ("from-file", 12)
        assert given.engine_args == {"compilation_config": {"mode": 0}}

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--bogus", "1"], "unrecognized arguments: --bogus 1"),
            (["--max-model-len", "x"], "argument --max-model-len"),
            (["--dtype", "int3"], "invalid choice: 'int3'"),
            (["--compilation-config", '{"nonsense": 1}'], "nonsense"),
        ],
    )
    def test_a_wrong_flag_is_vllms_own_error(
        self, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            parse(["m", *args])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err

    def test_what_omniqs_server_lacks_is_refused_by_name_and_with_a_reason(self) -> None:
        with pytest.raises(ConfigError, match=r"--middleware: .*; --ssl-keyfile: .*reverse proxy"):
            parse(["m", "--ssl-keyfile", "x", "--middleware", "a.b"])

    def test_every_flag_of_vllms_server_is_sorted_once(self) -> None:
        """What a new vLLM adds is to be thought about."""
        parsers, engine = serve_flags._vllm_parsers()
        sorts: tuple[Any, ...] = (
            *(serve_flags.OURS, serve_flags.STAGE_OPTIONS, serve_flags.API_OPTIONS),
            *(serve_flags.WITHOUT_EFFECT, serve_flags.IMPLIED, serve_flags.PARSERS_OWN),
            serve_flags.REFUSED,
        )
        for action in parsers.serve._actions:
            places = sum(action.dest in sort for sort in sorts)
            engines = action.dest in engine and action.dest not in sorts[0]
            assert places == 1 or (places == 0 and (engines or action.dest == "help")), action.dest

    def test_the_front_ends_options(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of prompts and parsers are the stage's, those of answers settings of the API."""
        monkeypatch.chdir(tmp_path)
        for name in ("chat.jinja", "tools.py", "thoughts.py"):
            Path(name).write_text("")
        given = parse(
            [
                *("m", "--chat-template", "chat.jinja", "--tool-parser-plugin", "tools.py"),
                *("--reasoning-parser-plugin", "thoughts.py", "--tool-strict-level", "function"),
                *("--chat-template-content-format", "openai", "--response-role", "robot"),
                *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
                *("--exclude-tools-when-tool-choice-none", "--sse-keep-alive-interval", "3"),
                *("--enable-force-include-usage", "--return-tokens-as-token-ids"),
                "--enable-prompt-tokens-details",
            ]
        )
        assert given.engine_args == {
            "custom_chat_template": str(tmp_path / "chat.jinja"),
            "tool_parser_plugin": str(tmp_path / "tools.py"),
            "reasoning_parser_plugin": str(tmp_path / "thoughts.py"),
            "tool_strict_level": "function",
            "chat_template_content_format": "openai",
            "default_chat_template_kwargs": {"enable_thinking": False},
            "exclude_tools_when_tool_choice_none": True,
        }
        settings = Settings(**given.settings)
        assert (settings.openai_role, settings.openai_keep_alive) == ("robot", 3.0)
        assert settings.openai_always_usage
        assert settings.openai_tokens_as_ids

    def test_a_template_given_itself_and_a_file_that_is_not_there(self) -> None:
        template = "{{ messages }}"
        given = parse(["m", "--chat-template", template])
        assert given.engine_args == {"custom_chat_template": template}
        with pytest.raises(ConfigError, match=r"--chat-template: no file none\.jinja"):
            parse(["m", "--chat-template", "none.jinja"])

    def test_no_model(self) -> None:
        with pytest.raises(ConfigError, match="no MODEL given"):
            parse(["--port", "80"])


class TestWithoutVLLM:
    @pytest.fixture(autouse=True)
    def _no_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(serve_flags, "vllm_installed", lambda: False)

    def test_known_flags(self) -> None:
        given = parse(["m", "--dtype", "float32", "--max-num-seqs", "4", "--port", "80", "--omni"])
        assert given.engine_args == {"dtype": "float32", "max_num_seqs": 4}
        assert given.port == 80

    def test_other_flags_of_vllm_are_refused_with_what_brings_them(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            parse(["m", "--enable-prefix-caching"])
        assert caught.value.code == 2
        said = capsys.readouterr().err
        assert "unrecognized arguments: --enable-prefix-caching" in said
        assert "omniq[vllm]" in said
        assert "--max-model-len" in said, "the flags that there are"

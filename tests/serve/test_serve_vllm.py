"""`vllm serve MODEL --omni`: vLLM's own command line starts omniq on the vLLM engine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from served import BIN, make_model, served

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]
MESSAGES: Any = [{"role": "user", "content": "a red circle above a blue square"}]


@pytest.mark.timeout(300)
def test_vllm_serve_omni_answers_like_the_transformers_engine(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    flags = ["--max-num-seqs", "4", "--max-model-len", "128", "--dtype", "float32"]
    options: Any = {"model": str(model), "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    made = {}
    for engine in ("vllm", "transformers"):
        command = [str(BIN / "vllm"), "serve", str(model), "--omni", "--engine", engine, *flags]
        if engine == "transformers":
            command = [sys.executable, "-m", "omniq", "serve", str(model), "--engine", engine]
        folder = tmp_path / engine
        folder.mkdir()
        with served(folder, *command, timeout=200) as running:
            client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
            done = client.chat.completions.create(**options)
            pieces = [
                c.choices[0].delta.content or ""
                for c in client.chat.completions.create(**options, stream=True)
            ]
            assert "".join(pieces) == done.choices[0].message.content
            made[engine] = (done.choices[0].message.content, done.usage.prompt_tokens)
            if engine == "vllm":
                _constrained(client, str(model))
    assert made["vllm"] == made["transformers"]


def _constrained(client: openai.OpenAI, model: str) -> None:
    """What only vLLM can do goes through: a choice of two answers, two sequences."""
    done = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        n=2,
        seed=1,
        temperature=1.0,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert {c.message.content for c in done.choices} <= {"yes", "no"}
    assert [c.index for c in done.choices] == [0, 1]


def test_wrong_flags_are_vllms_error_and_exit_code() -> None:
    done = subprocess.run(
        [str(BIN / "vllm"), "serve", "m", "--omni", "--nonsense"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "unrecognized arguments: --nonsense" in done.stderr


def test_other_commands_of_vllm_omni_are_refused() -> None:
    done = subprocess.run(
        [str(BIN / "vllm-omni"), "bench"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "there is only `vllm-omni serve MODEL`" in done.stderr

"""Out-of-tree models: declared by an entry point, loaded by vLLM's engine process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import ask, loaded, stage
from tiny_models import make_language_model, make_tokenizer

from omniq.vllm_plugin import OmniPlugin

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]
ONLY = 7
MODEL = f"""
import os
import torch
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

class OnlyOneToken(Qwen3ForCausalLM):
    def compute_logits(self, hidden_states):
        logits = super().compute_logits(hidden_states)
        logits.fill_(-1.0)
        logits[..., {ONLY}] = 1.0
        return logits
"""


@pytest.fixture
def declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a distribution that declares models, for this process and its children."""

    def install(entries: str) -> None:
        info = tmp_path / "talker-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: talker\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[omniq.vllm_models]\n{entries}\n")
        (tmp_path / "omniq_test_talker.py").write_text(MODEL)
        monkeypatch.syspath_prepend(str(tmp_path))
        path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        monkeypatch.setenv("PYTHONPATH", path)

    return install


def test_models_are_read_and_wrong_ones_ignored(
    declared: Any, caplog: pytest.LogCaptureFixture
) -> None:
    declared("Right = a.b:C\nWrong = just_a_module")
    assert OmniPlugin.models() == {"Right": "a.b:C"}
    assert "'Wrong'" in caplog.text
    assert "must be package.module:Class" in caplog.text


def test_the_plugin_imports_nothing_heavy_and_no_vllm_when_nothing_is_declared() -> None:
    code = (
        "import sys; from omniq.vllm_plugin import OmniPlugin; OmniPlugin.register();"
        "print({'vllm', 'torch', 'celery', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_vllm_finds_the_plugin() -> None:
    from importlib.metadata import entry_points

    (point,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "omniq"]
    assert point.load() is OmniPlugin.register


@pytest.mark.slow
class TestInVLLM:
    pytestmark = needs_vllm

    def test_registering_twice_is_registering_once(self, declared: Any) -> None:
        from vllm import ModelRegistry

        declared("OmniqTestTwice = omniq_test_talker:OnlyOneToken")
        OmniPlugin.register()
        first = ModelRegistry.models["OmniqTestTwice"]
        OmniPlugin.register()
        assert ModelRegistry.models["OmniqTestTwice"] is first
        assert "OmniqTestTwice" in ModelRegistry.get_supported_archs()

    async def test_a_declared_model_runs_in_vllms_engine_process(
        self, declared: Any, tmp_path: Path
    ) -> None:
        declared("OmniqTestTalker = omniq_test_talker:OnlyOneToken")
        OmniPlugin.register()  # vLLM has loaded its plugins in this process long ago
        folder = tmp_path / "model"
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(folder)
        make_language_model(tokenizer).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**config, "architectures": ["OmniqTestTalker"]})
        )
        engine = await loaded(
            stage(folder, "ar", engine="vllm", subfolder=None, output_modalities=["text"])
        )
        try:
            out = await ask(engine, {"max_tokens": 5, "temperature": 0.0}, prompt="hello")
        finally:
            await engine.unload()
        assert out.tensors["token_ids"]["token_ids"].tolist() == [ONLY] * 5

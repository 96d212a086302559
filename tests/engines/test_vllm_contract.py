"""Which vLLM omniq accepts, and what it says of the others."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import omniq
from omniq.engines.vllm import contract
from omniq.errors import ConfigError

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")


@pytest.mark.vllm
@needs_vllm
class TestInstalled:
    """Against the real one."""

    def test_is_accepted(self) -> None:
        contract.checked(on_cpu=True)

    @pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0.0", "0.9.1"])
    def test_of_another_version_is_refused(self, version: str) -> None:
        with pytest.raises(ConfigError, match=r"0\.26 up to, but not including, 0\.33") as caught:
            contract.check(version)
        assert version in caught.value.message
        assert "pip install 'vllm>=0.26,<0.33'" in caught.value.message

    @pytest.mark.parametrize("version", ["0.26.0", "0.27.1.dev3+g12", "0.32.0+cpu"])
    def test_version_within_the_range(self, version: str) -> None:
        contract.check(version)

    def test_method_with_another_signature_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def generate(self: Any, prompt: Any, request_id: str) -> None: ...

        monkeypatch.setattr(contract.names().AsyncLLM, "generate", generate)
        with pytest.raises(ConfigError, match=r"AsyncLLM\.generate has no 'sampling_params'"):
            contract.check()

    def test_missing_name_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1 import outputs

        monkeypatch.delattr(outputs, "ModelRunnerOutput")
        with pytest.raises(ConfigError, match=r"vllm\.v1\.outputs:ModelRunnerOutput is missing"):
            contract.check()

    @pytest.mark.parametrize(
        "need",
        [*contract.FRONT_END.values(), *contract.RELIED_ON],
        ids=lambda need: need.path.partition(":")[2],
    )
    def test_a_member_that_no_class_has_is_seen(self, need: contract.Need) -> None:
        """For every kind of name: structure, dataclass, function, method, instance attribute."""
        assert list(contract._faults(need)) == []
        doctored = replace(need, members=(*need.members, "no_such_member"))
        assert list(contract._faults(doctored)) == [f"{need.path} has no 'no_such_member'"]


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(contract.importlib, "import_module", absent)
    message = contract.mismatch()
    assert message is not None
    assert "No module named 'vllm'" in message
    assert contract.INSTALL in message


def test_only_the_contract_imports_vllm() -> None:
    package = Path(omniq.__file__).parent
    found = []
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found += [str(file) for name in names if name.split(".")[0] == "vllm"]
    assert found == []

"""What MODEL may be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from omniq.config import available_pipelines, load_pipeline
from omniq.errors import ConfigError
from omniq.resolve import language_model
from omniq.serve.command import OmniServeCommand
from omniq.serve.flags import ServeFlags
from omniq.serve.pipeline_file import pipeline_yaml
from omniq.serve.target import resolve_model
from omniq.settings import get_settings

ROOT = Path(__file__).resolve().parents[2]
TINY_OMNI = ROOT / "omniq/models/tiny_omni"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNIQ_DATA_DIR", str(tmp_path / "data"))
    get_settings.cache_clear()
    available_pipelines.cache_clear()


@pytest.fixture
def llm(tmp_path: Path) -> Path:
    folder = tmp_path / "My Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    return folder


def test_language_model_folder(llm: Path) -> None:
    args = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 99}
    pipeline = resolve_model(ServeFlags(str(llm), engine="vllm", engine_args=args))
    stage = pipeline.stages[0]
    assert pipeline.name == "my-model"
    assert (stage.engine, stage.model, stage.dtype) == ("vllm", str(llm), "float32")
    assert (stage.max_in_flight, stage.engine_args["max_model_len"]) == (4, 99)
    assert {n: i.type for n, i in pipeline.inputs.items()} == {
        "prompt": "text",
        "messages": "messages",
        "token_ids": "token_ids",
    }


@pytest.mark.parametrize(("installed", "engine"), [(True, "vllm"), (False, "transformers")])
def test_engine_by_itself(
    llm: Path, monkeypatch: pytest.MonkeyPatch, installed: bool, engine: str
) -> None:
    monkeypatch.setattr(language_model, "vllm_installed", lambda: installed)
    assert resolve_model(ServeFlags(str(llm))).stages[0].engine == engine


def test_written_pipeline_is_the_same_pipeline(llm: Path, tmp_path: Path) -> None:
    pipeline = resolve_model(ServeFlags(str(llm)))
    file = tmp_path / "p.yaml"
    file.write_text(pipeline_yaml(pipeline))
    assert load_pipeline(file) == pipeline


def test_name_of_a_pipeline() -> None:
    assert resolve_model(ServeFlags("tiny-omni")) is available_pipelines()["tiny-omni"]


def test_diffusers_folder_that_a_pipeline_is_made_for() -> None:
    assert resolve_model(ServeFlags(str(TINY_OMNI))).name == "tiny-omni"


def test_flags_change_a_copy_of_the_ar_stage() -> None:
    flags = ServeFlags("tiny-omni", engine="vllm", engine_args={"max_model_len": 64})
    served = resolve_model(flags)
    known = available_pipelines()["tiny-omni"]
    assert served.name == "tiny-omni-served"
    assert (served.stages[0].engine, served.stages[0].engine_args) == (
        "vllm",
        {"max_model_len": 64},
    )
    assert served.stages[1:] == known.stages[1:]
    env = OmniServeCommand.of(flags).environment()
    assert json.loads(env["OMNIQ_SERVED_MODELS"]) == {"tiny-omni": "tiny-omni-served"}
    (file,) = json.loads(env["OMNIQ_PIPELINES"])
    assert load_pipeline(Path(file)).stages[0].engine == "vllm"


def test_pipeline_file(llm: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(pipeline_yaml(resolve_model(ServeFlags(str(llm)))))
    assert resolve_model(ServeFlags(str(file))).name == "my-model"


def test_environment_of_the_processes(llm: Path) -> None:
    flags = ServeFlags(str(llm), host="0.0.0.0", port=81, api_keys=("k",), served_names=("a", "b"))
    env = OmniServeCommand.of(flags).environment()
    assert (env["OMNIQ_API_HOST"], env["OMNIQ_API_PORT"]) == ("0.0.0.0", "81")
    assert json.loads(env["OMNIQ_API_KEYS"]) == ["k"]
    assert json.loads(env["OMNIQ_SERVED_MODELS"]) == {"a": "my-model", "b": "my-model"}
    assert env["OMNIQ_DEFAULT_PIPELINE"] == "my-model"


def test_folders_called_alike_have_a_pipeline_each(llm: Path, tmp_path: Path) -> None:
    """And keep it: jobs wait in queues of its name, and workers that start anew read its file."""
    other = tmp_path / "elsewhere" / llm.name
    shutil.copytree(llm, other)

    def served(folder: Path, **args: Any) -> tuple[str, Path]:
        flags = ServeFlags(str(folder), engine="vllm", engine_args=args)
        command = OmniServeCommand.of(flags)
        env = command.environment()
        (file,) = json.loads(env["OMNIQ_PIPELINES"])
        assert load_pipeline(Path(file)) == command.pipeline
        assert command.file is not None
        command.file.close()
        assert env["OMNIQ_DEFAULT_PIPELINE"] == command.pipeline.name
        assert list(json.loads(env["OMNIQ_SERVED_MODELS"]).values()) == [command.pipeline.name]
        return command.pipeline.name, Path(file)

    first = served(llm)
    second = served(other)
    assert (first[0], second[0]) == ("my-model", "my-model-2")
    assert load_pipeline(first[1]).stages[0].model == str(llm)
    assert load_pipeline(second[1]).stages[0].model == str(other)
    assert served(other, max_model_len=64) == second
    assert served(llm) == first
    shutil.rmtree(llm)
    assert served(other) == first
    first[1].write_text("of: another version")
    assert served(other) == first


def test_servers_of_one_folder_with_other_flags_keep_apart_while_they_run(llm: Path) -> None:
    def serve(**args: Any) -> OmniServeCommand:
        return OmniServeCommand.of(ServeFlags(str(llm), engine="vllm", engine_args=args))

    first, second = serve(), serve(max_model_len=64)
    assert (first.pipeline.name, second.pipeline.name) == ("my-model", "my-model-2")
    replica = serve()  # one more of the first shares its queues
    assert replica.file is not None and first.file is not None
    assert replica.file.path == first.file.path
    for command in (first, second, replica):
        assert command.file is not None
        assert load_pipeline(command.file.path) == command.pipeline
    first.file.close()
    assert serve(max_model_len=99).pipeline.name == "my-model-3"  # a replica still runs
    replica.file.close()
    assert serve(max_model_len=99).pipeline.name == "my-model"


def test_a_data_folder_that_cannot_be_written_is_said(
    llm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OMNIQ_DATA_DIR", str(tmp_path / "file"))
    get_settings.cache_clear()
    with pytest.raises(ConfigError, match=r"cannot write to the data folder .*file/serve"):
        OmniServeCommand.of(ServeFlags(str(llm), engine="vllm"))


def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no pipeline, no folder .* name") as caught:
        resolve_model(ServeFlags("./gone"))
    assert "tiny-omni" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="the hub cannot be asked for it"):
        resolve_model(ServeFlags("nobody/nothing"))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(ServeFlags(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no architectures"):
        resolve_model(ServeFlags(str(tmp_path)))
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(ConfigError, match=r"FluxPipeline names no text_encoder, transformer, vae"):
        resolve_model(ServeFlags(str(tmp_path)))
    (tmp_path / "model_index.json").write_text('{"_class_name": "NewPipeline"}')
    with pytest.raises(ConfigError, match=r"NewPipeline.* known: .*FLUX.*language model") as caught:
        resolve_model(ServeFlags(str(tmp_path)))
    assert "docs/pipelines.md" in (caught.value.hint or "")

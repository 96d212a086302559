"""Which pipeline an omni model's folder becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omniq.config import PipelineConfig
from omniq.errors import ConfigError
from omniq.resolve import BuildOptions, ModelFiles, pipeline_for

TYPES = {
    "Qwen2.5-Omni": ("qwen2_5_omni", "token2wav"),
    "Qwen3-Omni": ("qwen3_omni_moe", "code2wav"),
}


def resolved(folder: Path, config: dict[str, Any], **options: Any) -> PipelineConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": ["Any"], **config}))
    return pipeline_for(ModelFiles(str(folder)), BuildOptions(**options))


@pytest.mark.parametrize(("model_type", "vocoder"), TYPES.values(), ids=TYPES.keys())
def test_stages_and_devices(tmp_path: Path, model_type: str, vocoder: str) -> None:
    """Thinker, talker and vocoder, each fed by the chunks of the one before."""
    config = {"model_type": model_type}
    places = {
        0: [[], [], []],
        1: [[], [], []],
        2: [["0"], ["1"], ["1"]],
        4: [["0"], ["1"], ["2"]],
    }
    for gpus, devices in places.items():
        pipeline = resolved(tmp_path, config, gpus=gpus)
        assert [s.stage_id for s in pipeline.stages] == ["thinker", "talker", vocoder]
        assert [s.devices for s in pipeline.stages] == devices
    windows = [e.source for e in pipeline.edges if e.trigger == "window"]
    assert windows == ["thinker.reply", "talker.codes"]
    assert pipeline.outputs["audio"].sample_rate == 24_000
    assert pipeline.files == ("image", "audio", "video")
    assert pipeline.inputs["video"].as_file, "a request's parameters say what is taken of it"
    assert pipeline.stages_for(["text"]) == ["thinker"]
    assert list(pipeline.only(["thinker"]).outputs) == ["text", "finish_reason", "choices"]


def test_flags_are_the_thinkers(tmp_path: Path) -> None:
    args = {"dtype": "bfloat16", "max_num_seqs": 3, "max_model_len": 512}
    of_25 = {"model_type": "qwen2_5_omni"}
    pipeline = resolved(tmp_path, of_25, engine="transformers", engine_args=args)
    thinker, talker, token2wav = pipeline.stages
    assert thinker.engine == "omni-thinker"
    assert thinker.engine_args == {"stream_tokens": 1, "max_model_len": 512}
    assert [s.dtype for s in pipeline.stages] == ["bfloat16", "bfloat16", "float32"]
    assert {s.max_in_flight for s in pipeline.stages} == {3}
    assert "max_model_len" not in {**talker.engine_args, **token2wav.engine_args}
    vllms = {"tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match="--tensor-parallel-size: the thinker"):
        resolved(tmp_path, of_25, engine="transformers", engine_args=vllms)
    thinker = resolved(tmp_path, of_25, engine="vllm", engine_args=vllms).stages[0]
    assert thinker.engine == "omni-thinker-vllm"
    assert thinker.engine_args == {"stream_tokens": 1, **vllms}


@pytest.mark.parametrize("model_type", [model_type for model_type, _ in TYPES.values()])
def test_the_thinker_takes_vllm_where_it_is_asked_to(tmp_path: Path, model_type: str) -> None:
    """By itself it is the engine that takes videos with all that may be said of them."""
    engines = {
        asked: resolved(tmp_path, {"model_type": model_type}, engine=asked).stages[0].engine
        for asked in ("auto", "transformers", "vllm")
    }
    assert engines == {
        "auto": "omni-thinker",
        "transformers": "omni-thinker",
        "vllm": "omni-thinker-vllm",
    }


def test_a_thinker_on_vllm_leaves_memory_to_who_shares_its_gpu(tmp_path: Path) -> None:
    config = {"model_type": "qwen2_5_omni"}
    shares = {}
    for gpus in (0, 1, 2):
        thinker = resolved(tmp_path, config, engine="vllm", gpus=gpus).stages[0]
        shares[gpus] = thinker.engine_args.get("gpu_memory_utilization")
    assert shares == {0: None, 1: 0.8, 2: None}
    own = {"gpu_memory_utilization": 0.5}
    thinker = resolved(tmp_path, config, engine="vllm", gpus=1, engine_args=own).stages[0]
    assert thinker.engine_args["gpu_memory_utilization"] == 0.5
    silent = {**config, "enable_audio_output": False}
    thinker = resolved(tmp_path, silent, engine="vllm", gpus=1).stages[0]
    assert "gpu_memory_utilization" not in thinker.engine_args


def test_a_model_without_speech_has_a_thinker_only(tmp_path: Path) -> None:
    config = {"model_type": "qwen2_5_omni", "enable_audio_output": False}
    pipeline = resolved(tmp_path, config)
    assert [s.stage_id for s in pipeline.stages] == ["thinker"]
    assert "audio" not in pipeline.outputs


def test_flat_parameters_of_the_text_do_not_reach_the_talker(tmp_path: Path) -> None:
    pipeline = resolved(tmp_path, {"model_type": "qwen2_5_omni"})
    takers = {n: [s.stage_id for s in stages] for n, stages in pipeline.takers.items()}
    assert takers["temperature"] == takers["max_tokens"] == ["thinker"]
    assert takers["speaker"] == ["talker", "token2wav"]
    assert takers["seed"] == ["thinker", "talker", "token2wav"]

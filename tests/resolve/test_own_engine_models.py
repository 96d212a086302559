"""GLM-Image and CSM by their model files: what is built, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omniq.config import OmniStageConfig, PipelineConfig, load_pipeline
from omniq.config.request import validate_request
from omniq.errors import ConfigError, InvalidRequest
from omniq.resolve import BuildOptions, ModelFiles, pipeline_for
from omniq.serve.pipeline_file import pipeline_yaml

PARTS = ("text_encoder", "tokenizer", "transformer", "vae", "scheduler", "vision_language_encoder")


@pytest.fixture
def glm_image(tmp_path: Path) -> Path:
    index = {"_class_name": "GlmImagePipeline", **{p: ["diffusers", "X"] for p in PARTS}}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.fixture
def csm(tmp_path: Path) -> Path:
    config = {
        "architectures": ["CsmForConditionalGeneration"],
        "codec_config": {"model_type": "mimi", "sampling_rate": 16_000},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def built(folder: Path, **options: Any) -> PipelineConfig:
    return pipeline_for(ModelFiles(str(folder)), BuildOptions(**options))


def test_glm_image_has_an_ar_stage_of_its_own(glm_image: Path, tmp_path: Path) -> None:
    """Whose size parameters are those of the DiT, and whose tokens feed it."""
    pipeline = built(glm_image, engine_args={"dtype": "bfloat16", "max_num_seqs": 4})
    assert [s.stage_id for s in pipeline.stages] == ["ar", "encode", "dit", "decode"]
    assert {(s.dtype, s.max_in_flight) for s in pipeline.stages} == {("bfloat16", 4)}
    assert {e.producer for e in pipeline.edges_into("dit")} == {"ar", "encode", "input"}
    complete = validate_request(pipeline, {"prompt": "a"}, {"width": 512, "seed": 1})
    assert (complete["ar"]["height"], complete["ar"]["width"]) == (1024, 512)
    assert (complete["dit"]["height"], complete["dit"]["width"]) == (1024, 512)
    with pytest.raises(InvalidRequest, match="multiple of 32"):
        validate_request(pipeline, {"prompt": "a"}, {"width": 500})
    file = tmp_path / "p.yaml"
    file.write_text(pipeline_yaml(pipeline))
    assert load_pipeline(file) == pipeline


def test_csm_streams_codes_to_its_codec(csm: Path) -> None:
    """At the rate of the model's own codec."""
    pipeline = built(csm)
    (edge,) = pipeline.edges_into("codec")
    assert (edge.source, edge.trigger) == ("ar.codes", "window")
    assert pipeline.outputs["audio"].sample_rate == 16_000
    validate_request(pipeline, {"prompt": "a", "voice": "1"}, {"max_tokens": 10})
    assert pipeline.inputs["ref_audio"].sample_rate == 16_000
    with pytest.raises(InvalidRequest, match=r"input\.ref_text: required with ref_audio"):
        validate_request(pipeline, {"prompt": "a", "ref_audio": b""}, {})


@pytest.mark.parametrize(
    ("gpus", "glm", "speech"),
    [
        (0, [[]] * 4, [[]] * 2),
        (1, [[]] * 4, [[]] * 2),
        (2, [["0"], ["0"], ["1"], ["1"]], [["0"], ["1"]]),
        (4, [["0"], ["1"], ["2"], ["1"]], [["0"], ["1"]]),
    ],
)
def test_devices(
    tmp_path: Path, glm_image: Path, gpus: int, glm: list[list[str]], speech: list[list[str]]
) -> None:
    """The large stages apart."""
    assert [s.devices for s in built(glm_image, gpus=gpus).stages] == glm
    other = tmp_path / "csm"
    other.mkdir()
    (other / "config.json").write_text('{"architectures": ["CsmForConditionalGeneration"]}')
    assert [s.devices for s in built(other, gpus=gpus).stages] == speech


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "vllm"}, "--engine vllm: the AR stage of CSM runs on an engine of its own"),
        ({"encoder": "vllm"}, "--encoder vllm: CSM has no text encoder"),
        ({"engine_args": {"max_model_len": 9}}, "--max-model-len: CSM has no stage on vLLM"),
    ],
)
def test_options_that_do_not_fit(csm: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(csm, **options)


def test_parameters_of_other_engine_types() -> None:
    """A stage that asks for them takes them, by the other type's own bounds; no other does."""
    stage = {"stage_id": "ar", "engine_type": "AR", "model": "m"}
    more = OmniStageConfig.model_validate({**stage, "more_parameters": ["height"]})
    fields = more.parameter_model.model_fields
    assert "height" in fields
    assert "width" not in fields
    assert "temperature" in fields
    assert "height" not in OmniStageConfig.model_validate(stage).parameter_model.model_fields
    with pytest.raises(ValueError, match=r"unknown parameter 'hight'; allowed: .*height"):
        OmniStageConfig.model_validate({**stage, "more_parameters": ["hight"]})
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        OmniStageConfig.model_validate(
            {**stage, "more_parameters": ["height"], "defaults": {"height": 0}}
        )

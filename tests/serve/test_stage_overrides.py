"""``--stage-overrides``: fields of stages, from a file or the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from omniq.config import available_pipelines
from omniq.errors import ConfigError
from omniq.serve.flags import ServeFlags, parse
from omniq.serve.overrides import read_overrides
from omniq.serve.target import resolve_model


def served(text: str) -> ServeFlags:
    return ServeFlags("tiny-omni", stage_overrides=read_overrides(text))


def test_mappings_merge_other_values_are_replaced_and_null_unsets() -> None:
    known = available_pipelines()["tiny-omni"]
    text = """
    dit: {devices: ["1"], max_in_flight: 3, defaults: {num_inference_steps: 9}, time_limit: null}
    decode: {engine_args: {tiling: true}}
    """
    pipeline = resolve_model(served(text))
    dit, before = pipeline.stage("dit"), known.stage("dit")
    assert pipeline.name == "tiny-omni-served"
    assert (dit.devices, dit.max_in_flight, dit.time_limit) == (["1"], 3, None)
    assert dit.defaults == {**before.defaults, "num_inference_steps": 9}
    assert dit.limits == before.limits
    assert pipeline.stage("decode").engine_args == {"tiling": True}
    assert pipeline.stage("ar") == known.stage("ar")


def test_from_a_file_by_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("decode: {max_in_flight: 2}")
    flags = parse(["tiny-omni", "--stage-overrides", str(file), "--gpus", "2"])
    assert flags.gpus == 2
    assert resolve_model(flags).stage("decode").max_in_flight == 2
    flags = parse(["tiny-omni", "--stage-overrides", '{"decode": {"max_in_flight": 5}}'])
    assert resolve_model(flags).stage("decode").max_in_flight == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a mapping of stage ids"),
        ("dit: 3", "must be a mapping of stage ids"),
        ("{", "not valid YAML"),
        ("gone.yaml", r"gone\.yaml cannot be read"),
        ("vae: {dtype: float16}", r"no stage 'vae'; the stages are ar, dit, decode"),
        ("dit: {dtype: float8}", r"dit\.dtype: Input should be"),
        ("dit: {engine_type: AR}", r"dit\.engine_type cannot be changed"),
        ("dit: {defaults: {height: 48}}", "default of 'height' must be at least 64"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--stage-overrides: .*{message}"):
        resolve_model(served(text))


def test_a_number_of_gpus_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="--gpus: must be 0 or more; got -1"):
        parse(["tiny-omni", "--gpus", "-1"])

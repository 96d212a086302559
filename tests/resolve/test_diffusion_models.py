"""Diffusers folders by their name alone: what is built, and that it makes what diffusers makes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusion_helpers import picture, whole
from resolve_helpers import resolved, run_stages
from tiny_families import make

from omniq.config import PipelineConfig, load_pipeline
from omniq.engines.base import StageInput
from omniq.errors import ConfigError
from omniq.resolve import families
from omniq.resolve.diffusion import DiffusionFamily, OtherDiffusion
from omniq.serve.pipeline_file import pipeline_yaml

PROMPT = "a red circle above a blue square"
#: Model, picture it is shown, what the request says beside the defaults.
RUNS: list[tuple[str, bool, dict[str, Any]]] = [
    ("z_image", False, {}),
    ("flux", False, {}),
    # The scale's default is that of text to image, with a picture too.
    ("flux", True, {"strength": 0.5, "guidance_scale": 2.0}),
    ("flux2_klein", False, {}),
    ("sd3", False, {"negative_prompt": "a star"}),
    ("qwen_image", False, {"negative_prompt": "a star"}),
    ("qwen_image", False, {}),  # no negative prompt, no guidance, as in the pipeline
    ("cogview4", False, {"negative_prompt": "a star"}),
    ("wan", False, {"num_frames": 5}),
    ("wan_5b", True, {"num_frames": 5}),
    ("wan_i2v", True, {"num_frames": 5}),
]
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, CUDA])]
DIFFUSION = [f for f in families() if isinstance(f, DiffusionFamily)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model by its name, made once."""
    torch.set_num_threads(1)
    root, made = tmp_path_factory.mktemp("resolve"), dict[str, Path]()

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make(name, root / name)
        return made[name]

    return get


def _name(run: tuple[str, bool, dict[str, Any]]) -> str:
    return run[0] + ("-picture" if run[1] else "")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", RUNS, ids=_name)
async def test_a_folder_makes_what_its_pipeline_makes(
    tiny: Callable[[str], Path], run: tuple[str, bool, dict[str, Any]], device: str
) -> None:
    """With all defaults but size and steps, which a CPU cannot afford."""
    from diffusers import AutoPipelineForImage2Image, WanImageToVideoPipeline
    from PIL import Image

    name, pictured, more = run
    small = {"height": 32, "width": 48, "num_inference_steps": 3}
    pipeline, reference = resolved(tiny(name)), whole(tiny(name))
    shown = picture(1, 32, 48)
    files = {"image": StageInput(tensors={"image": shown})} if pictured else None
    made = await run_stages(pipeline, PROMPT, {**small, **more, "seed": 5}, files, device)
    arguments = {"prompt": PROMPT, **small, **more}
    if pictured:
        arguments["image"] = Image.fromarray(shown.numpy())
    if name == "flux" and pictured:
        reference = AutoPipelineForImage2Image.from_pipe(reference)
    if name == "wan_5b" and pictured:
        reference = WanImageToVideoPipeline.from_pipe(reference)
    reference.to(device)
    generator = torch.Generator("cpu").manual_seed(5)
    image = reference(**arguments, generator=generator, output_type="np", return_dict=False)[0][0]
    ((kind, output),) = pipeline.outputs.items()
    assert output.source == f"decode.{kind}"
    pixels = made["decode"].tensors[kind][kind].numpy().astype(int)
    assert pixels.shape == image.shape
    assert np.abs(pixels - (image * 255).round().astype(int)).max() <= 1


@pytest.mark.parametrize("family", DIFFUSION, ids=lambda f: f.name)
def test_defaults_are_the_pipelines_own(family: DiffusionFamily) -> None:
    """Of each class of the family that makes something of text alone, or needs a picture."""
    import diffusers

    for class_name in family.classes:
        if "Img2Img" in class_name or "Inpaint" in class_name:
            continue  # it makes text to image too; strength is its own
        call = inspect.signature(getattr(diffusers, class_name).__call__).parameters
        wanted = {
            name: call[name].default
            for name in ("height", "width", "num_frames", "num_inference_steps")
            if name in call and call[name].default is not None
        }
        scale = call["guidance_scale"].default
        if scale is None:  # Qwen-Image's name of it is another
            scale = call["true_cfg_scale"].default
        elif "true_cfg_scale" in call:
            wanted["true_cfg_scale"] = call["true_cfg_scale"].default
        assert dict(family.defaults) == {**wanted, "guidance_scale": scale}, class_name


@pytest.mark.parametrize(
    ("name", "inputs", "multiple", "encoder_sees"),
    [
        ("qwen_image", ["prompt", "image", "mask_image"], 8, False),
        ("qwen_image_edit", ["prompt", "image", "mask_image"], 8, True),
        ("qwen_image_edit_plus", ["prompt", "image"], 8, True),
        ("z_image", ["prompt", "image", "mask_image"], 4, False),
        ("flux", ["prompt", "image", "mask_image"], 4, False),
        ("flux2", ["prompt", "image"], 4, False),
        ("sd3", ["prompt", "image", "mask_image"], 4, False),
        ("wan", ["prompt"], 16, False),
        ("wan_5b", ["prompt", "image"], 16, False),
        ("wan_i2v", ["prompt", "image"], 16, True),
        ("wan22_i2v", ["prompt", "image"], 16, False),
    ],
)
def test_inputs_and_limits(
    tiny: Callable[[str], Path], name: str, inputs: list[str], multiple: int, encoder_sees: bool
) -> None:
    """And the file that ``omniq serve`` writes is the same pipeline."""
    pipeline = resolved(tiny(name))
    assert list(pipeline.inputs) == inputs
    edges = [(e.source, e.target) for e in pipeline.edges]
    assert (("input.image", "encode.image") in edges) == encoder_sees
    limits = pipeline.stage("dit").limits
    assert limits["height"] == limits["width"]
    assert (limits["height"].min, limits["height"].multiple_of) == (multiple, multiple)
    required = name in ("qwen_image_edit", "qwen_image_edit_plus", "wan_i2v", "wan22_i2v")
    assert "image" not in inputs or pipeline.inputs["image"].required == required
    file = tiny(name).parent / f"{name}.yaml"
    file.write_text(pipeline_yaml(pipeline))
    assert load_pipeline(file) == pipeline


def devices(pipeline: PipelineConfig) -> list[list[str]]:
    return [s.devices for s in pipeline.stages]


def test_stages_spread_over_gpus(tiny: Callable[[str], Path]) -> None:
    """From four on, two share the transformer's work: its sequence, or a guided step."""
    expected = {
        0: [[], [], []],
        1: [[], [], []],
        2: [["0"], ["1"], ["0"]],
        3: [["0"], ["2"], ["1"]],
        4: [["0"], ["2", "3"], ["1"]],
    }
    for gpus, wanted in expected.items():
        assert devices(resolved(tiny("flux"), gpus=gpus)) == wanted
    four = resolved(tiny("flux"), gpus=4).stage("dit")
    assert four.engine_args == {"parallel": {"ulysses_degree": 2}}
    assert devices(resolved(tiny("z_image"), gpus=4)) == expected[4]
    four = resolved(tiny("z_image"), gpus=4).stage("dit")
    assert four.engine_args == {"parallel": {"cfg_degree": 2}}


def test_which_transformers_are_split_is_what_diffusers_has_plans_for(
    tiny: Callable[[str], Path],
) -> None:
    import diffusers

    for family in DIFFUSION:
        for class_name in family.classes:
            pipeline: Any = getattr(diffusers, class_name)
            named = inspect.signature(pipeline.__init__).parameters["transformer"].annotation
            name = named.__name__ if isinstance(named, type) else str(named).partition(" |")[0]
            transformer = getattr(diffusers, name.rpartition(".")[2])
            planned = transformer._cp_plan is not None
            assert planned == (family.shared_by == "ulysses_degree"), class_name


def test_engine_arguments_and_encoder(tiny: Callable[[str], Path]) -> None:
    pipeline = resolved(tiny("flux"), engine_args={"dtype": "bfloat16", "max_num_seqs": 3})
    assert {s.dtype for s in pipeline.stages} == {"bfloat16"}
    assert pipeline.stage("dit").max_in_flight == 3
    with pytest.raises(ConfigError, match=r"--max-model-len: FLUX\.1 has no AR stage"):
        resolved(tiny("flux"), engine_args={"max_model_len": 3})
    with pytest.raises(ConfigError, match=r"--encoder vllm: the encoder of FLUX\.1"):
        resolved(tiny("flux"), encoder="vllm")
    encode = resolved(
        tiny("qwen_image"), encoder="vllm", engine_args={"max_model_len": 99, "dtype": "float32"}
    ).stage("encode")
    assert (encode.engine, encode.engine_args) == ("vllm", {"max_model_len": 99})
    with pytest.raises(ConfigError, match=r"with --encoder vllm they are its encoder's"):
        resolved(tiny("qwen_image"), engine_args={"max_model_len": 99})


def test_other_pipelines_are_tried_by_their_parts(tmp_path: Path) -> None:
    """What has the parts gets stages; what has not is told what is known."""
    part = ["diffusers", "Some"]
    index = {
        "_class_name": "SomePipeline",
        "transformer": part,
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": part,
        "text_encoder": ["transformers", "T5EncoderModel"],
    }
    file = tmp_path / "model_index.json"
    file.write_text(json.dumps(index))
    assert [s.stage_id for s in resolved(tmp_path).stages] == ["encode", "dit", "decode"]
    assert OtherDiffusion.name in {f.name for f in families()}
    for change in (
        {"text_encoder": [None, None]},
        {"vae": ["diffusers", "AutoencoderKLCogVideoX"]},
        {"vision_language_encoder": part},
    ):
        file.write_text(json.dumps({**index, **change}))
        with pytest.raises(ConfigError, match=r"SomePipeline.*known: .*Qwen-Image, .*Z-Image"):
            resolved(tmp_path)

"""Every example script, on a tiny model with random weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import av
import pytest
from diffusion_helpers import picture
from PIL import Image
from served import EXAMPLES, make_model
from served import run_example as run
from sounds import tone
from tiny_csm import SAMPLE_RATE, make_csm
from tiny_families import make
from tiny_glm_image import make_glm_image

from omniq.outputs.sound import to_int16, wav_file

SMALL = ["--height", "32", "--width", "48", "--steps", "2", "--dtype", "float32"]

#: Scripts that ask a server are run beside the tests of one.
SERVE = Path(__file__).parents[1] / "serve"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_every_script_is_run_and_in_the_list() -> None:
    tests = "".join(p.read_text() for p in (Path(__file__), *SERVE.glob("test_*.py")))
    text = (EXAMPLES / "README.md").read_text()
    scripts = {p.name for p in EXAMPLES.glob("*.py")} - {"common.py"}
    assert scripts
    assert all(f'"{name}"' in tests and name in text for name in scripts)


def test_tiny_omni(tmp_path: Path) -> None:
    assert "circle" in run("tiny_omni.py", "-o", tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").size == (64, 64)


@pytest.mark.parametrize("family", ["z_image", "qwen_image", "sd3"])
def test_text_to_image(tmp_path: Path, family: str) -> None:
    """FLUX.1 is what tests/serve asks a server for."""
    folder = make(family, tmp_path / "model")
    run("text_to_image.py", folder, *SMALL, "-o", tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").size == (48, 32)


@pytest.mark.parametrize("family", ["flux2_klein", "qwen_image_edit"])
def test_editing(tmp_path: Path, family: str) -> None:
    folder = make(family, tmp_path / "model")
    Image.fromarray(picture(1, 64, 64).numpy()).save(tmp_path / "shown.png")
    run(
        "edit_image.py", folder, *SMALL, "--image", tmp_path / "shown.png", "-o", tmp_path / "a.png"
    )
    assert Image.open(tmp_path / "a.png").size == (48, 32)


def test_video(tmp_path: Path) -> None:
    folder = make("wan", tmp_path / "model")
    run("video.py", folder, *SMALL, "--frames", "5", "-o", tmp_path / "a.mp4")
    with av.open(tmp_path / "a.mp4") as video:
        assert len(list(video.decode(video=0))) == 5


def test_glm_image(tmp_path: Path) -> None:
    folder, shown, made = (tmp_path / name for name in ("model", "a.png", "b.png"))
    make_glm_image(folder)
    Image.fromarray(picture(1, 64, 64).numpy()).save(shown)
    size = ["--height", "64", "--width", "96", "--steps", "2", "--dtype", "float32"]
    run("glm_image.py", folder, *size, "--image", shown, "-o", made)
    assert Image.open(made).size == (96, 64)


def test_speech(tmp_path: Path) -> None:
    folder = make_csm(tmp_path / "model")
    recorded = to_int16(tone(SAMPLE_RATE, 0.2))
    (tmp_path / "voice.wav").write_bytes(wav_file(recorded, SAMPLE_RATE, {}))
    ref = ["--ref-audio", tmp_path / "voice.wav", "--ref-text", "a star"]
    said = run("speak.py", folder, *ref, "--max-tokens", "10", "-o", tmp_path / "a.wav")
    assert said.endswith("a.wav: 0.80 s\n")
    with av.open(tmp_path / "a.wav") as sound:
        assert sound.streams.audio[0].rate == SAMPLE_RATE


def test_language_model(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    said = run("language_model.py", folder, "--engine", "transformers", "--max-tokens", "8")
    assert said.strip()


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")
def test_embeddings(tmp_path: Path) -> None:
    lines = run("embeddings.py", make_model(tmp_path / "model"), "--max-model-len", "64")
    assert all(-1.001 <= float(line.partition(": ")[2]) <= 1.001 for line in lines.splitlines())
    assert len(lines.splitlines()) == 2

"""Every example script, on a tiny model with random weights."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import av
import pytest
from diffusion_helpers import picture
from PIL import Image
from served import make_model
from tiny_csm import make_csm
from tiny_families import make
from tiny_glm_image import make_glm_image

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--height", "32", "--width", "48", "--steps", "2", "--dtype", "float32"]

#: Ask a server; tests/serve runs them beside theirs.
SERVED = ("qwen_omni.py",)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(script: str, *args: str | Path) -> str:
    command = [sys.executable, str(EXAMPLES / script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_script_is_run_here_and_in_the_list() -> None:
    tests, text = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text()
    scripts = {p.name for p in EXAMPLES.glob("*.py")} - {"common.py"}
    assert scripts
    assert all(f'"{name}"' in tests and name in text for name in scripts)


def test_tiny_omni(tmp_path: Path) -> None:
    assert "circle" in run("tiny_omni.py", "-o", tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").size == (64, 64)


def test_text_to_image(tmp_path: Path) -> None:
    folder = make("z_image", tmp_path / "model")
    run("text_to_image.py", folder, *SMALL, "-o", tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").size == (48, 32)


def test_editing(tmp_path: Path) -> None:
    folder = make("flux2_klein", tmp_path / "model")
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
    folder, made, again = (tmp_path / name for name in ("model", "a.png", "b.png"))
    make_glm_image(folder)
    size = ["--height", "64", "--width", "96", "--steps", "2", "--dtype", "float32"]
    run("glm_image.py", folder, *size, "-o", made)
    run("glm_image.py", folder, *size, "--image", made, "-o", again)
    assert Image.open(made).size == Image.open(again).size == (96, 64)


def test_speech(tmp_path: Path) -> None:
    folder = make_csm(tmp_path / "model")
    said = run("speak.py", folder, "--max-tokens", "10", "-o", tmp_path / "a.wav")
    assert said.endswith("a.wav: 0.80 s\n")
    with av.open(tmp_path / "a.wav") as sound:
        assert sound.streams.audio[0].rate == 24_000


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

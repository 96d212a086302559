"""The shipped model and the program that scores it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny_omni.evaluate import evaluate
from tiny_omni.score import Tally, score_picture
from tiny_omni.shapes import caption, parse_caption, render, sample_prompt, sample_scene

MODEL = Path(__file__).resolve().parents[2] / "omniq" / "models" / "tiny_omni"


def test_the_scorer_reads_rendered_pictures() -> None:
    rng, tally = random.Random(5), Tally()
    for _ in range(150):
        scene = sample_scene(rng)
        tally.add(score_picture(render(scene, rng), scene))
    assert tally.accuracy()["overall"] >= 0.99


def test_the_scorer_sees_what_is_wrong() -> None:
    """Each picture is judged against the scene of another one: that must not look right."""
    rng, tally = random.Random(6), Tally()
    scenes = [sample_scene(rng) for _ in range(150)]
    for scene, other in zip(scenes, scenes[1:] + scenes[:1], strict=True):
        tally.add(score_picture(render(scene, rng), other))
    assert tally.accuracy()["overall"] < 0.5


def test_captions_say_exactly_their_scene() -> None:
    rng = random.Random(7)
    for _ in range(300):
        _, scene = sample_prompt(rng)
        assert parse_caption(caption(scene)) == scene


def test_the_shipped_weights_are_small() -> None:
    size = sum(f.stat().st_size for f in MODEL.rglob("*") if f.is_file())
    assert 1_000_000 < size <= 12 * 2**20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_at_least_nine_of_ten_attributes_are_right_on_held_out_prompts() -> None:
    result = evaluate(MODEL, 60, temperature=0.7)
    print(result.accuracy)
    assert result.accuracy["overall"] >= 0.9
    assert result.captions_consistent >= 0.95

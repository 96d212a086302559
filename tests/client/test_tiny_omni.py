"""OmniLLM with the built-in model, from prompt to picture."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from omniq import OmniLLM, OmniRequestOutput

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm() -> Iterator[OmniLLM]:
    with OmniLLM("tiny-omni") as running:
        yield running


def pixels(output: OmniRequestOutput) -> np.ndarray:
    (image,) = output.images
    assert image.size == (64, 64)
    return np.asarray(image.convert("RGB")).astype(int)


def centre(mask: np.ndarray) -> float:
    """Mean row of the pixels in ``mask``."""
    assert mask.sum() > 30
    return float(np.nonzero(mask)[0].mean())


def test_prompts_become_the_right_pictures_in_their_order(llm: OmniLLM) -> None:
    over, under = llm.generate(
        ["a red circle above a blue square", "a blue square above a red circle"], seed=7
    )
    for output, red_is_above in ((over, True), (under, False)):
        red, green, blue = np.moveaxis(pixels(output), -1, 0)
        reds = centre((red > 150) & (green < 100) & (blue < 100))
        blues = centre((blue > 150) & (red < 100) & (green < 130))
        assert (reds < blues) == red_is_above
        assert output.text
        assert "circle" in output.text


def test_same_seed_gives_the_same_picture(llm: OmniLLM) -> None:
    """Three jobs at once; bit for bit when asked for."""
    first, again, other = llm.generate(
        ["a green triangle"] * 3, [{"seed": seed, "deterministic": True} for seed in (1, 1, 2)]
    )
    assert (pixels(first) == pixels(again)).all()
    assert (pixels(first) != pixels(other)).any()


def test_same_seed_gives_nearly_the_same_picture_by_default(llm: OmniLLM) -> None:
    """Forwards shared with other requests round differently: a pixel moves by one step at most."""
    first, again = llm.generate(["a green triangle"] * 2, seed=1)
    assert first.text == again.text
    assert abs(pixels(first) - pixels(again)).max() <= 1


def test_output_tells_what_each_stage_took(llm: OmniLLM) -> None:
    (output,) = llm.generate("a yellow circle", num_inference_steps=4)
    assert list(output.stages) == ["ar", "dit", "decode"]
    ends = [(s.started or 0, s.finished or 0) for s in output.stages.values()]
    assert ends == sorted(ends)
    assert output.stages["dit"].total == 4

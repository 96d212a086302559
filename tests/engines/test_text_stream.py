"""Incremental decoding and sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import make_tokenizer

from omniq.engines.sampling import Sampler, Sampling
from omniq.engines.text import TextStream
from omniq.errors import EngineError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.mark.parametrize(
    "text", ["a red circle", "naïve 🙂 日本語 text", "  two  spaces ", "\n", "👩‍👩‍👧 end"]
)
def test_pieces_join_to_the_whole_text(tokenizer: Any, text: str) -> None:
    """No piece ever ends inside a character."""
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in tokenizer(text)["input_ids"]] + [stream.finish()]
    assert "".join(pieces) == text == stream.text
    assert not any("\ufffd" in p for p in pieces)


def test_incomplete_character_comes_out_only_at_the_end(tokenizer: Any) -> None:
    stream = TextStream(tokenizer)
    ids = tokenizer("a🙂")["input_ids"]
    assert "".join(stream.push(i) for i in ids[:-1]) == "a"
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_not_text(tokenizer: Any) -> None:
    stream = TextStream(tokenizer)
    for i in tokenizer("a<|im_start|>b<|im_end|>")["input_ids"]:
        stream.push(i)
    assert stream.finish() == ""
    assert stream.text == "ab"


def test_stop_string_across_tokens_is_never_given_out(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, stop=("circle ab", "zzz"))
    given = ""
    for i in tokenizer("a red circle above")["input_ids"]:
        given += stream.push(i)
        assert "circle a" not in given
        if stream.stopped:
            break
    assert stream.stopped
    assert given == stream.text == "a red "
    assert stream.finish() == ""


def test_beginning_of_a_stop_string_is_given_out_in_the_end(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, stop=("circle!",))
    text = "a red circle"
    early = "".join(stream.push(i) for i in tokenizer(text)["input_ids"])
    assert early != text
    assert early + stream.finish() == text
    assert not stream.stopped


def test_unset_parameters_take_the_defaults() -> None:
    assert Sampling.from_params({"temperature": None, "top_k": -1}) == Sampling()
    assert Sampling.from_params({"stop": ["", "x"]}).stop == ("x",)


def test_greedy_takes_the_most_likely_token() -> None:
    assert Sampler(Sampling(temperature=0.0), []).pick(torch.tensor([0.0, 3.0, 1.0])) == 1


def test_seed_fixes_the_draws() -> None:
    logits = torch.randn(100)
    draws = [
        [sampler.pick(logits) for _ in range(20)]
        for sampler in (Sampler(Sampling(seed=s), []) for s in (1, 1, 2))
    ]
    assert draws[0] == draws[1] != draws[2]


def _drawn(sampling: Sampling, logits: torch.Tensor) -> set[int]:
    sampler = Sampler(sampling, [])
    return {sampler.pick(logits) for _ in range(300)}


def test_top_k_and_top_p_limit_the_choice() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert _drawn(Sampling(seed=0), logits) == {0, 1, 2, 3}
    assert _drawn(Sampling(seed=0, top_k=2), logits) == {2, 3}
    assert _drawn(Sampling(seed=0, top_p=0.65), logits) == {2, 3}
    assert _drawn(Sampling(seed=0, top_p=1e-9), logits) == {3}


def test_draws_follow_the_distribution() -> None:
    sampler = Sampler(Sampling(seed=0, temperature=2.0), [])
    logits = torch.tensor([0.2, 0.8]).log() * 2.0
    share = sum(sampler.pick(logits) for _ in range(2000)) / 2000
    assert share == pytest.approx(0.8, abs=0.03)


def test_repetition_penalty_covers_prompt_and_output() -> None:
    sampler = Sampler(Sampling(temperature=0.0, repetition_penalty=2.0), [2])
    logits = torch.tensor([-1.0, 1.5, 2.0, 1.0])
    assert [sampler.pick(logits) for _ in range(2)] == [1, 2]


def test_nan_logits_are_an_engine_error() -> None:
    with pytest.raises(EngineError, match="NaN"):
        Sampler(Sampling(), []).pick(torch.tensor([0.0, float("nan")]))

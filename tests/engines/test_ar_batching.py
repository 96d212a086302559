"""The transformers engine serves requests in one forward pass a step, each as if it were alone."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import Recorder, ask, loaded, stage

from omniq.errors import InvalidRequest

PROMPT = "a red circle above a blue square"


@pytest.fixture(scope="module")
def engine(model: Path) -> Any:
    return asyncio.run(loaded(stage(model, "ar")))


def count_passes(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward pass from now on."""
    rows: list[int] = []
    forward = engine._forward

    def counting(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(ids.shape[0])
        return forward(ids, *args, **kwargs)

    monkeypatch.setattr(engine, "_forward", counting)
    return rows


async def test_requests_of_all_lengths_in_one_pass_give_what_each_gives_alone(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They join and leave at different steps; tokens and hidden states are compared."""

    async def one(i: int) -> Any:
        params = {"max_tokens": 12 + 5 * i, "temperature": 0.0}
        return await ask(engine, params, prompt=" ".join([PROMPT] * (1 + i % 3)) + f" {i}")

    alone = [await one(i) for i in range(6)]
    rows = count_passes(engine, monkeypatch)
    together = await asyncio.gather(*map(one, range(6)))
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a.tensors["token_ids"]["token_ids"], b.tensors["token_ids"]["token_ids"])
        torch.testing.assert_close(
            a.tensors["hidden_states"]["hidden_states"],
            b.tensors["hidden_states"]["hidden_states"],
            atol=1e-4,
            rtol=0,
        )
        assert a.values["text"] == b.values["text"]
    tokens = sum(o.metrics["completion_tokens"] for o in together)
    assert max(rows) == 6
    assert len(rows) < tokens / 2


async def test_a_cancelled_request_leaves_the_others_as_they_are(engine: Any) -> None:
    params = {"max_tokens": 40, "temperature": 0.0}
    alone = await ask(engine, params, prompt=PROMPT)
    seen = Recorder()
    gone = asyncio.create_task(ask(engine, {**params, "max_tokens": 150}, seen, prompt="blue"))
    other = asyncio.create_task(ask(engine, params, prompt=PROMPT))
    while len(seen.steps) < 5:
        await asyncio.sleep(0)
    gone.cancel()
    assert (await other).values["text"] == alone.values["text"]
    assert not engine._rows or all(g.unwanted or g.finished for g, _ in engine._rows)


async def test_a_request_that_fails_leaves_the_others_as_they_are(engine: Any) -> None:
    params = {"max_tokens": 20, "temperature": 0.0}
    alone = await ask(engine, params, prompt=PROMPT)
    wrong = {**params, "allowed_token_ids": [10**6]}
    good, bad = await asyncio.gather(
        ask(engine, params, prompt=PROMPT),
        ask(engine, wrong, prompt=PROMPT),
        return_exceptions=True,
    )
    assert not isinstance(good, BaseException)
    assert good.values["text"] == alone.values["text"]
    assert isinstance(bad, InvalidRequest)
    assert bad.fields[0]["field"] == "parameters.allowed_token_ids"


async def test_several_answers_share_the_prompts_pass(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = {"max_tokens": 10, "temperature": 1.0, "seed": 3}
    alone = [await ask(engine, {**params, "seed": 3 + i}, prompt=PROMPT) for i in range(3)]
    rows = count_passes(engine, monkeypatch)
    out = await ask(engine, {**params, "n": 3}, prompt=PROMPT)
    assert [c["text"] for c in out.values["choices"]] == [a.values["text"] for a in alone]
    assert out.values["text"] == alone[0].values["text"]
    assert rows[0] == 1
    assert max(rows) == 3
    assert out.metrics["completion_tokens"] == sum(a.metrics["completion_tokens"] for a in alone)


async def test_logprobs_are_those_of_the_model(engine: Any) -> None:
    ids = engine._encoder.encode(PROMPT, 256)
    out = await ask(engine, {"max_tokens": 3, "temperature": 0.0, "logprobs": 2}, token_ids=ids)
    tokens = out.tensors["token_ids"]["token_ids"].tolist()
    with torch.no_grad():
        logits = engine._model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    for i, found in enumerate(out.values["logprobs"]):
        assert found["token_id"] == tokens[i]
        assert found["logprob"] == pytest.approx(float(expected[i, tokens[i]]), abs=1e-4)
        assert found["rank"] == 1
        top = expected[i].topk(2).indices.tolist()
        assert [t["token_id"] for t in found["top_logprobs"]] == top


async def test_messages_prompt_and_token_ids_are_the_same_request(engine: Any) -> None:
    params = {"max_tokens": 8, "temperature": 0.0}
    by_prompt = await ask(engine, params, prompt=PROMPT)
    messages = [{"role": "user", "content": PROMPT}]
    by_messages = await ask(engine, params, messages=messages)
    by_ids = await ask(engine, params, token_ids=engine._encoder.encode(PROMPT, 256))
    assert by_prompt.values == by_messages.values == by_ids.values
    with pytest.raises(InvalidRequest, match="needs exactly one of"):
        await ask(engine, params, prompt=PROMPT, messages=messages)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"ignore_eos": True, "allowed_token_ids": [2, 5], "max_tokens": 4}, 4),
        ({"stop_token_ids": [5], "allowed_token_ids": [5]}, 1),
        ({"stop_token_ids": [5], "allowed_token_ids": [5, 6], "min_tokens": 4}, 5),
    ],
)
async def test_length_controls(engine: Any, params: dict[str, Any], expected: int) -> None:
    given = {"temperature": 0.0, "logit_bias": {"5": 50.0}, "max_tokens": 9, **params}
    out = await ask(engine, given, prompt=PROMPT)
    assert out.metrics["completion_tokens"] == expected


async def test_what_only_vllm_has_is_refused_by_name(engine: Any) -> None:
    with pytest.raises(InvalidRequest, match="does not have it") as caught:
        await ask(engine, {"bad_words": ["x"], "prompt_logprobs": 1}, prompt=PROMPT)
    assert [f["field"] for f in caught.value.fields] == [
        "parameters.bad_words",
        "parameters.prompt_logprobs",
    ]


async def test_a_model_with_a_sliding_window_takes_turns_instead(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache has no columns to align; the results are those of transformers all the same."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    base = Qwen3Config.from_pretrained(model / "text_encoder")
    config = Qwen3Config(
        **{
            **base.to_dict(),
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention"] * base.num_hidden_layers,
        }
    )
    reference = Qwen3ForCausalLM(config).eval()
    reference.save_pretrained(tmp_path / "text_encoder")
    shutil.copytree(model / "tokenizer", tmp_path / "tokenizer")
    engine: Any = await loaded(stage(tmp_path, "ar"))
    ids = engine._encoder.encode(PROMPT, 256)
    with torch.no_grad():
        made = reference.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    rows = count_passes(engine, monkeypatch)
    params = {"max_tokens": 12, "temperature": 0.0}
    outs = await asyncio.gather(*[ask(engine, params, prompt=PROMPT) for _ in range(3)])
    for out in outs:
        assert out.tensors["token_ids"]["token_ids"].tolist() == made[0, len(ids) :].tolist()
    assert set(rows) == {1}


async def test_recommended_parameters_of_the_model_are_the_defaults(
    model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model / "text_encoder", tmp_path / "text_encoder")
    shutil.copytree(model / "tokenizer", tmp_path / "tokenizer")
    file = tmp_path / "text_encoder" / "generation_config.json"
    more = {"do_sample": True, "top_k": 1, "max_new_tokens": 5}
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    engine = await loaded(stage(tmp_path, "ar"))
    out = await ask(engine, {}, prompt=PROMPT)
    greedy = await ask(engine, {"temperature": 0.0}, prompt=PROMPT)
    assert out.values["text"] == greedy.values["text"]
    assert out.metrics["completion_tokens"] == 5
    plain = await loaded(stage(tmp_path, "ar", engine_args={"generation_config": "vllm"}))
    longer = await ask(plain, {"max_tokens": 7, "temperature": 0.0}, prompt=PROMPT)
    assert longer.metrics["completion_tokens"] == 7

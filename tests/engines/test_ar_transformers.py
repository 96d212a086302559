"""The transformers AR engine against ``generate`` of the same model."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import Recorder, ask, loaded, stage, until
from tiny_models import HIDDEN

from omniq.errors import ConfigError, EngineError, InvalidRequest

PROMPT = "a red circle above a blue square"
GREEDY = {"max_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def engine(model: Path) -> Any:
    return asyncio.run(loaded(stage(model, "ar")))


@torch.no_grad()
def generate(folder: Path, prompt: str, n: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens [n] and rows [n, hidden] by transformers' own ``generate``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder.parent / "tokenizer")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = reference.generate(
        **inputs,
        max_new_tokens=n,
        do_sample=False,
        return_dict_in_generate=True,
        output_hidden_states=True,
    )
    tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    rows = torch.cat([step[-1][0, -1:] for step in out.hidden_states])
    return tokens, rows


async def test_greedy_equals_generate(engine: Any, model: Path) -> None:
    """Tokens equal; row i is the last hidden state that predicted token i."""
    tokens, rows = generate(model / "text_encoder", PROMPT, 24)
    out = await ask(engine, GREEDY, prompt=PROMPT)
    assert out.tensors["token_ids"]["token_ids"].tolist() == tokens
    hidden = out.tensors["hidden_states"]["hidden_states"]
    assert hidden.shape == (24, HIDDEN)
    torch.testing.assert_close(hidden, rows, atol=1e-5, rtol=0)
    assert len(set(tokens)) > 8  # the model says different things, or the test would prove little
    assert out.values["finish_reason"] == "length"
    assert out.metrics["completion_tokens"] == 24
    assert out.metrics["prompt_tokens"] > 8


async def test_pieces_and_progress_are_emitted_while_generating(engine: Any) -> None:
    seen = Recorder()
    out = await ask(engine, GREEDY, seen, prompt=PROMPT)
    assert seen.steps == [(i, 24) for i in range(1, 25)]
    assert len(seen.pieces) > 8
    assert "".join(seen.pieces) == out.values["text"]


async def test_end_token_ends_and_keeps_its_row(model: Path, tmp_path: Path) -> None:
    tokens, rows = generate(model / "text_encoder", PROMPT, 24)
    end = next(i for i in range(5, 24) if tokens[i] not in tokens[:i])
    shutil.copytree(model / "text_encoder", tmp_path / "text_encoder")
    shutil.copytree(model / "tokenizer", tmp_path / "tokenizer")
    file = tmp_path / "text_encoder" / "generation_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "eos_token_id": [tokens[end]]}))
    engine = await loaded(stage(tmp_path, "ar"))
    out = await ask(engine, GREEDY, prompt=PROMPT)
    assert out.values["finish_reason"] == "stop"
    assert out.tensors["token_ids"]["token_ids"].tolist() == tokens[: end + 1]
    hidden = out.tensors["hidden_states"]["hidden_states"]
    torch.testing.assert_close(hidden, rows[: end + 1], atol=1e-5, rtol=0)


async def test_stop_string_ends_the_text(engine: Any) -> None:
    full = (await ask(engine, GREEDY, prompt=PROMPT)).values["text"]
    stop = full[6:9]
    out = await ask(engine, {**GREEDY, "stop": [stop]}, prompt=PROMPT)
    assert out.values["text"] == full[: full.index(stop)]
    assert out.values["finish_reason"] == "stop"
    count = len(out.tensors["token_ids"]["token_ids"])
    assert count < 24
    assert out.tensors["hidden_states"]["hidden_states"].shape[0] == count


async def test_seeded_requests_do_not_depend_on_each_other(engine: Any) -> None:
    """Eight at once give what each gives alone."""

    async def one(seed: int) -> list[int]:
        params = {"max_tokens": 12 + seed, "temperature": 1.0, "top_p": 0.9, "seed": seed}
        out = await ask(engine, params, prompt=f"{PROMPT} {seed}")
        return list(out.tensors["token_ids"]["token_ids"].tolist())

    alone = [await one(seed) for seed in range(8)]
    assert await asyncio.gather(*[one(seed) for seed in range(8)]) == alone


async def test_requests_in_flight_take_turns(engine: Any) -> None:
    """A short request that comes second is done long before a long first one."""
    long = Recorder()
    first = asyncio.create_task(
        ask(engine, {"max_tokens": 150, "temperature": 0.0}, long, prompt=PROMPT)
    )
    await until(lambda: bool(long.steps), first)
    await ask(engine, {"max_tokens": 5, "temperature": 0.0}, prompt=PROMPT)
    assert long.steps[-1][0] < 30
    await first


async def test_cancel_stops_within_one_token(engine: Any) -> None:
    seen = Recorder()
    task = asyncio.create_task(
        ask(engine, {"max_tokens": 200, "temperature": 0.0}, seen, prompt=PROMPT)
    )
    await until(lambda: len(seen.steps) >= 3, task)
    steps = len(seen.steps)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.in_thread(int)
    assert len(seen.steps) <= steps + 1


async def test_hidden_states_only_when_the_stage_gives_them(model: Path) -> None:
    engine = await loaded(stage(model, "ar", output_modalities=["text"]))
    assert "hidden_states" not in (await ask(engine, GREEDY, prompt=PROMPT)).tensors


async def test_generation_ends_with_the_context(model: Path) -> None:
    engine = await loaded(stage(model, "ar", engine_args={"max_model_len": 40}))
    out = await ask(engine, {"temperature": 0.0}, prompt=PROMPT)
    total = out.metrics["prompt_tokens"] + out.metrics["completion_tokens"]
    assert (total, out.values["finish_reason"]) == (40, "length")
    with pytest.raises(InvalidRequest, match="must have 1 to 39 tokens") as caught:
        await ask(engine, GREEDY, prompt=PROMPT * 10)
    assert caught.value.fields[0]["field"] == "input.prompt"


async def test_without_chat_template_the_prompt_goes_in_as_it_is(model: Path) -> None:
    engine = await loaded(stage(model, "ar", engine_args={"chat_template": False}))
    tokens = engine._encoder.tokenizer(PROMPT)["input_ids"]
    out = await ask(engine, GREEDY, prompt=PROMPT)
    assert out.metrics["prompt_tokens"] == len(tokens)


async def test_wrong_inputs_are_named(engine: Any) -> None:
    with pytest.raises(
        InvalidRequest, match="exactly one of prompt, messages, token_ids; got: text"
    ):
        await ask(engine, GREEDY, text=PROMPT)
    with pytest.raises(InvalidRequest, match="must be text, not int"):
        await ask(engine, GREEDY, prompt=3)


async def test_wrong_configuration_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'max_len'; allowed: .*max_model_len"):
        await loaded(stage(model, "ar", engine_args={"max_len": 3}))
    with pytest.raises(ConfigError, match="no folder"):
        await loaded(stage(model, "ar", subfolder="nothing"))
    with pytest.raises(ConfigError, match="no model folder"):
        await loaded(stage(tmp_path / "gone", "ar"))
    with pytest.raises(ConfigError, match="no tokenizer files"):
        await loaded(stage(model, "ar", subfolder="vae/.."))


async def test_nan_in_the_model_is_an_engine_error(model: Path) -> None:
    engine: Any = await loaded(stage(model, "ar"))
    with torch.no_grad():
        engine._model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="NaN"):
        await ask(engine, GREEDY, prompt=PROMPT)

"""What a request to the vLLM engine may hold: prompts of every kind, adapters, tools, refusals."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine_helpers import Recorder, ask, loaded, stage, until
from safetensors.torch import save_file
from tiny_models import CHAT_TEMPLATE

from omniq.engines.base import NullEmit, StageInput, StageRequest
from omniq.errors import ConfigError, EngineDead, InvalidRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

PROMPT = "a red circle above a blue square"
GREEDY = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "paint", "arguments": {"colour": "red"}}</tool_call>'
LORA_SCALE = 4.0


@pytest.fixture(scope="module")
def chat_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a template that knows tools and variables, and with thinking tokens."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("chat")
    shutil.copytree(model / "text_encoder", folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model / "tokenizer")
    # In the vocabulary already: the model has no rows for more.
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}\n{% endif %}{% if style %}{{ style }}\n{% endif %}"
        "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tool first') }}{% endif %}"
        + CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of rank 4 on the query projections, as peft writes it."""
    folder = tmp_path_factory.mktemp("adapter")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 4 * LORA_SCALE,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = json.loads((model / "text_encoder" / "config.json").read_text())
    hidden = weights["hidden_size"]
    out = weights["num_attention_heads"] * weights["head_dim"]
    torch.manual_seed(5)
    tensors = {}
    for layer in range(weights["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, hidden) * 0.3
        tensors[f"{name}.lora_B.weight"] = torch.randn(out, 4) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(chat_model: Path, adapter: Path) -> AsyncIterator[Any]:
    args = {
        "max_model_len": 192,
        "in_process": True,
        "lora_modules": {"painter": str(adapter)},
        "max_lora_rank": 8,
        "enable_prompt_embeds": True,
        "tool_call_parser": "hermes",
    }
    config = stage(
        chat_model,
        "ar",
        engine="vllm",
        subfolder=None,
        output_modalities=["text"],
        engine_args=args,
    )
    engine = await loaded(config)
    yield engine
    await engine.unload()


async def _run(engine: Any, params: Any, emit: Any = None, **inputs: Any) -> Any:
    given = {k: v if isinstance(v, StageInput) else StageInput(v) for k, v in inputs.items()}
    return await engine.run(StageRequest("test", params), given, emit or NullEmit())


def _tokens(out: Any) -> list[int]:
    return list(out.tensors["token_ids"]["token_ids"].tolist())


@torch.no_grad()
def _greedy(model: Any, ids: list[int], count: int = 16) -> list[int]:
    made = list(ids)
    for _ in range(count):
        made.append(int(model(torch.tensor([made])).logits[0, -1].argmax()))
    return made[len(ids) :]


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    folder = model / "text_encoder"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def test_a_prompt_in_each_of_its_forms(engine: Any, reference: Any) -> None:
    """The same conversation as text, messages, ids and embeddings gives the same tokens."""
    tokenizer = engine._reader._encoder.tokenizer
    messages = [{"role": "user", "content": PROMPT}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    expected = _greedy(reference, ids)
    embeds = reference.get_input_embeddings()(torch.tensor(ids)).detach()
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    for inputs in (
        {"prompt": PROMPT},
        {"messages": messages},
        {"messages": parts},
        {"token_ids": ids},
        {"token_ids": StageInput(tensors={"ids": torch.tensor(ids)})},
        {"prompt_embeds": StageInput(tensors={"e": embeds})},
        {"prompt_embeds": StageInput(tensors={"e": embeds[None]})},
    ):
        out = await _run(engine, GREEDY, **inputs)
        assert _tokens(out) == expected, inputs
        assert out.values["usage"]["prompt_tokens"] == len(ids)


async def test_template_gets_tools_and_variables(engine: Any) -> None:
    tokenizer = engine._reader._encoder.tokenizer
    params = {**GREEDY, "tools": [TOOL], "chat_template_kwargs": {"style": "oil"}}
    for name, value in (("prompt", PROMPT), ("messages", [{"role": "user", "content": PROMPT}])):
        prompt = engine._reader.read({name: StageInput(value)}, params)
        text = tokenizer.decode(prompt.engine_input["prompt_token_ids"])
        assert text.startswith(json.dumps([TOOL]) + "\noil\n<|im_start|>user\n" + PROMPT)


async def test_adapter_by_request(engine: Any, model: Path, adapter: Path, reference: Any) -> None:
    """Beside requests without one; equal to the model with the adapter merged in."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(model / "text_encoder", dtype=torch.float32)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for layer, block in enumerate(merged.model.layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        update = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        block.self_attn.q_proj.weight.data += LORA_SCALE * update
    ids = engine._reader._encoder.encode(PROMPT, 192)
    outs = await asyncio.gather(
        *[
            _run(engine, {**GREEDY, **({"lora": "painter"} if i % 2 else {})}, prompt=PROMPT)
            for i in range(4)
        ]
    )
    plain, adapted = _greedy(reference, ids), _greedy(merged.eval(), ids)
    assert plain != adapted
    assert [_tokens(out) for out in outs] == [plain, adapted, plain, adapted]


async def test_tool_calls_are_read_out_of_the_text(engine: Any) -> None:
    seen = Recorder()
    calls: list[Any] = []

    def delta(output: str, value: Any) -> None:
        (calls if output == "tool_calls" else seen.pieces).append(value)

    seen.delta = delta  # type: ignore[method-assign]
    params = {
        "max_tokens": 120,
        "tools": [TOOL],
        "structured_outputs": {"choice": ["yes " + CALL]},
    }
    out = await _run(engine, params, seen, prompt=PROMPT)
    (call,) = out.values["tool_calls"]
    assert call["function"]["name"] == "paint"
    assert json.loads(call["function"]["arguments"]) == {"colour": "red"}
    assert out.values["text"].strip() == "yes"
    assert "".join(p["text"] for p in seen.pieces).strip() == "yes"
    streamed = [c["function"] for event in calls for c in event["tool_calls"]]
    assert "".join(f.get("name") or "" for f in streamed) == "paint"
    assert json.loads("".join(f.get("arguments") or "" for f in streamed)) == {"colour": "red"}
    # Without tools the same text is text.
    del params["tools"]
    assert (await _run(engine, params, prompt=PROMPT)).values["text"] == "yes " + CALL


async def test_what_nobody_streams_is_not_said_in_pieces(engine: Any) -> None:
    """The same answer, with its progress, but no text before the whole is there."""
    params = {**GREEDY, "max_tokens": 70, "ignore_eos": True, "logprobs": 1}
    said, quiet = Recorder(), Recorder()
    streamed = await _run(engine, params, said, prompt=PROMPT)
    request = StageRequest("quiet", params, stream=False)
    whole = await engine.run(request, {"prompt": StageInput(PROMPT)}, quiet)
    assert _tokens(whole) == _tokens(streamed)
    assert whole.values["text"] == streamed.values["text"] == "".join(said.pieces)
    assert whole.values["logprobs"] == streamed.values["logprobs"]
    assert quiet.pieces == []
    assert quiet.steps[-1] == said.steps[-1] == (70, 70)
    assert 0 < whole.metrics["first_token_seconds"] < whole.metrics["generation_seconds"]


async def test_reasoning_is_read_out_of_the_text(chat_model: Path) -> None:
    """By vLLM's parser, in pieces and as a whole."""
    from transformers import AutoTokenizer

    from omniq.engines.vllm.parsers import Parsers

    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    parser = Parsers(tokenizer, reasoning="deepseek_r1").of_request({})
    assert parser is not None
    text = "<think>red, then blue</think>A square."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = parser.sequence().whole(text, ids)
    assert (whole.reasoning, whole.text) == ("red, then blue", "A square.")
    reading = parser.sequence()
    pieces = [
        reading.push(tokenizer.decode([i]), [i], [5], finished=at == len(ids) - 1)
        for at, i in enumerate(ids)
    ]
    assert "".join(p.reasoning for p in pieces) == "red, then blue"
    assert "".join(p.text for p in pieces) == "A square."


@pytest.mark.parametrize(
    ("params", "field", "message"),
    [
        ({"lora": "poet"}, "parameters.lora", "no adapter 'poet'; allowed: painter"),
        ({"dimensions": 3}, "parameters.dimensions", "only stages of pooling models"),
        ({"logprobs": 50}, "parameters.logprobs", "greater than max allowed: 20"),
        ({"prompt_logprobs": 50}, "parameters.prompt_logprobs", "greater than max allowed: 20"),
        ({"stop_token_ids": [9999]}, "parameters.stop_token_ids", "Vocabulary size"),
        ({"logit_bias": {"9999": 1.0}}, "parameters.logit_bias", "Vocabulary size"),
        ({"allowed_token_ids": [9999]}, "parameters.allowed_token_ids", "out-of-vocab"),
        ({"logprob_token_ids": [9999]}, "parameters.logprob_token_ids", "out-of-vocab"),
        ({"n": 2, "temperature": 0.0}, "parameters.n", "n must be 1"),
        (
            {"structured_outputs": {"regex": "("}},
            "parameters.structured_outputs",
            "",
        ),
        (
            {"structured_outputs": {"json": "{"}},
            "parameters.structured_outputs",
            "",
        ),
        ({"structured_outputs": {"grammar": "x ::= ("}}, "parameters.structured_outputs", ""),
        ({"tools": [{"type": "nonsense"}]}, "parameters.tools", "function"),
        ({"deterministic": True}, "parameters.deterministic", "VLLM_BATCH_INVARIANT=1"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            "input.chat_template_kwargs",
            "cannot be set: tokenize",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "parameters.tools",
            "tools.0.function.parameters: Input should be a valid dictionary",
        ),
    ],
)
async def test_what_vllm_refuses_names_the_field(
    engine: Any, params: Any, field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await _run(engine, {"max_tokens": 4, **params}, prompt=PROMPT)
    assert [f["field"] for f in caught.value.fields] == [field]
    assert message in caught.value.fields[0]["message"]
    assert _tokens(await _run(engine, {**GREEDY, "max_tokens": 2}, prompt=PROMPT))


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ({}, "input.prompt"),
        ({"text": "x"}, "input.prompt"),
        ({"prompt": "x", "token_ids": [1]}, "input.prompt"),
        ({"prompt": 3}, "input.prompt"),
        ({"messages": []}, "input.messages"),
        ({"messages": [{"content": "x"}]}, "input.messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "input.messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "input.messages"),
        ({"messages": [{"role": "user", "content": [{"type": "film"}]}]}, "input.messages"),
        ({"token_ids": [1, 323]}, "input.token_ids"),
        ({"token_ids": [-1]}, "input.token_ids"),
        ({"token_ids": ["a"]}, "input.token_ids"),
        ({"token_ids": []}, "input.token_ids"),
        ({"token_ids": [1] * 192}, "input.token_ids"),
        ({"prompt_embeds": StageInput(tensors={"e": torch.zeros(3, 7)})}, "input.prompt_embeds"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}],
                    }
                ]
            },
            "input.messages",
        ),
    ],
)
async def test_a_wrong_input_is_named(engine: Any, inputs: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await _run(engine, GREEDY, **inputs)
    assert [f["field"] for f in caught.value.fields] == [field]


async def test_urgent_requests_overtake(engine: Any) -> None:
    """All at once into 8 places: those of priority 9 are done before those of 0."""
    done: list[int] = []

    async def one(priority: int, i: int) -> None:
        request = StageRequest(f"p{i}", {**GREEDY, "max_tokens": 24}, priority)
        await engine.run(request, {"token_ids": StageInput([5 + i, 6, 7])}, NullEmit())
        done.append(priority)

    order = [0] * 24 + [9] * 8
    await asyncio.gather(*[one(p, i) for i, p in enumerate(order)])
    # The first 8 of priority 0 are running by then.
    assert done.index(9) <= 8
    last = len(done) - 1 - done[::-1].index(9)
    assert sum(p == 0 for p in done[:last]) <= 8


async def test_cancelled_requests_free_their_blocks(engine: Any) -> None:
    core = engine._engine.engine_core
    params = {"max_tokens": 150, "temperature": 1.0, "ignore_eos": True, "n": 2}
    tasks = [asyncio.create_task(_run(engine, params, prompt=PROMPT)) for _ in range(6)]

    async def used() -> float:
        return float(await core.call(lambda c: c.scheduler.kv_cache_manager.usage))

    while not await used():
        assert not any(t.done() for t in tasks)
    for task in tasks:
        task.cancel()
    assert all(
        isinstance(r, asyncio.CancelledError)
        for r in await asyncio.gather(*tasks, return_exceptions=True)
    )
    await until(lambda: not core._has_work())
    assert await used() == 0.0
    assert engine._engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_seqs": 3}, "unknown engine_args 'max_seqs'; allowed: .*max_num_seqs"),
        ({"max_num_seqs": "many"}, r"engine_args\.max_num_seqs: vLLM refuses 'many'"),
        ({"scheduling_policy": "lifo"}, "'lifo' is not allowed; allowed: fcfs, priority"),
        ({"enforce_eager": "yes"}, r"engine_args\.enforce_eager: .* must be true or false"),
        ({"worker_cls": "x.Y"}, "unknown engine_args 'worker_cls'"),
        (
            {"structured_outputs_config": {"backend": "none"}},
            r"engine_args\.structured_outputs_config: .*backend",
        ),
        ({"tool_parser_plugin": "/nowhere.py"}, r"engine_args\.tool_parser_plugin: no file"),
        ({"reasoning_parser": "deepseek_r1"}, "could not locate think start/end tokens"),
        ({"custom_chat_template": "nowhere"}, "neither a template nor a file"),
        ({"hidden_states": {"positions": "some"}}, r"engine_args\.hidden_states\.positions"),
        ({"tool_call_parser": "nobody"}, "vLLM has no parser 'nobody'; allowed: .*hermes"),
        ({"lora_modules": {"a": "/nowhere"}}, r"lora_modules\.a: no adapter_config\.json"),
        ({"max_model_len": 100_000}, "max_model_len"),
        (
            {"lora_modules": {"a": "<adapter>"}, "max_loras": 1},
            "max_loras must be at least 2 for 1 lora_modules on the CPU",
        ),
    ],
)
async def test_wrong_engine_arguments(model: Path, adapter: Path, args: Any, message: str) -> None:
    if "<adapter>" in args.get("lora_modules", {}).values():
        args = {**args, "lora_modules": {"a": str(adapter)}}
    with pytest.raises(ConfigError, match=message):
        await loaded(stage(model, "ar", engine="vllm", engine_args=args))


async def test_window_is_what_vllm_runs_and_some_headroom(model: Path) -> None:
    from omniq.config import OmniStageConfig
    from omniq.engines import create_engine

    def window(**more: Any) -> int:
        config = {"stage_id": "ar", "engine_type": "AR", "model": "x", "engine": "vllm", **more}
        return create_engine(OmniStageConfig.model_validate(config)).max_in_flight

    assert window() == 1
    assert window(max_in_flight=7) == 7
    assert window(engine_args={"max_num_seqs": 64}) == 72
    assert window(engine_args={"max_num_seqs": 4}) == 5
    assert window(max_in_flight=3, engine_args={"max_num_seqs": 64}) == 3


async def test_a_killed_engine_process_is_a_dead_engine(model: Path) -> None:
    import psutil

    engine = await loaded(stage(model, "ar", engine="vllm", engine_args={"max_model_len": 192}))
    try:
        seen = Recorder()
        params = {"max_tokens": 150, "temperature": 0.0, "ignore_eos": True}
        task = asyncio.create_task(ask(engine, params, seen, prompt=PROMPT))
        await until(lambda: len(seen.steps) >= 1, task)
        (core,) = [
            p
            for p in psutil.Process().children()
            if p.pid in {c.pid for c in _engine_processes(engine)}
        ]
        core.kill()
        with pytest.raises(EngineDead, match="vLLM has died"):
            await task
        with pytest.raises(EngineDead):
            await ask(engine, params, prompt=PROMPT)
    finally:
        await engine.unload()


def _engine_processes(engine: Any) -> list[Any]:
    return list(engine._engine.engine_core.resources.engine_manager.processes)

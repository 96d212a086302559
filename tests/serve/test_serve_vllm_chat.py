"""Pictures, reasoning, tool calls and log probabilities over HTTP, on a model that sees in vLLM."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served import Served, served
from tiny_vision import CHAT_TEMPLATE, Reference, make_vision_model, picture, turn

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

COUNT = 12
#: Before each conversation, by the template of ``--chat-template``.
GREETING = "be a painter\n"
PARAMETERS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
#: Strict: vLLM holds arguments to their schemas only then.
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": True}}
    for name in ("paint", "wipe")
]
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
BUDGET = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "Seer")


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    found = Reference(model)
    found.processor.chat_template = GREETING + CHAT_TEMPLATE
    return found


@pytest.fixture(scope="module")
def system(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "chat.jinja").write_text(GREETING + CHAT_TEMPLATE)
    flags = [
        *("--max-model-len", "1000", "--max-num-seqs", "8", "--dtype", "float32"),
        *("--limit-mm-per-prompt", '{"image": 2}', "--served-model-name", "seer"),
        *("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"),
        *("--enable-auto-tool-choice", "--chat-template", "chat.jinja"),
        *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        *("--response-role", "robot"),
    ]
    command = [sys.executable, "-m", "omniq", "serve", str(model), "--engine", "vllm", *flags]
    with served(folder, *command, timeout=200) as running:
        yield running


@pytest.fixture
def client(system: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, messages: Any, **more: Any) -> Any:
    """The answer, which a stream gives in pieces just the same."""
    body: dict[str, Any] = {"model": "seer", "messages": messages, "temperature": 0.0, **more}
    done = client.chat.completions.create(**body).choices[0]
    chunks = [c.choices[0] for c in client.chat.completions.create(**body, stream=True)]
    assert chunks[0].delta.role == done.message.role
    assert "".join(c.delta.content or "" for c in chunks) == (done.message.content or "")
    assert chunks[-1].finish_reason == done.finish_reason
    assert all(c.finish_reason is None for c in chunks[:-1])
    reasoning = "".join(getattr(c.delta, "reasoning", None) or "" for c in chunks)
    assert reasoning == (getattr(done.message, "reasoning", None) or "")
    assert joined(chunks) == [
        (call.function.name, json.loads(call.function.arguments))
        for call in done.message.tool_calls or ()
    ]
    logprobs = [t for c in chunks if c.logprobs for t in c.logprobs.content]
    assert logprobs == (done.logprobs.content if done.logprobs else [])
    return done


def joined(chunks: list[Any]) -> list[tuple[str, Any]]:
    """Calls out of the pieces of a stream."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for call in (call for c in chunks for call in c.delta.tool_calls or ()):
        names[call.index] = names.get(call.index, "") + (call.function.name or "")
        said = arguments.get(call.index, "") + (call.function.arguments or "")
        arguments[call.index] = said
    return [(names[i], json.loads(arguments[i])) for i in sorted(names)]


def test_a_picture_in_a_chat(client: openai.OpenAI, reference: Reference) -> None:
    """As transformers says; by the served template, with its default variables, in the role."""
    for parts in ((picture(0), "a red circle"), ("above", picture(1), picture(2, 90, 30))):
        done = ask(client, turn(*parts), max_tokens=COUNT, extra_body={"ignore_eos": True})
        tokens = reference.greedy(*parts, count=COUNT, enable_thinking=False)
        assert done.message.content.rstrip("\ufffd") == reference.text(tokens)
        assert done.message.role == "robot"
        assert done.finish_reason == "length"


def test_a_picture_in_a_job(system: Served, reference: Reference) -> None:
    """The same over the jobs' route."""
    parts = (picture(3), "a red circle")
    body = {
        "pipeline": "seer",
        "input": {"messages": turn(*parts)},
        "parameters": {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True},
    }
    job = httpx.post(f"{system.url}/v1/jobs?wait=25", json=body, timeout=30).json()
    assert job["state"] == "succeeded", job
    tokens = reference.greedy(*parts, count=COUNT, enable_thinking=False)
    assert job["values"]["text"].rstrip("\ufffd") == reference.text(tokens)


def test_a_picture_that_cannot_be_read_is_a_400(client: openai.OpenAI) -> None:
    url = {"url": "data:image/png;base64,aGVsbG8="}
    messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="no image that can be read") as caught:
            client.chat.completions.create(model="seer", messages=messages, stream=stream)
        assert caught.value.param == "messages"


def test_reasoning_stands_apart(client: openai.OpenAI) -> None:
    """What is thought within the budget; what is said then, as the grammar wants it."""
    more = {**THINKING, "thinking_token_budget": BUDGET}
    more["structured_outputs"] = {"choice": ["yes", "no"]}
    done = ask(client, turn("a red circle"), max_tokens=40, extra_body=more)
    assert done.message.content.strip() in ("yes", "no")
    assert done.message.reasoning
    assert "<" not in done.message.content + done.message.reasoning


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("thinking", [True, False])
def test_a_call_is_required(client: openai.OpenAI, parallel: bool, thinking: bool) -> None:
    more = {**THINKING, "thinking_token_budget": BUDGET} if thinking else {}
    done = ask(
        client,
        turn("a red circle"),
        max_tokens=200,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=parallel,
        extra_body=more,
    )
    calls = done.message.tool_calls
    assert parallel or len(calls) == 1
    for call in calls:
        assert call.function.name in ("paint", "wipe")
        assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    assert not done.message.content
    assert done.finish_reason == "tool_calls"
    assert bool(getattr(done.message, "reasoning", None)) == thinking


@pytest.fixture(scope="module")
def few_spaces(model: Path) -> dict[str, Any]:
    """Grammars of calls allow any white space, and a random model may write nothing else."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = {i: tokenizer.decode([i]) for i in range(len(tokenizer))}
    return {"logit_bias": {str(i): -100 for i, t in texts.items() if t and not t.strip()}}


def test_a_function_is_named(client: openai.OpenAI, few_spaces: dict[str, Any]) -> None:
    choice: Any = {"type": "function", "function": {"name": "wipe"}}
    done = ask(
        client,
        turn("a star"),
        max_tokens=200,
        tools=TOOLS,
        tool_choice=choice,
        extra_body=few_spaces,
    )
    (call,) = done.message.tool_calls
    assert call.function.name == "wipe"
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    assert done.finish_reason == "stop"


def test_calls_are_read_only_where_the_model_may_call(
    client: openai.OpenAI, few_spaces: dict[str, Any]
) -> None:
    """The same text is a call with `auto`, and text with `none`.

    With `auto` vLLM lets the model call by the tools' own grammar, too.
    """
    text = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
    more = {"structured_outputs": {"choice": [text]}, **few_spaces}
    asked: dict[str, Any] = {"max_tokens": 200, "tools": TOOLS, "extra_body": more}
    for choice in ({}, {"tool_choice": "auto"}):
        done = ask(client, turn("a star"), **asked, **choice)
        for call in done.message.tool_calls:
            assert call.function.name in ("paint", "wipe")
            assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
        assert done.message.tool_calls
        assert done.finish_reason == "tool_calls"
    done = ask(client, turn("a star"), **asked, tool_choice="none")
    assert not done.message.tool_calls
    assert done.message.content.strip() == text
    assert done.finish_reason == "stop"


def test_a_history_of_calls(client: openai.OpenAI) -> None:
    """OpenAI's JSON text of arguments and a message without content go through the template."""
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "paint", "arguments": '{"colour": "red"}'},
    }
    history: Any = [
        *turn("a star"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    assert ask(client, history, max_tokens=4, tools=TOOLS).message is not None
    call["function"] = {"name": "paint", "arguments": "{"}
    with pytest.raises(openai.BadRequestError, match="are no JSON"):
        client.chat.completions.create(model="seer", messages=history, tools=TOOLS)


def test_log_probabilities_come_with_the_tokens_of_each_chunk(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "seer",
        "messages": turn("a star"),
        "max_tokens": 100,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    done = client.chat.completions.create(**options).choices[0]
    chunks = [c.choices[0] for c in client.chat.completions.create(**options, stream=True)]
    assert len(done.logprobs.content) == 100
    with_tokens = [c for c in chunks if c.logprobs]
    assert len(with_tokens) > 1
    assert [t for c in with_tokens for t in c.logprobs.content] == done.logprobs.content

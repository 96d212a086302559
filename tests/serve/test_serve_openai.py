"""The OpenAI client against `omniq serve MODEL` on the transformers engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from served import Served, make_model, served
from support import wait_until

MESSAGES: Any = [{"role": "user", "content": "a red circle above a blue square"}]
KEY = "sesame"
TOOL = {"type": "function", "function": {"name": "paint"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "Tiny-LM")


@pytest.fixture(scope="module")
def system(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ["--engine", "transformers", "--max-num-seqs", "8", "--api-key", KEY, "--dtype", "auto"]
    command = [sys.executable, "-m", "omniq", "serve", str(model), *flags]
    names = ["--served-model-name", "tiny", "small"]
    with served(tmp_path_factory.mktemp("serve"), *command, *names) as running:
        yield running


@pytest.fixture
def client(system: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@torch.no_grad()
def greedy(model: Path, n: int, *, messages: Any = None, prompt: str = "") -> tuple[str, int]:
    """Text and prompt length by transformers' own ``generate``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if messages:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    out = reference.generate(**inputs, max_new_tokens=n, do_sample=False)
    count = inputs["input_ids"].shape[1]
    return tokenizer.decode(out[0, count:], skip_special_tokens=True), count


def test_models_by_their_served_names(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny", "small", "tiny-lm"]
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError, match="available: tiny, small"):
        client.models.retrieve("other")


def test_greedy_chat_equals_transformers_and_counts_tokens(
    client: openai.OpenAI, model: Path
) -> None:
    text, count = greedy(model, 24, messages=MESSAGES)
    done = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=24, temperature=0
    )
    assert done.choices[0].message.content == text
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.prompt_tokens == count
    assert done.usage.completion_tokens == 24
    assert done.id.startswith("chatcmpl-")


def test_stream_is_the_same_text_in_pieces_with_usage_at_the_end(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    assert len([d for d in deltas if d.content]) > 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage == whole.usage
    assert {c.id for c in chunks} == {chunks[0].id}


def test_completion_goes_on_with_the_prompt_as_it_is(client: openai.OpenAI, model: Path) -> None:
    text, count = greedy(model, 16, prompt="a red")
    done = client.completions.create(model="tiny", prompt="a red", temperature=0)
    assert done.choices[0].text == text
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (count, 16)


def test_several_prompts_and_token_ids(client: openai.OpenAI) -> None:
    alone = [
        client.completions.create(model="tiny", prompt=p, temperature=0).choices[0].text
        for p in ("a red", "a green")
    ]
    both = client.completions.create(model="tiny", prompt=["a red", "a green"], temperature=0)
    assert [c.text for c in both.choices] == alone
    assert [c.index for c in both.choices] == [0, 1]
    ids = client.completions.create(model="tiny", prompt=[5, 6, 7], temperature=0)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    pieces = ["", ""]
    for chunk in client.completions.create(
        model="tiny", prompt=["a red", "a green"], temperature=0, stream=True
    ):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == alone


def test_several_answers_are_seeded_and_streamed_by_index(client: openai.OpenAI) -> None:
    options: Any = {
        "model": "tiny",
        "messages": MESSAGES,
        "n": 3,
        "seed": 4,
        "temperature": 1.5,
        "max_tokens": 12,
    }
    first = client.chat.completions.create(**options)
    texts = [c.message.content for c in first.choices]
    assert len(set(texts)) == 3
    # The answer i of a request is the one of seed + i.
    alone = client.chat.completions.create(**{**options, "n": 1, "seed": 5})
    assert alone.choices[0].message.content == texts[1]
    pieces = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert pieces == texts


def test_stop_string_ends_and_is_left_out(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    full = client.chat.completions.create(**options).choices[0].message.content
    assert full is not None
    done = client.chat.completions.create(**options, stop=full[5:8]).choices[0]
    assert done.message.content == full[: full.index(full[5:8])]
    assert done.finish_reason == "stop"
    chunks = client.chat.completions.create(**options, stop=[full[5:8]], stream=True)
    said = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert said == done.message.content


def test_logprobs_of_tokens_and_their_rivals(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    found = chat.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 3
    for token in found.content:
        assert [t.logprob for t in token.top_logprobs] == sorted(
            (t.logprob for t in token.top_logprobs), reverse=True
        )
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    text = client.completions.create(
        model="tiny", prompt="a red", max_tokens=2, temperature=0, logprobs=1
    )
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 2


def test_parameters_beyond_openais_go_by_vllms_names(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="tiny",
        prompt="a red",
        max_tokens=6,
        extra_body={"top_k": 1, "temperature": 1.0, "allowed_token_ids": [7, 8], "min_tokens": 2},
    )
    only = client.completions.create(
        model="tiny",
        prompt="a red",
        max_tokens=6,
        temperature=0,
        extra_body={"allowed_token_ids": [7, 8]},
    )
    assert done.choices[0].text == only.choices[0].text


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
        ({"top_p": "x"}, "top_p", "valid number"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"nonsense": 1}, "nonsense", "unknown field"),
        ({"stream_options": {"include_usage": True}}, None, "stream: true only"),
        ({"top_logprobs": 2}, None, "logprobs: true only"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "does not have it"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"content": "x"}]}, "messages", "role"),
        ({"messages": [{"role": "user", "content": "x " * 300}]}, "messages", "1 to 255 tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format", "does not have it"),
        ({"stream": True, "bad_words": ["x"]}, "bad_words", "does not have it"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None, message: str
) -> None:
    """Whether the API or only the engine finds it; before a stream begins, too."""
    body = {"model": "tiny", "messages": MESSAGES, **fields}
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_model_that_pools_nothing_embeds_nothing(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        client.embeddings.create(model="tiny", input="x")


def test_keys_are_asked_for_below_v1_only(system: Served) -> None:
    stranger = openai.OpenAI(base_url=f"{system.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="valid API key"):
        stranger.models.list()
    refused = httpx.get(f"{system.url}/v1/jobs")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["code"] == "invalid_api_key"
    assert httpx.get(f"{system.url}/health").status_code == 200


def _states(system: Served) -> dict[str, str]:
    found = httpx.get(f"{system.url}/v1/jobs", headers={"authorization": f"Bearer {KEY}"})
    return {j["id"]: j["state"] for j in found.json()["jobs"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_cancels_its_job(system: Served, stream: bool) -> None:
    before = set(_states(system))
    body = {
        "model": "tiny",
        "prompt": "a",
        "max_tokens": 240,
        "ignore_eos": True,
        "n": 8,
        "stream": stream,
    }
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as http:
        url = f"{system.url}/v1/completions"
        if stream:
            async with http.stream("POST", url, json=body) as response:
                await anext(response.aiter_lines())
        else:
            asking = asyncio.create_task(http.post(url, json=body))
            await asyncio.to_thread(
                wait_until, lambda: set(_states(system)) - before, 10, "it is submitted"
            )
            asking.cancel()

    def ended() -> str | None:
        (job,) = set(_states(system)) - before
        state = _states(system)[job]
        return state if state not in ("queued", "running", "cancelling") else None

    await asyncio.to_thread(wait_until, ended, 20, "the job ends")
    assert ended() == "cancelled"


async def test_many_clients_at_once_get_what_each_gets_alone(system: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key=KEY) as client:

        async def one(i: int) -> str:
            done = await client.completions.create(
                model="tiny", prompt=f"a red circle {i}", max_tokens=8 + i, temperature=0
            )
            return done.choices[0].text

        alone = [await one(i) for i in range(10)]
        assert await asyncio.gather(*map(one, range(10))) == alone


def test_the_pipeline_is_a_pipeline_like_any_other(system: Served) -> None:
    http = httpx.Client(base_url=system.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30)
    body = {
        "pipeline": "tiny-lm",
        "input": {"messages": MESSAGES},
        "parameters": {"max_tokens": 3, "temperature": 0},
    }
    job = http.post("/v1/jobs?wait=20", json=body).json()
    assert job["state"] == "succeeded", job
    assert job["values"]["finish_reason"] == "length"
    assert job["values"]["choices"][0]["text"] == job["values"]["text"]
    wrong = http.post("/v1/jobs", json={**body, "input": {"messages": "hello"}}).json()
    assert wrong["errors"][0]["field"] == "input.messages"


def test_ctrl_c_leaves_nothing(system: Served) -> None:
    """The last test of this file: it ends the system."""
    assert not system.stop()

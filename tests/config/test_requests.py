"""Requests against their pipeline: defaults, sharing of parameters, and every kind of fault."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from omniq.config import get_pipeline
from omniq.config.loader import BUILTIN_DIR
from omniq.config.pipeline import InputConfig, PipelineConfig
from omniq.config.request import _FAULT, validate_request
from omniq.errors import BrokerUnavailable, InvalidRequest
from omniq.job_request import checked_request
from omniq.jobs.store import JobStore
from omniq.settings import get_settings
from omniq.submit import submit

PROMPT = {"prompt": "red circle"}


def check(inputs: Any = PROMPT, parameters: Any = None) -> dict[str, dict[str, Any]]:
    return validate_request(get_pipeline("tiny-omni"), inputs, parameters or {})


def fields(inputs: Any = PROMPT, parameters: Any = None) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        check(inputs, parameters)
    return [f["field"] for f in caught.value.fields]


def test_defaults_are_filled_in() -> None:
    complete = check()
    assert complete["dit"]["num_inference_steps"] == 20
    assert complete["decode"] == {}


def test_a_shared_name_reaches_every_stage_and_a_stage_may_differ() -> None:
    complete = check(parameters={"seed": 3, "ar": {"seed": 4}})
    assert (complete["ar"]["seed"], complete["dit"]["seed"]) == (4, 3)


def test_inputs_that_need_each_other() -> None:
    """One without the other is a fault of the one that is missing."""
    text = (BUILTIN_DIR / "tiny-omni.yaml").read_text()
    both = "{words: {type: text, required: false, requires: [REF]}, sound: {type: audio, required: "
    inputs = both + "false, requires: [words]}, prompt: {type: text}}"
    data = yaml.safe_load(text)
    data["inputs"] = yaml.safe_load(inputs.replace("REF", "sound"))
    pipeline = PipelineConfig.model_validate(data)
    validate_request(pipeline, PROMPT, {})
    validate_request(pipeline, {**PROMPT, "words": "a", "sound": b""}, {})
    for one, missing in (("words", "sound"), ("sound", "words")):
        with pytest.raises(InvalidRequest, match=f"required with {one}, but missing") as refused:
            validate_request(pipeline, {**PROMPT, one: "a"}, {})
        assert [f["field"] for f in refused.value.fields] == [f"input.{missing}"]
    data["inputs"] = yaml.safe_load(inputs.replace("REF", "voice"))
    with pytest.raises(ValidationError, match="requires 'voice': no such input; allowed: words, "):
        PipelineConfig.model_validate(data)


def test_a_missing_seed_is_drawn_once_for_all_stages() -> None:
    config = get_pipeline("tiny-omni")
    specs = [checked_request(config, PROMPT, {}).job(created=1.0) for _ in range(9)]
    assert all(s.parameters["ar"]["seed"] == s.parameters["dit"]["seed"] for s in specs)
    assert len({s.parameters["ar"]["seed"] for s in specs}) > 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("priority", value) for value in (-1, 10, 5.0, True, "5", [5])),
        *(("timeout", value) for value in (0, -1.0, float("nan"), float("inf"), True, "5", [5])),
        *(("metadata", value) for value in ("a", ["a"], {"a": 1}, {1: "a"}, {"a": "\ud800"})),
        *(("formats", value) for value in ("png", ["png"], {"image": 1})),
        *(("outputs", value) for value in ("image", [], ["gone"], [1], [["image"]], {"image": 1})),
        *(("allow_partial", value) for value in (1, "yes", None)),
        *(("parameters", value) for value in ("a", [1], {1: 2})),
        *(("inputs", value) for value in ("a", ["a"], {1: "a"}, None)),
    ],
)
def test_whatever_python_or_celery_give_is_refused_by_name(name: str, value: Any) -> None:
    given = {"inputs": PROMPT, "parameters": {}, name: value}
    with pytest.raises(InvalidRequest) as caught:
        checked_request(get_pipeline("tiny-omni"), **given)
    assert [f["field"] for f in caught.value.fields] == ["input" if name == "inputs" else name]


@pytest.mark.parametrize(
    "more", [{"inputs": {}}, {"priority": 10}, {"idempotency_key": ""}, {"idempotency_key": 5}]
)
async def test_a_bad_request_is_refused_before_the_broker_is_asked(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setenv("OMNIQ_BROKER_URL", "redis://127.0.0.1:1/0")  # nobody listens there
    get_settings.cache_clear()
    store = JobStore.from_settings()
    try:
        with pytest.raises(InvalidRequest):
            await submit(store, **{"pipeline": "tiny-omni", "inputs": PROMPT, **more})
        with pytest.raises(BrokerUnavailable):
            await submit(store, pipeline="tiny-omni", inputs=PROMPT)
    finally:
        await store.close()
        get_settings.cache_clear()


@pytest.mark.parametrize(
    ("inputs", "parameters", "field"),
    [
        ({}, {}, "input.prompt"),
        ({"prompt": 7}, {}, "input.prompt"),
        ({"prompt": ""}, {}, "input.prompt"),
        ({"prompt": "  \n"}, {}, "input.prompt"),
        ({"prompt": "x" * 10_000_000}, {}, "input.prompt"),
        ({"prompt": "\ud800"}, {}, "input.prompt"),
        ({"prompt": "x", "image": "y"}, {}, "input.image"),
        (PROMPT, {"width": 0}, "parameters.width"),
        (PROMPT, {"width": 72}, "parameters.width"),
        (PROMPT, {"width": "64"}, "parameters.width"),
        (PROMPT, {"num_inference_steps": 101}, "parameters.num_inference_steps"),
        (PROMPT, {"temperature": float("nan")}, "parameters.temperature"),
        (PROMPT, {"repetition_penalty": 1e-40}, "parameters.repetition_penalty"),
        (PROMPT, {"top_k": 2**70}, "parameters.top_k"),
        (PROMPT, {"seed": -1}, "parameters.seed"),
        (PROMPT, {"seed": 2**63}, "parameters.seed"),
        (PROMPT, {"seed": True}, "parameters.seed"),
        (PROMPT, {"sed": 1}, "parameters.sed"),
        (PROMPT, {"temperature": 2.5}, "parameters.temperature"),
        (PROMPT, {"n": 0}, "parameters.n"),
        (PROMPT, {"n": 2, "temperature": 0.0}, "parameters.n"),
        (PROMPT, {"min_p": 1.5}, "parameters.min_p"),
        (PROMPT, {"presence_penalty": -3.0}, "parameters.presence_penalty"),
        (PROMPT, {"min_tokens": 9, "max_tokens": 8}, "parameters.min_tokens"),
        (PROMPT, {"min_tokens": 49}, "parameters.min_tokens"),  # max_tokens is 48 by default
        (PROMPT, {"stop": ""}, "parameters.stop"),
        (PROMPT, {"stop": ["a"] * 17}, "parameters.stop"),
        (PROMPT, {"stop_token_ids": [-1]}, "parameters.stop_token_ids"),
        (PROMPT, {"bad_words": [""]}, "parameters.bad_words"),
        (PROMPT, {"logit_bias": {"x": 1.0}}, "parameters.logit_bias"),
        (PROMPT, {"allowed_token_ids": []}, "parameters.allowed_token_ids"),
        (PROMPT, {"logprobs": -2}, "parameters.logprobs"),
        (PROMPT, {"structured_outputs": {}}, "parameters.structured_outputs"),
        (
            PROMPT,
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "parameters.structured_outputs",
        ),
        (
            PROMPT,
            {"structured_outputs": {"regex": "a", "colour": 1}},
            "parameters.structured_outputs",
        ),
        (PROMPT, {"ar": {"logit_bias": {"x": 1.0}}}, "parameters.ar.logit_bias"),
        (PROMPT, {"dit": {"width": 0}}, "parameters.dit.width"),
        (PROMPT, {"dit": {"temperature": 1.0}}, "parameters.dit.temperature"),
        (PROMPT, {"dit": 3}, "parameters.dit"),
    ],
)
def test_every_fault_names_its_field(inputs: Any, parameters: Any, field: str) -> None:
    assert set(fields(inputs, parameters)) == {field}


def test_faults_inside_an_object_say_where_and_what_is_allowed() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(PROMPT, {"structured_outputs": {"regex": "a", "colour": 1}})
    assert caught.value.fields[0]["message"] == "colour: Extra inputs are not permitted"
    with pytest.raises(InvalidRequest, match="exactly one of json, regex, choice"):
        check(PROMPT, {"structured_outputs": {"regex": "a", "choice": ["b"]}})
    for parameters, message in (
        ({"stop": ["a"] * 17}, "List should have at most 16 items"),
        ({"stop": ["a", ""]}, "1: String should have at least 1 character"),
        ({"stop": ""}, "String should have at least 1 character"),
        ({"logit_bias": {"x": 1.0}}, "keys must be token ids"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            check(PROMPT, parameters)
        assert caught.value.fields[0]["message"].startswith(message)


def test_levels_are_bounded() -> None:
    """What is deeper could be read, but not written again."""
    schema: Any = {}
    for _ in range(98):
        schema = {"a": schema}
    assert check(PROMPT, {"structured_outputs": {"json": schema}})
    deeper = {"json": {"a": {"a": schema}}}
    for parameters in ({"structured_outputs": deeper}, {"ar": {"structured_outputs": deeper}}):
        with pytest.raises(InvalidRequest, match="in at most 100 levels"):
            check(PROMPT, parameters)


def test_parameters_of_vllm_by_its_names() -> None:
    """What is right goes to the AR stage as it is."""
    given: dict[str, Any] = {
        "n": 2,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop": "x",
        "stop_token_ids": [3],
        "ignore_eos": True,
        "min_tokens": 2,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "logit_bias": {"5": -100},
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
        "skip_special_tokens": False,
        "structured_outputs": {"json": {"type": "object"}},
        "extra_args": {"x": 1},
    }
    complete = check(PROMPT, given)
    assert complete["ar"].items() >= given.items()
    assert not set(complete["dit"]) & set(given)


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("none", [], None),
        ("auto", ["paint"], None),
        ("required", ["paint"], None),
        ({"type": "function", "function": {"name": "paint"}}, ["paint", "wipe"], None),
        ("required", [], "needs tools"),
        ("perhaps", ["paint"], "must be one of none, auto, required"),
        ({"type": "function", "function": {"name": "draw"}}, ["paint"], "must be one of"),
        ({"function": {"name": "paint"}}, ["paint"], "must be one of"),
    ],
)
def test_a_tool_choice_is_among_the_tools(
    choice: Any, tools: list[str], message: str | None
) -> None:
    given = [{"type": "function", "function": {"name": name}} for name in tools]
    parameters = {"tools": given, "tool_choice": choice}
    if message is None:
        assert check(PROMPT, parameters)["ar"]["tool_choice"] == choice
        return
    with pytest.raises(InvalidRequest, match=message) as caught:
        check(PROMPT, parameters)
    assert [f["field"] for f in caught.value.fields] == ["parameters.tool_choice"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], None),
        ([{"type": "image_url"}, {"type": "text", "text": "a"}], None),
        ([{"type": "image_url"}, {"type": "text", "text": " "}], None),
        ([{"type": "image_url"}, {"type": "text", "text": "a" * 11}], "1 to 10 characters"),
        ([{"type": "text", "text": " "}], "must not be blank"),
        ([], "1 to 10 characters"),
        ([{"text": "a"}], "with a 'type'"),
    ],
)
def test_a_picture_may_stand_without_words(content: Any, message: str | None) -> None:
    """What is in it only the engine can say."""
    spec = InputConfig(type="messages", max_length=10)
    fault = _FAULT["messages"](spec, [{"role": "user", "content": content}])
    assert fault is None if message is None else message in (fault or "")


def test_all_faults_are_named_together() -> None:
    assert fields({}, {"width": 0, "x": 1}) == ["input.prompt", "parameters.x", "parameters.width"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["seed", "width", "stop", "dit", "ar", "temperature", "max_tokens", "zz"])


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine
@given(
    st.dictionaries(st.sampled_from(["prompt", "x"]), json_values),
    st.dictionaries(names, json_values),
)
def test_any_json_is_accepted_or_refused_clearly(inputs: Any, parameters: Any) -> None:
    try:
        complete = check(inputs, parameters)
    except InvalidRequest as exc:
        assert exc.fields and all(f["field"] and f["message"] for f in exc.fields)
    else:
        assert set(complete) == {"ar", "dit", "decode"}


@pytest.mark.parametrize("name", ["\ud800", "a\udfff"])
def test_names_that_are_no_unicode_are_refused(name: str) -> None:
    for parameters in ({name: 1}, {"ar": {name: 1}}, {"ar": {"seed": 1, name: 1}}):
        with pytest.raises(InvalidRequest, match=r"parameters\."):
            validate_request(get_pipeline("tiny-omni"), {"prompt": "x"}, parameters)

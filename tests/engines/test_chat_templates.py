"""Conversations in the form that a model's chat template reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tokenizer

from omniq.engines.base import StageInput
from omniq.engines.text import PromptEncoder
from omniq.errors import ConfigError, InvalidRequest

TEXT = "{% for m in messages %}[{{ m['role'] }}: {{ m['content'] }}]{% endfor %}"
#: As SmolVLM's: it says nothing of a content that is a text.
PARTS = (
    "{% for m in messages %}[{{ m['role'] }}: {% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% endif %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}]{% endfor %}"
)
BOTH = PARTS.replace(
    "{% for part", "{% if m['content'] is string %}({{ m['content'] }}){% else %}{% for part"
).replace("{% endfor %}]", "{% endfor %}{% endif %}]")
TOOLS = (
    "{% for m in messages %}{% for call in m['tool_calls'] or [] %}"
    "{{ call['function']['arguments'] | tojson }}{% endfor %}{{ m['content'] }}{% endfor %}"
)
HELLO = [{"role": "user", "content": "hello"}]
TWO_PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
]
PICTURE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


def encoder(folder: Path, template: str, **more: Any) -> PromptEncoder:
    return PromptEncoder(folder, chat_template=True, template=template, **more)


@pytest.mark.parametrize(
    ("template", "form", "messages", "expected"),
    [
        (TEXT, "auto", HELLO, "[user: hello]"),
        (TEXT, "auto", TWO_PARTS, "[user: a\nb]"),
        (PARTS, "auto", HELLO, "[user: hello]"),
        (PARTS, "auto", TWO_PARTS, "[user: ab]"),
        (PARTS, "auto", PICTURE, "[user: <image>a]"),
        (BOTH, "auto", HELLO, "[user: (hello)]"),
        (BOTH, "auto", TWO_PARTS, "[user: (a\nb)]"),
        (BOTH, "auto", PICTURE, "[user: <image>a]"),
        (BOTH, "openai", HELLO, "[user: hello]"),
        (BOTH, "openai", TWO_PARTS, "[user: ab]"),
        (BOTH, "string", TWO_PARTS, "[user: (a\nb)]"),
        (TEXT, "auto", [{"role": "assistant", "content": None}], "[assistant: ]"),
        (PARTS, "auto", [{"role": "assistant", "content": None}], "[assistant: ]"),
    ],
)
def test_no_content_is_lost(
    folder: Path, template: str, form: Any, messages: Any, expected: str
) -> None:
    made = encoder(folder, template, content_format=form)
    assert made.render_chat(messages) == expected
    assert made.takes_parts == (template != TEXT and form != "string")


def test_forms_are_those_that_vllm_finds(folder: Path) -> None:
    """Only where a template reads both does vLLM hand over parts, which then say the same."""
    hf = pytest.importorskip("vllm.renderers.hf")
    for template, ours in ((TEXT, "string"), (PARTS, "openai")):
        made = encoder(folder, template)
        assert hf._detect_content_format(template, default="string") == ours
        assert made.takes_parts == (ours == "openai")


def test_a_template_from_a_file_or_given_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEXT)
    assert encoder(folder, str(tmp_path / "chat.jinja")).render_chat(HELLO) == "[user: hello]"
    assert encoder(folder, TEXT).render_chat(HELLO) == "[user: hello]"
    for wrong in (str(tmp_path / "none.jinja"), "no template"):
        with pytest.raises(ConfigError, match="neither a template nor a file"):
            encoder(folder, wrong)


def test_a_processors_template_is_the_models(folder: Path, tmp_path: Path) -> None:
    """Older multimodal models keep it in a file of its own."""
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="has no chat template"):
        PromptEncoder(tmp_path, chat_template=True)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEXT}))
    made = PromptEncoder(tmp_path, chat_template=True)
    assert made.render_chat(HELLO) == "[user: hello]"


def test_a_requests_variables_go_before_the_stages(folder: Path) -> None:
    template = "{{ style }} {{ size }} " + TEXT
    made = encoder(folder, template, variables={"style": "oil", "size": "small"})
    assert made.render_chat(HELLO).startswith("oil small ")
    assert made.render_chat(HELLO, options={"size": "big"}).startswith("oil big ")
    with pytest.raises(ConfigError, match="cannot be set: tools"):
        encoder(folder, template, variables={"tools": []})
    # Code of strangers is not run, in whatever sandbox.
    with pytest.raises(InvalidRequest, match="cannot be set: chat_template"):
        made.render_chat(HELLO, options={"chat_template": "{{ 1 }}"})


def test_arguments_of_calls_reach_the_template_as_objects(folder: Path) -> None:
    """OpenAI's API has them as JSON text, which a template would quote once more."""

    def history(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]

    made = encoder(folder, TOOLS)
    for arguments in ('{"a": 1}', {"a": 1}):
        assert made.render_chat(history(arguments)) == '{"a": 1}'
    assert made.render_chat(history("")) == "{}"
    for messages, message in (
        (history("{"), "are no JSON"),
        ([{"role": "assistant", "content": "", "tool_calls": ["f"]}], "with a 'function'"),
    ):
        with pytest.raises(InvalidRequest, match=message) as caught:
            made.render_chat(messages)
        assert caught.value.fields[0]["field"] == "input.messages"


@pytest.mark.parametrize("template", [TEXT, PARTS, BOTH])
@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "x"}])
def test_a_model_of_text_refuses_other_parts(
    folder: Path, template: str, part: dict[str, Any]
) -> None:
    """A template would leave them out, or write them into the prompt as Python shows them."""
    made = encoder(folder, template)
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(InvalidRequest, match=f"message 0 is of type '{part['type']}'") as caught:
        made.read({"messages": StageInput(messages)}, {}, 100)
    assert caught.value.fields[0]["field"] == "input.messages"
    made.read({"messages": StageInput(TWO_PARTS)}, {}, 100)

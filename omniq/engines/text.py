"""Text in and out of an AR engine: chat template, context limit, incremental decoding, stops."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError

from omniq.engines.base import StageInput
from omniq.engines.inputs import text_input
from omniq.errors import ConfigError, InvalidRequest
from omniq.json_file import read_json

_INCOMPLETE = "\ufffd"
#: Inputs that are a text prompt; a request has exactly one.
PROMPTS = ("prompt", "messages", "token_ids")
#: Variables of a chat template that are not a request's or a stage's to set.
#: ``chat_template`` is code: only the stage's configuration brings any.
RESERVED = frozenset(
    {"chat_template", "conversation", "tokenize", "tools", "return_dict", "return_tensors"}
)

ContentFormat = Literal["auto", "string", "openai"]


class PromptEncoder:
    """Prompts to token ids; not thread-safe, as tokenizers are not.

    Args:
        folder: of the tokenizer.
        chat_template: whether a text prompt is a user turn.
        template: a file with a chat template, or the template itself, instead of the model's.
        content_format: whether the template reads a message's content as text (``string``) or as
            OpenAI's list of parts (``openai``); ``auto`` tries what it shows.
        variables: of the template, as far as a request does not set them.

    Attributes:
        takes_parts: the template reads lists of parts, and so has a place for media.

    Raises:
        ConfigError: there is no template, or a variable is reserved.
    """

    def __init__(
        self,
        folder: Path,
        *,
        chat_template: bool,
        template: str | None = None,
        content_format: ContentFormat = "auto",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - slow import, first engine pays

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._chat = chat_template
        self._variables = dict(variables or {})
        if wrong := sorted(RESERVED & set(self._variables)):
            raise ConfigError(
                f"engine_args.default_chat_template_kwargs: cannot be set: {', '.join(wrong)}"
            )
        if template is not None:
            self.tokenizer.chat_template = _template(template)
        elif not self.tokenizer.chat_template:
            self.tokenizer.chat_template = _processors_template(folder)
        if chat_template and not self.tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer in {folder} has no chat template; "
                "set engine_args {chat_template: false} to pass prompts as they are"
            )
        self._text_as_parts = content_format == "openai"
        self.takes_parts = content_format != "string"
        if content_format == "auto" and self.tokenizer.chat_template:
            self.takes_parts = self._shows([{"type": "text", "text": _PROBE}])
            self._text_as_parts = self.takes_parts and not self._shows(_PROBE)

    def _shows(self, content: Any) -> bool:
        """Whether the template writes such a content's text, and nothing of its form."""
        try:
            text = self._rendered([{"role": "user", "content": content}], None, self._variables)
        except (TemplateError, TypeError, ValueError, KeyError):
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text

    def encode(self, prompt: str, context: int) -> list[int]:
        """Token ids of ``prompt``, as one user turn that the model is to answer.

        Raises:
            InvalidRequest: they leave no room for an answer in ``context`` positions.
        """
        if self._chat:
            return self.encode_chat([{"role": "user", "content": prompt}], context, field="prompt")
        return self.checked(self.tokenizer(prompt)["input_ids"], context, "prompt")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        context: int,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        field: str = "messages",
    ) -> list[int]:
        """Token ids of a conversation by the model's chat template.

        Args:
            messages: as in OpenAI's API.
            context: positions of the model.
            tools: functions the model may call, for the template.
            options: further variables of the template.
            field: name of the input, for errors.

        Raises:
            InvalidRequest: the template refuses them, or they leave no room for an answer.
        """
        text = self.render_chat(messages, tools=tools, options=options, field=field)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.checked(ids, context, field)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        field: str = "messages",
    ) -> str:
        """The text of a conversation, see :meth:`encode_chat`."""
        if not self.tokenizer.chat_template:
            raise _refused(field, "the model has no chat template")
        check_messages(messages, field)
        if wrong := sorted(RESERVED & set(options or ())):
            raise _refused("chat_template_kwargs", f"cannot be set: {', '.join(wrong)}")
        settings = {**self._variables, **(options or {})}
        plain = [
            _with_objects({**m, "content": self._content(m.get("content"))}, field)
            for m in messages
        ]
        try:
            return self._rendered(plain, tools, settings)
        except (TemplateError, TypeError, ValueError, KeyError) as exc:
            raise _refused(field, f"the chat template refuses them: {exc}") from exc

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        settings: Mapping[str, Any],
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                tokenize=False,
                **{"add_generation_prompt": True, **settings},
            )
        )

    def _content(self, content: Any) -> Any:
        """A message's content in the form that the template reads; none is an empty one."""
        if content is None:
            return [] if self._text_as_parts else ""
        if isinstance(content, str) and self._text_as_parts:
            return [{"type": "text", "text": content}]
        if isinstance(content, list) and not self._text_as_parts:
            texts = [_text_of_part(part) for part in content]
            if None not in texts:
                return "\n".join(text for text in texts if text is not None)
        return content

    def read(
        self, inputs: Mapping[str, StageInput], params: Mapping[str, Any], context: int
    ) -> list[int]:
        """Token ids of a request's only prompt: ``prompt``, ``messages`` or ``token_ids``.

        Raises:
            InvalidRequest: naming the input that is missing or wrong.
        """
        given = [name for name in PROMPTS if name in inputs]
        if len(given) != 1:
            got = ", ".join(inputs) or "nothing"
            raise _refused("prompt", f"needs exactly one of {', '.join(PROMPTS)}; got: {got}")
        if given == ["token_ids"]:
            for unused in ("tools", "chat_template_kwargs"):
                if params.get(unused):
                    raise _refused("token_ids", f"{unused} need a prompt or messages")
            return self.checked(token_ids(inputs, len(self.tokenizer)), context, "token_ids")
        tools, options = params.get("tools"), params.get("chat_template_kwargs")
        if given == ["messages"]:
            messages = inputs["messages"].value
            _check_text_only(messages)
        elif tools or options:
            messages = [{"role": "user", "content": text_input(inputs, "prompt")}]
        else:
            return self.encode(text_input(inputs, "prompt"), context)
        return self.encode_chat(messages, context, tools=tools, options=options, field=given[0])

    def checked(self, ids: Sequence[int], context: int, field: str) -> list[int]:
        """``ids``, if they leave room for an answer in ``context`` positions.

        Raises:
            InvalidRequest: they do not.
        """
        if not ids or len(ids) >= context:
            raise _refused(
                field, f"must have 1 to {context - 1} tokens for this model, has {len(ids)}"
            )
        return list(ids)


#: A text that no template writes by itself.
_PROBE = "omniq\u2026probe"


def is_template(text: str) -> bool:
    """Whether ``text`` is a chat template, not the name of a file with one."""
    return "{{" in text or "{%" in text


def _template(given: str) -> str:
    """The chat template that ``given`` names, or is.

    Raises:
        ConfigError: it is neither a file nor a template.
    """
    if is_template(given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"engine_args.custom_chat_template: {given!r} is neither a template nor a file that "
            f"can be read: {exc}"
        ) from exc


def _processors_template(folder: Path) -> str | None:
    """Where older multimodal models keep theirs."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return None
    found = read_json(file).get("chat_template")
    return found if isinstance(found, str) else None


def _text_of_part(part: Any) -> str | None:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        return text if isinstance(text, str) else None
    return None


def _with_objects(message: dict[str, Any], field: str) -> dict[str, Any]:
    """``message`` with the arguments of its tool calls as objects, as templates read them.

    OpenAI's API has them as JSON text.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    plain = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise _refused(field, "each of tool_calls must be an object with a 'function'")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as exc:
                raise _refused(field, f"'arguments' of a tool call are no JSON: {exc}") from exc
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": plain}


def token_ids(inputs: Mapping[str, StageInput], vocabulary: int) -> list[int]:
    """The input ``token_ids``: a list, or an integer tensor [n].

    Raises:
        InvalidRequest: it is neither, or an id is outside of the vocabulary.
    """
    given = inputs["token_ids"]
    ids: Any = given.value
    if given.tensors:
        tensor = given.tensor
        if tensor.ndim != 1 or tensor.is_floating_point():
            raise _refused("token_ids", f"must be integers [n], is {tensor.dtype} {tensor.shape}")
        ids = tensor.tolist()
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise _refused("token_ids", "must be a list of integers")
    if wrong := [i for i in ids if not 0 <= i < vocabulary]:
        raise _refused(
            "token_ids", f"{wrong[0]} is outside of the vocabulary, 0 to {vocabulary - 1}"
        )
    return ids


def check_messages(messages: Any, field: str = "messages") -> None:
    """Refuse what is no conversation.

    Raises:
        InvalidRequest: it is no list of messages, each with a role.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise _refused(field, "must be a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _refused(field, f"message {i} must be an object with a 'role'")
        if not isinstance(message.get("content"), str | list | None):
            raise _refused(field, f"'content' of message {i} must be text or a list of parts")


def _check_text_only(messages: Any) -> None:
    """Refuse what a template would leave out, or write into the prompt as Python shows it."""
    check_messages(messages)
    for i, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if _text_of_part(part) is None:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                what = f"a part of message {i} is of type {kind!r}"
                raise _refused("messages", f"{what}; this model takes text")


def _refused(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name}: {message}", fields=[{"field": f"input.{name}", "message": message}]
    )


class TextStream:
    """Decodes tokens one by one into pieces whose concatenation is the final text.

    A piece is held back while it ends inside a UTF-8 character, or while it may turn out to be the
    beginning of a stop string. Text from a stop string on is never given out.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._hold = max((len(s) for s in stop), default=1) - 1
        self._ids: list[int] = []
        # Ids before `_prefix` are context no longer needed; those before `_read` are decoded.
        self._prefix = self._read = 0
        self._decoded = ""
        self._given = 0
        #: The stop string that ended the text.
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop_string is not None

    @property
    def text(self) -> str:
        """All pieces given out so far."""
        return self._decoded[: self._given]

    def push(self, token: int) -> str:
        """The piece that ``token`` completes, maybe empty; sets ``stopped`` at a stop string."""
        self._ids.append(token)
        searched = len(self._decoded) - self._hold
        self._decode(final=False)
        return self._release(max(searched, 0), self._hold)

    def finish(self) -> str:
        """What was held back, at the end of generation."""
        if self.stopped:
            return ""
        searched = len(self._decoded) - self._hold
        self._decode(final=True)
        return self._release(max(searched, 0), 0)

    def _decode(self, *, final: bool) -> None:
        before = self._text_of(self._ids[self._prefix : self._read])
        after = self._text_of(self._ids[self._prefix :])
        if len(after) > len(before) and (final or not after.endswith(_INCOMPLETE)):
            self._decoded += after[len(before) :]
            self._prefix, self._read = self._read, len(self._ids)

    def _text_of(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _release(self, search_from: int, hold: int) -> str:
        found = [(self._decoded.find(s, search_from), s) for s in self._stop]
        if hits := [hit for hit in found if hit[0] >= 0]:
            end, self.stop_string = min(hits)
        else:
            end = max(len(self._decoded) - hold, self._given)
        piece = self._decoded[self._given : end]
        self._given = max(self._given, end)
        return piece

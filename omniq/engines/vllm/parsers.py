"""Reasoning and tool calls out of generated text, by vLLM's own parsers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omniq.engines.vllm import contract
from omniq.errors import ConfigError, InvalidRequest


@dataclass(slots=True)
class Parsed:
    """A text, or a piece of one, by its parts."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers a stage names, by vLLM's names (``--reasoning-parser``, ``--tool-call-parser``).

    Args:
        tokenizer: of the model.
        reasoning: name of vLLM's reasoning parser.
        tools: name of vLLM's tool parser.

    Raises:
        ConfigError: vLLM has no parser of that name; the message lists those it has.
    """

    tokenizer: Any
    reasoning: str | None = None
    tools: str | None = None

    def __post_init__(self) -> None:
        v = contract.names()
        for argument, name, manager in (
            ("reasoning_parser", self.reasoning, v.ReasoningParserManager),
            ("tool_call_parser", self.tools, v.ToolParserManager),
        ):
            if name and name not in (known := sorted(manager.list_registered())):
                raise ConfigError(
                    f"engine_args.{argument}: vLLM has no parser {name!r}; "
                    f"allowed: {', '.join(known)}"
                )

    def of_request(self, params: Mapping[str, Any]) -> RequestParser | None:
        """What reads one request's answers; None if nothing is to be read out of them.

        Raises:
            InvalidRequest: the tools are not what vLLM takes.
        """
        tools = params.get("tools") if self.tools else None
        if not (self.reasoning or tools):
            return None
        v = contract.names()
        try:
            request = v.ChatCompletionRequest(
                model="omniq",
                messages=[],
                **({"tools": tools, "tool_choice": "auto"} if tools else {}),
            )
        except ValueError as exc:
            message = str(exc).replace("\n", "; ")
            raise InvalidRequest(
                f"parameters.tools: {message}",
                fields=[{"field": "parameters.tools", "message": message}],
            ) from exc
        return RequestParser(self, request, with_tools=bool(tools))


class RequestParser:
    """Makes a :class:`SequenceParser` for each answer of one request."""

    def __init__(self, parsers: Parsers, request: Any, *, with_tools: bool) -> None:
        self._parsers, self._request, self._with_tools = parsers, request, with_tools
        first = self.sequence()
        #: Whether the parsers look for special tokens, which the text must then show.
        self.special_tokens = False
        for parser in (first.reasoning, first.tools):
            if parser is not None:
                adjusted = parser.adjust_request(request.model_copy())
                self.special_tokens |= not adjusted.skip_special_tokens

    def sequence(self) -> SequenceParser:
        """For one answer."""
        v, parsers = contract.names(), self._parsers
        reasoning = tools = None
        if parsers.reasoning:
            made = v.ReasoningParserManager.get_reasoning_parser(parsers.reasoning)
            reasoning = made(parsers.tokenizer)
        if self._with_tools:
            made = v.ToolParserManager.get_tool_parser(parsers.tools)
            tools = made(parsers.tokenizer, self._request.tools)
        return SequenceParser(reasoning, tools, self._request)


class SequenceParser:
    """Reads one answer, piece by piece and as a whole."""

    def __init__(self, reasoning: Any, tools: Any, request: Any) -> None:
        self.reasoning, self.tools, self._request = reasoning, tools, request
        self._seen = _Seen()
        self._content = _Seen()

    def push(self, text: str, ids: Sequence[int]) -> Parsed:
        """The parts of the next piece."""
        found = Parsed(text=text)
        content_ids = list(ids)
        if self.reasoning is not None:
            delta = self.reasoning.extract_reasoning_streaming(*self._seen.add(text, ids))
            found.text = (delta.content or "") if delta is not None else ""
            found.reasoning = (delta.reasoning or "") if delta is not None else ""
            content_ids = content_ids if found.text else []
        if self.tools is not None and (found.text or content_ids):
            delta = self.tools.extract_tool_calls_streaming(
                *self._content.add(found.text, content_ids), self._request
            )
            found.text = (delta.content or "") if delta is not None else ""
            calls = delta.tool_calls if delta is not None else []
            found.tool_calls = [c.model_dump(mode="json", exclude_none=True) for c in calls]
        return found

    def whole(self, text: str) -> Parsed:
        """The parts of the finished answer."""
        found = Parsed(text=text)
        if self.reasoning is not None:
            reasoning, content = self.reasoning.extract_reasoning(text, self._request)
            found.reasoning, found.text = reasoning or "", content or ""
        if self.tools is not None:
            calls = self.tools.extract_tool_calls(found.text, self._request)
            found.text = calls.content or ""
            found.tool_calls = [c.model_dump(mode="json") for c in calls.tool_calls]
        return found


@dataclass(slots=True)
class _Seen:
    """Text and ids so far, as vLLM's streaming parsers want them."""

    text: str = ""
    ids: list[int] = field(default_factory=list)

    def add(self, text: str, ids: Sequence[int]) -> tuple[Any, ...]:
        before_text, before_ids = self.text, self.ids
        self.text, self.ids = before_text + text, [*before_ids, *ids]
        return before_text, self.text, text, before_ids, self.ids, list(ids)

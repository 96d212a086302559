"""Reasoning and tool calls: vLLM's own parsers, and the grammars by which calls are forced."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from omniq.engines.vllm import contract
from omniq.engines.vllm.sampling import refused, structured_outputs
from omniq.errors import ConfigError

#: Parameters of a request that are about tools.
TOOL_PARAMS = ("tools", "tool_choice", "parallel_tool_calls")


@dataclass(slots=True)
class Parsed:
    """A text, or a piece of one, by its parts."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


class Parsers:
    """The parsers a stage names, by vLLM's names (``--reasoning-parser``, ``--tool-call-parser``).

    Args:
        tokenizer: of the model.
        reasoning: name of vLLM's reasoning parser.
        tools: name of vLLM's tool parser.
        model_config: vLLM's ``ModelConfig``, by which some parsers make the ids of calls.
        strict: vLLM's ``--tool-strict-level``; None is vLLM's default.
        variables: of the chat template, as far as a request does not set them.

    Raises:
        ConfigError: vLLM has no parser of that name, the message lists those it has; or the
            parser cannot read this tokenizer's text.
    """

    def __init__(
        self,
        tokenizer: Any,
        reasoning: str | None = None,
        tools: str | None = None,
        *,
        model_config: Any = None,
        strict: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        v = contract.names()
        self._variables = dict(variables or {})
        self.reasoning, self.tools = reasoning or None, tools or None
        self._tokenizer, self._model_config = tokenizer, model_config
        for argument, name, manager in (
            ("reasoning_parser", self.reasoning, v.ReasoningParserManager),
            ("tool_call_parser", self.tools, v.ToolParserManager),
        ):
            if name and name not in (known := sorted(manager.list_registered())):
                raise ConfigError(
                    f"engine_args.{argument}: vLLM has no parser {name!r}; "
                    f"allowed: {', '.join(known)}"
                )
        more = {} if strict is None else {"tool_strict_level": strict}
        try:
            self._made = v.ParserManager.get_parser(
                tool_parser_name=self.tools,
                reasoning_parser_name=self.reasoning,
                enable_auto_tools=self.tools is not None,
                **more,
            )
            if self._made is not None:
                self.new()
        except Exception as exc:  # each parser has its own way to miss its tokens
            names = " and ".join(n for n in (self.reasoning, self.tools) if n)
            raise ConfigError(
                f"engine_args: vLLM's parser {names} cannot be used with this model: {exc}"
            ) from exc

    def new(self, tools: Any = None, variables: Mapping[str, Any] | None = None) -> Any:
        """vLLM's parser for one text; ``variables`` are the chat template's."""
        assert self._made is not None, "asked for only where the stage names a parser"
        return self._made(
            self._tokenizer,
            tools,
            model_config=self._model_config,
            chat_template_kwargs=dict(variables or {}),
        )

    def of_request(self, params: Mapping[str, Any]) -> RequestParser | None:
        """What reads one request's answers; None if nothing is to be read out of them.

        Raises:
            InvalidRequest: the tools are not what vLLM takes, or the stage cannot force calls.
        """
        tools, choice = params.get("tools"), params.get("tool_choice")
        if tools and not self.tools and choice not in (None, "auto", "none"):
            raise refused(
                "tool_choice",
                "the stage cannot force calls: it names no engine_args.tool_call_parser",
            )
        if not (self.reasoning or (tools and self.tools)):
            return None
        fields: dict[str, Any] = {}
        if tools and self.tools:
            fields["tools"], fields["tool_choice"] = tools, choice or "auto"
            if params.get("parallel_tool_calls") is not None:
                fields["parallel_tool_calls"] = params["parallel_tool_calls"]
        if params.get("structured_outputs") is not None:
            fields["structured_outputs"] = structured_outputs(params["structured_outputs"])
        try:
            request = contract.names().ChatCompletionRequest(model="omniq", messages=[], **fields)
        except ValueError as exc:
            message = str(exc).replace("\n", "; ")
            if isinstance(exc, ValidationError):
                faults = exc.errors(include_url=False, include_context=False)
                message = "; ".join(f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in faults)
            name = getattr(exc, "parameter", None) or message
            about = "tool_choice" if "tool_choice" in name else "tools"
            raise refused(about, message) from exc
        variables = {**self._variables, **(params.get("chat_template_kwargs") or {})}
        return RequestParser(self, request, variables)


class RequestParser:
    """Makes a :class:`SequenceParser` for each answer of one request.

    Attributes:
        special_tokens: the parsers look for special tokens, which the text must then show.
        structured_outputs: what the answers must match, vLLM's ``StructuredOutputsParams``: the
            request's own, or the form of a forced call.
    """

    def __init__(self, parsers: Parsers, request: Any, variables: Mapping[str, Any]) -> None:
        self._parsers, self._variables = parsers, dict(variables)
        self._first = self._parser(request)
        if self._first.reasoning_parser is not None or request.tool_choice != "none":
            request = self._first.adjust_request(request)
        self._request = request
        self.special_tokens = not self._request.skip_special_tokens
        self.structured_outputs = self._request.structured_outputs

    @property
    def forces_a_call(self) -> bool:
        """Whether the answers must be calls of tools."""
        return self._request.tool_choice not in (None, "auto", "none")

    def _parser(self, request: Any) -> Any:
        return self._parsers.new(request.tools, self._variables)

    def reasoning(self, prompt_ids: Sequence[int] | None) -> dict[str, Any]:
        """Arguments of vLLM's ``generate``: whether the grammar holds from the first token on.

        Args:
            prompt_ids: of the prompt; None where only vLLM will know them.
        """
        if self._first.reasoning_parser is None:
            return {}
        ended = None
        # Not in vLLM 0.26: the parser's grammar has a place for the reasoning itself.
        if getattr(self._request, "_grammar_from_parser", False):
            ended = True
        elif prompt_ids is not None:
            ended = self._first.is_reasoning_end(list(prompt_ids))
        options = {"chat_template_kwargs": self._variables}
        return {"reasoning_ended": ended, "reasoning_parser_kwargs": options}

    def sequence(self) -> SequenceParser:
        """For one answer."""
        return SequenceParser(lambda: self._parser(self._request), self._request)


class SequenceParser:
    """Reads one answer, piece by piece and as a whole.

    Args:
        make: makes a parser of vLLM's, which reads a text once.
        request: vLLM's ``ChatCompletionRequest``.
    """

    def __init__(self, make: Any, request: Any) -> None:
        self._make, self._request = make, request
        self._streaming = make()
        self._begun = False
        self._ids: dict[int, str] = {}

    def push(
        self, text: str, ids: Sequence[int], prompt_ids: Sequence[int], *, finished: bool
    ) -> Parsed:
        """The parts of the next piece; of ``prompt_ids`` those of the first one count."""
        prompt = None if self._begun else list(prompt_ids)
        self._begun = True
        delta = self._streaming.parse_delta(
            text, list(ids), self._request, prompt, finished=finished
        )
        if delta is None:
            return Parsed()
        calls = [c.model_dump(mode="json", exclude_none=True) for c in delta.tool_calls or ()]
        calls = [c for c in calls if self._wanted(c["index"])]
        for call in calls:
            if call.get("id"):
                self._ids.setdefault(call["index"], call["id"])
        return Parsed(delta.content or "", delta.reasoning or "", calls)

    def whole(self, text: str, ids: Sequence[int]) -> Parsed:
        """The parts of the finished answer; its calls have the ids they had in the pieces."""
        reasoning, content, calls = self._make().parse(
            text, self._request, enable_auto_tools=True, model_output_token_ids=ids
        )
        found = [
            {
                "id": self._ids.get(i) or call.id or f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls or ())
            if self._wanted(i)
        ]
        return Parsed(content or "", reasoning or "", found)

    def _wanted(self, number: int) -> bool:
        return number == 0 or self._request.parallel_tool_calls is not False

"""A stage's inputs as vLLM's engine takes them: text, conversations, ids, embeddings, media."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omniq.engines.base import StageInput
from omniq.engines.inputs import tensor_input, text_input
from omniq.engines.text import PromptEncoder, check_messages
from omniq.engines.vllm import contract, media
from omniq.engines.vllm.sampling import refused

#: Inputs that are a prompt; a request has exactly one.
PROMPTS = ("prompt", "messages", "token_ids", "prompt_embeds")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the loaded model accepts."""

    context: int
    """Positions."""
    vocabulary: int
    hidden: int
    """Size of an embedding."""
    dtype: torch.dtype
    embeds: bool
    """Whether the engine takes prompt_embeds."""
    media: Mapping[str, int]
    """How many items of each kind (``image``, ``audio``) a prompt may hold."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's prompt."""

    name: str
    """Input it came by."""
    engine_input: Any
    """What vLLM's ``generate`` takes."""
    tokens: int | None
    """Its length; None until vLLM has put in the media."""

    @property
    def ids(self) -> list[int] | None:
        """Its tokens; None for embeddings, and until vLLM has put in the media."""
        found: list[int] | None = self.engine_input.get("prompt_token_ids")
        return found


class PromptReader:
    """Reads prompts; on the engine's model thread, as tokenizers are not thread-safe.

    Args:
        encoder: makes text and ids.
        limits: what the model accepts.
        placeholder: the model's word for the i-th item of a kind of media, for templates that
            have no place for them.
        hide_unused_tools: whether the template sees no tools where ``tool_choice`` is ``none``.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        limits: ModelLimits,
        placeholder: Callable[[str, int], str | None],
        *,
        hide_unused_tools: bool = False,
    ) -> None:
        self._encoder, self._limits, self._placeholder = encoder, limits, placeholder
        self._hide_unused_tools = hide_unused_tools

    def is_quick(self, inputs: Mapping[str, StageInput]) -> bool:
        """Whether reading takes no tokenizer and no time: may be done on any thread."""
        return "token_ids" in inputs and len(inputs) == 1

    def read(self, inputs: Mapping[str, StageInput], params: Mapping[str, Any]) -> Prompt:
        """The prompt of one request.

        Raises:
            InvalidRequest: naming the input that is missing or wrong.
        """
        given = [name for name in PROMPTS if name in inputs]
        if len(given) != 1:
            got = ", ".join(inputs) or "nothing"
            raise media.bad(
                "prompt", f"the stage needs exactly one of {', '.join(PROMPTS)}; it got: {got}"
            )
        name, params = given[0], self._with_tools(params)
        found = media.of_inputs(inputs)
        if name == "messages" or found:
            return self._conversation(name, inputs, params, found)
        if name == "prompt_embeds":
            for unused in ("tools", "chat_template_kwargs"):
                if params.get(unused):
                    raise refused(unused, f"{name} does not pass through a chat template")
            return self._embeds(inputs)
        return _tokens(name, self._encoder.read(inputs, params, self._limits.context))

    def _conversation(
        self,
        name: str,
        inputs: Mapping[str, StageInput],
        params: Mapping[str, Any],
        found: media.Media,
    ) -> Prompt:
        if name not in ("prompt", "messages"):
            raise media.bad(name, "media need a prompt or messages to belong to")
        messages: Any = inputs["messages"].value if name == "messages" else None
        if name == "prompt":
            messages = [{"role": "user", "content": text_input(inputs, name)}]
        check_messages(messages, name)
        self.check_media(name, media.counts(messages))  # before anything is decoded
        plain, inside = media.of_messages(messages)
        if found:  # what stages before made belongs to the last turn
            plain[-1] = {**plain[-1], "content": media.with_parts(plain[-1].get("content"), found)}
        for kind, items in found.items():
            inside.setdefault(kind, []).extend(items)
        return self.said(name, plain, inside, params)

    def said(
        self,
        name: str,
        plain: Sequence[Mapping[str, Any]],
        inside: media.Media,
        params: Mapping[str, Any],
        more: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt of a conversation whose media are decoded.

        Args:
            name: the input it came by.
            plain: messages, of media only the type.
            inside: the media, in order.
            params: of the request.
            more: vLLM's ``mm_processor_kwargs`` for this prompt.

        Raises:
            InvalidRequest: it does not fit the model.
        """
        params = self._with_tools(params)
        tools, options = params.get("tools"), params.get("chat_template_kwargs")
        if not inside:
            ids = self._encoder.encode_chat(
                plain, self._limits.context, tools=tools, options=options, field=name
            )
            return _tokens(name, ids)
        self.check_media(name, {kind: len(items) for kind, items in inside.items()})
        if not self._encoder.takes_parts:
            plain = media.as_text(plain, self._placeholder)
        text = self._encoder.render_chat(plain, tools=tools, options=options, field=name)
        made: dict[str, Any] = {"prompt": text, "multi_modal_data": inside}
        if more:
            made["mm_processor_kwargs"] = dict(more)
        return Prompt(name, made, None)

    def _with_tools(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._hide_unused_tools and params.get("tool_choice") == "none":
            return {k: x for k, x in params.items() if k != "tools"}
        return params

    def check_media(self, name: str, counts: Mapping[str, int]) -> None:
        """Whether the model takes so many media of these kinds in a prompt.

        Raises:
            InvalidRequest: it does not.
        """
        for kind, count in counts.items():
            most = self._limits.media.get(kind, 0)
            if count > most:
                takes = f"at most {most} of kind {kind}" if most else f"no {kind}"
                raise media.bad(name, f"the stage's model takes {takes}; got {count}")

    def _embeds(self, inputs: Mapping[str, StageInput]) -> Prompt:
        limits = self._limits
        tensor = tensor_input(inputs, "prompt_embeds")
        if not limits.embeds:
            raise media.bad(
                "prompt_embeds",
                "the stage does not take them; set engine_args {enable_prompt_embeds: true}",
            )
        if tensor.ndim == 3 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.ndim != 2 or tensor.shape[1] != limits.hidden:
            raise media.bad(
                "prompt_embeds", f"must be [tokens, {limits.hidden}], is {_form(tensor)}"
            )
        self._encoder.checked(range(len(tensor)), limits.context, "prompt_embeds")
        made = contract.names().embeds_input(tensor.to("cpu", limits.dtype))
        return Prompt("prompt_embeds", made, len(tensor))


def _tokens(name: str, ids: list[int]) -> Prompt:
    return Prompt(name, contract.names().tokens_input(ids), len(ids))


def _form(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"

"""What the OpenAI-compatible routes answer, for the OpenAPI document.

Answers are made as plain objects (:mod:`omniq_api.openai_compat.answers`); these say what is in
them, and the fuzz tests hold them against real answers.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

#: One server-sent event of a stream; ``data`` is a chunk, an ``error``, or ``[DONE]``.
EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}


class _Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class Usage(_Answer):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int = Field(0, description="Of embeddings: absent.")
    total_tokens: int


class Message(_Answer):
    """What the model says; `tool_calls`, `reasoning` and `audio` if there are any."""

    role: str
    content: str | None


class ChatChoice(_Answer):
    """One answer."""

    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class ChatCompletion(_Answer):
    """A whole answer of a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    partial: bool = Field(False, description="The answer is not spoken, as was allowed.")


class TextChoice(_Answer):
    """One completion."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class Completion(_Answer):
    """Completions of all prompts of a request, in their order."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Embedding(_Answer):
    """One vector."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="`base64`: little-endian float32.")


class Embeddings(_Answer):
    """The vectors of all inputs of a request, in their order."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: Usage


class Picture(_Answer):
    """One picture: its file, or where it is."""

    b64_json: str | None = None
    url: str | None = None


class Pictures(_Answer):
    """The pictures of a request."""

    created: int
    data: list[Picture]
    background: Literal["opaque"]
    output_format: Literal["png", "jpeg", "webp"]
    size: str = Field(description="`WIDTHxHEIGHT` in pixels.")


class Model(_Answer):
    """A name by which a pipeline is known."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(description="The model of the stage that answers.")
    pipeline: str


class ModelList(_Answer):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


def answer(model: type[BaseModel], *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The entry of ``responses=`` for status 200; ``streams``: if asked, as server-sent events."""
    found: dict[str, Any] = {"model": model, "description": str(model.__doc__).splitlines()[0]}
    if streams:
        found["content"] = {"text/event-stream": {"itemSchema": EVENT}}
    return {200: found}

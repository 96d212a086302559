"""Bodies of the OpenAI-compatible routes.

Fields are OpenAI's. Beside them every parameter of an AR stage (vLLM's ``SamplingParams`` names,
``top_k``, ``ignore_eos``, ...) may stand at the top level, as vLLM's own server takes them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from omniq.settings import get_settings

MAX_PROMPTS = 256

Text = Annotated[str, StringConstraints(strict=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
Prompt = Text | TokenIds
Prompts = Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)]


class StreamOptions(BaseModel):
    """What a stream ends with."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = Field(False, description="Accepted; there is no padding.")


class OpenAIRequest(BaseModel):
    """What all three have in common."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(max_length=512, description="A name that `/v1/models` lists.")]
    user: str | None = Field(None, max_length=512, description="Kept with the job as a label.")

    @property
    def more(self) -> dict[str, Any]:
        """Fields that are not declared here: parameters of the stage, or unknown ones."""
        return dict(self.model_extra or {})


class _Generation(OpenAIRequest):
    stream: bool = Field(False, strict=True)
    stream_options: StreamOptions | None = None
    service_tier: Any = Field(None, description="Accepted, without effect.")

    @model_validator(mode="after")
    def _options_of_streams(self) -> _Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given with stream: true only")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        asked = self.stream_options is not None and self.stream_options.include_usage
        return asked or get_settings().openai_always_usage


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="allow")

    name: str


class Tool(BaseModel):
    """A tool; only functions exist."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function


class JSONSchema(BaseModel):
    """The schema an answer must match."""

    model_config = ConfigDict(extra="allow")

    name: str
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """What an answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with type 'json_schema', and only then")
        return self


class ChatRequest(_Generation):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, strict=True)
    logprobs: bool | None = Field(None, strict=True)
    top_logprobs: int | None = Field(None, ge=0, le=20, strict=True)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, min_length=1, max_length=128)
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="`none`, `auto`, `required`, or one function."
    )
    parallel_tool_calls: bool | None = Field(None, strict=True)
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given with logprobs: true only")
        return self


class CompletionRequest(_Generation):
    """Body of ``POST /v1/completions``."""

    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=20, strict=True)
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None


class EmbeddingRequest(OpenAIRequest):
    """Body of ``POST /v1/embeddings``."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"

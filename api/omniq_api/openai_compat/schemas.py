"""Bodies of the OpenAI-compatible routes.

Fields are OpenAI's. Beside them every parameter of an AR stage (vLLM's ``SamplingParams`` names,
``top_k``, ``ignore_eos``, ...) may stand at the top level, as vLLM's own server takes them; with
pictures, every parameter of the pipeline.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from omniq.settings import get_settings
from omniq_api.schemas import MAX_METADATA, MetadataKey, MetadataValue

MAX_PROMPTS = 256
MAX_PICTURES = 16

Text = Annotated[str, StringConstraints(strict=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
Prompt = Text | TokenIds
Prompts = Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)]


def _only_with(field: str, switch: str) -> dict[str, Any]:
    """JSON schema: ``field`` may be given with ``switch``: true only."""
    return {
        "anyOf": [
            {"properties": {field: {"type": "null"}}},
            {"required": [switch], "properties": {switch: {"const": True}}},
        ]
    }


class StreamOptions(BaseModel):
    """What a stream ends with."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: bool = Field(False, description="Accepted; there is no padding.")


class _Body(BaseModel):
    """What all have in common."""

    model_config = ConfigDict(extra="allow")

    user: str | None = Field(None, max_length=512, description="Kept with the job as a label.")

    @property
    def more(self) -> dict[str, Any]:
        """Fields that are not declared here: parameters of stages, or unknown ones."""
        return dict(self.model_extra or {})


class OpenAIRequest(_Body):
    """What requests to language models have in common."""

    model: Annotated[str, Field(max_length=512, description="A name that `/v1/models` lists.")]


class _Generation(OpenAIRequest):
    model_config = ConfigDict(json_schema_extra={"allOf": [_only_with("stream_options", "stream")]})

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

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {
                    "required": ["json_schema"],
                    "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {"type": "object"},
                    },
                },
                {
                    "properties": {
                        "type": {"enum": ["text", "json_object"]},
                        "json_schema": {"type": "null"},
                    }
                },
            ]
        }
    )

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with type 'json_schema', and only then")
        return self


class ChatAudio(BaseModel):
    """How an answer is spoken."""

    model_config = ConfigDict(extra="forbid", strict=True)

    voice: str | None = Field(None, min_length=1, max_length=256, description="The model's own.")
    format: Literal["wav", "pcm16", "flac", "mp3", "opus", "aac"] | None = Field(
        None, description="Default: `wav`, of a stream `pcm16`, which has no other."
    )


class ChatRequest(_Generation):
    """Body of ``POST /v1/chat/completions``."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                _only_with("stream_options", "stream"),
                _only_with("top_logprobs", "logprobs"),
            ]
        }
    )

    messages: list[dict[str, Any]] = Field(
        min_length=1,
        json_schema_extra={
            "items": {
                "type": "object",
                "required": ["role"],
                "properties": {"role": {"type": "string"}},
            }
        },
    )
    modalities: list[Literal["text", "audio"]] | None = Field(
        None,
        min_length=1,
        description="`[text]` (the default), or with models that speak `[text, audio]`.",
    )
    audio: ChatAudio | None = None
    allow_partial: bool = Field(
        False,
        strict=True,
        description="omniq's own: if the answer cannot be spoken, its text is the answer.",
    )
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
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=MAX_METADATA)

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


VoiceName = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=512)]


class Voice(BaseModel):
    """A voice by its id."""

    model_config = ConfigDict(extra="forbid")

    id: VoiceName


def _voice_name(value: Any) -> Any:
    return value["id"] if isinstance(value, dict) and set(value) == {"id"} else value


class SpeechRequest(OpenAIRequest):
    """Body of ``POST /v1/audio/speech``."""

    input: Text
    voice: Annotated[
        VoiceName, BeforeValidator(_voice_name, json_schema_input_type=VoiceName | Voice)
    ] = Field(description="One of the pipeline's; without effect if it has one voice only.")
    instructions: Text | None = Field(None, description="Where the pipeline takes any.")
    ref_audio: str | dict[str, str] | None = Field(
        None,
        description="A recording to speak like, where the pipeline takes one: a data: URL, or a "
        "job's result file. With `ref_text`.",
    )
    ref_text: Text | None = Field(None, description="What is said in the recording.")
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = Field(
        "mp3", description="pcm: 16-bit little-endian samples, at the pipeline's rate."
    )
    speed: float | None = Field(
        None, ge=0.25, le=4.0, strict=True, description="Other than 1 where the pipeline takes it."
    )
    stream_format: Literal["audio", "sse"] = Field(
        "audio", description="sse: events with base64 pieces of the same file."
    )


class ImageRequest(_Body):
    """Body of ``POST /v1/images/generations``."""

    prompt: Text
    model: str | None = Field(
        None, max_length=512, description="A name that `/v1/models` lists; the default pipeline."
    )
    n: int | None = Field(None, ge=1, le=10, strict=True, description="Pictures.")
    size: str | None = Field(
        None,
        pattern=r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$",
        description="`WIDTHxHEIGHT` in pixels; `auto`: the pipeline's own.",
    )
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="`b64_json` (the default): the file; `url`: where it is."
    )
    output_format: Literal["png", "jpeg", "webp"] | None = Field(
        None, description="Default: the pipeline's own."
    )
    output_compression: int | None = Field(
        None, ge=0, le=100, strict=True, description="Quality of a jpeg or webp file."
    )
    background: Literal["auto", "opaque"] | None = None
    quality: Literal["auto", "standard", "hd", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(None, description="Accepted, without effect.")
    )
    style: Literal["vivid", "natural"] | None = Field(None, description="Without effect.")
    moderation: Literal["auto", "low"] | None = Field(None, description="Without effect.")
    stream: Literal[False] | None = None
    partial_images: Literal[0] | None = None
    safety_identifier: str | None = Field(
        None, max_length=512, description="Kept with the job as a label."
    )


class ImageEditRequest(ImageRequest):
    """Form of ``POST /v1/images/edits``."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """A form has no nulls: what is not given is left out."""
        schema = handler(core_schema)
        for field in handler.resolve_ref_schema(schema)["properties"].values():
            kinds = [kind for kind in field.pop("anyOf", ()) if kind != {"type": "null"}]
            if kinds:
                field.pop("default")
                field.update(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})
        return schema

    image: list[bytes] = Field(
        min_length=1,
        max_length=MAX_PICTURES,
        description="PNG, JPEG or WebP; several as `image[]`.",
    )
    mask: bytes | None = Field(
        None, description="PNG or WebP of the picture's size: what is transparent is made anew."
    )
    input_fidelity: Literal["high", "low"] | None = Field(None, description="Without effect.")

"""Request parameters of each engine type, by the field's standard names.

A job's ``parameters`` are one flat object; every stage takes the names it knows, so that ``seed``
reaches the AR and the DiT stage alike. Bounds here are what the engine type can ever accept; a
stage's configuration narrows them (:class:`omniq.config.stage.Limit`) and sets defaults.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
)

Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


#: Below this temperature decoding is greedy (vLLM draws the line at the same place).
GREEDY_BELOW = 1e-5
#: Sequences of one request; vLLM's own bound is an environment variable of the worker.
MOST_SEQUENCES = 128
#: As vLLM bounds ``logprob_token_ids``.
MOST_LOGPROB_IDS = 128

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Deterministic = Annotated[
    bool | None,
    Field(description="True: bit for bit what the request alone gives; shares no forward pass."),
]
Speaker = Annotated[
    str | None, Field(min_length=1, max_length=256, description="One of the model's voices.")
]
Text = Annotated[str, Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]


class StageParams(BaseModel):
    """Base of the per-stage parameter models."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _token_keys(bias: dict[str | int, float]) -> dict[str | int, float]:
    for key in bias:
        if not str(key).isdecimal():
            raise ValueError(f"keys must be token ids, got {key!r}")
    return bias


class StructuredOutputs(BaseModel):
    """What the output must match; exactly one constraint (vLLM ``StructuredOutputsParams``)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_: str | dict[str, Any] | None = Field(None, alias="json", description="JSON schema.")
    regex: str | None = Field(None, min_length=1)
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1, description="EBNF.")
    json_object: Literal[True] | None = Field(None, description="Any JSON object.")
    structural_tag: str | None = Field(None, min_length=1)
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


#: The names of :class:`StructuredOutputs` of which a request gives one.
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class RepetitionDetection(BaseModel):
    """Ends a generation that repeats itself (vLLM ``RepetitionDetectionParams``)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_pattern_size: int = Field(ge=1)
    min_pattern_size: int = Field(0, ge=0)
    min_count: int = Field(ge=2)


class MediaOptions(BaseModel):
    """How an omni model takes videos (of vLLM's ``mm_processor_kwargs`` those)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    use_audio_in_video: bool | None = Field(
        None, description="The sound of each video is heard with it; default false."
    )
    fps: float | None = Field(
        None, gt=0, le=60, allow_inf_nan=False, description="Frames taken of a second; default 2."
    )
    min_frames: int | None = Field(
        None, ge=2, le=4096, description="Frames taken of a short video; default the model's, 4."
    )
    max_frames: int | None = Field(
        None, ge=2, le=4096, description="Frames taken of a long video; default the model's, 768."
    )

    @field_validator("max_frames")
    @classmethod
    def _least_below_most(cls, value: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("min_frames")
        if value is not None and least is not None and least > value:
            raise ValueError(f"must be at least min_frames, {least}")
        return value


#: Beside one function.
TOOL_CHOICES = ("none", "auto", "required")


def _function_name(tool: dict[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


class ARParams(StageParams):
    """Parameters of an autoregressive stage: vLLM's ``SamplingParams`` by vLLM's own names.

    What depends on the model (vocabulary, context, grammar) the engine refuses, as the same kind
    of error.
    """

    max_tokens: int | None = Field(None, ge=1, le=1_000_000, description="New tokens at most.")
    min_tokens: int | None = Field(
        None, ge=0, le=1_000_000, description="No end token and no stop_token_ids before."
    )
    temperature: float | None = Field(
        None, ge=0.0, le=2.0, description="0 is greedy decoding.", allow_inf_nan=False
    )
    n: int | None = Field(
        None, ge=1, le=MOST_SEQUENCES, description="Answers to the same prompt; 1 when greedy."
    )
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="-1 or 0 keeps all tokens.")
    min_p: float | None = Field(
        None, ge=0.0, le=1.0, description="Least probability, relative to the likeliest token's."
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Below a hundredth a token's score can overflow.
    repetition_penalty: float | None = Field(None, ge=0.01, le=10.0, allow_inf_nan=False)
    seed: Seed | None = Field(None, description="Same seed, same output.")
    deterministic: Deterministic = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = Field(None, description="Go on behind an end token.")
    bad_words: list[Text] | None = Field(None, max_length=1024)
    logit_bias: Annotated[dict[str | int, float], AfterValidator(_token_keys)] | None = Field(
        None, max_length=1024, description="Token id to what is added to its score, -100 to 100."
    )
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1)
    logprobs: int | None = Field(
        None, ge=-1, description="Likeliest tokens given with each token; -1 is all of them."
    )
    prompt_logprobs: int | None = Field(None, ge=-1)
    logprob_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MOST_LOGPROB_IDS)
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = Field(None, ge=-1)
    repetition_detection: RepetitionDetection | None = None
    extra_args: dict[str, Any] | None = Field(
        None, description="Handed on to logits processors and plugins of vLLM."
    )
    # Not vLLM's SamplingParams, but of its chat and pooling requests.
    tools: list[dict[str, Any]] | None = Field(
        None, max_length=128, description="Functions the model may call, as in OpenAI's API."
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None,
        description="'auto' (the default where there are tools), 'none', 'required', or "
        "{type: function, function: {name}}.",
    )
    parallel_tool_calls: bool | None = Field(None, description="More than one call an answer.")
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: MediaOptions | None = Field(
        None, description="How an omni model takes videos."
    )
    lora: str | None = Field(None, min_length=1, description="One of the stage's lora_modules.")
    dimensions: int | None = Field(None, ge=1, description="Of embeddings (pooling stages).")
    use_activation: bool | None = Field(None, description="Normalise (pooling stages).")

    @field_validator("tool_choice")
    @classmethod
    def _one_of_the_tools(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None or value == "none" or "tools" not in info.data:
            return value
        names = [_function_name(tool) for tool in info.data["tools"] or ()]
        allowed = [*TOOL_CHOICES, *({"type": "function", "function": {"name": n}} for n in names)]
        if value not in allowed:
            shown = (a if isinstance(a, str) else json.dumps(a) for a in allowed)
            raise ValueError(f"must be one of {', '.join(shown)}")
        if not names:
            raise ValueError("needs tools")
        return value

    @field_validator("min_tokens")
    @classmethod
    def _least_within_most(cls, value: int | None, info: ValidationInfo) -> int | None:
        most = info.data.get("max_tokens")
        if value is not None and most is not None and value > most:
            raise ValueError(f"must be at most max_tokens, {most}")
        return value

    @field_validator("n")
    @classmethod
    def _one_when_greedy(cls, value: int | None, info: ValidationInfo) -> int | None:
        temperature = info.data.get("temperature")
        greedy = temperature is not None and temperature < GREEDY_BELOW
        if value is not None and value > 1 and greedy:
            raise ValueError("must be 1 when temperature is 0: all answers would be the same")
        return value

    @field_validator("structured_outputs", mode="before")
    @classmethod
    def _one_constraint(cls, value: Any) -> Any:
        if isinstance(value, dict):
            given = [name for name in CONSTRAINTS if value.get(name) is not None]
            if len(given) != 1:
                raise ValueError(
                    f"must have exactly one of {', '.join(CONSTRAINTS)}; "
                    f"has {', '.join(given) or 'none'}"
                )
        return value


class EncodeParams(StageParams):
    """Parameters of a stage that encodes prompts for a DiT (diffusers argument names)."""

    negative_prompt: str | None = Field(None, max_length=8_000)
    guidance_scale: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    true_cfg_scale: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    max_sequence_length: int | None = Field(None, ge=1, le=8_192, description="Tokens.")


class DiTParams(StageParams):
    """Parameters of a denoising stage (diffusers pipeline argument names).

    What the stage's pipeline does not take is refused by its engine.
    """

    height: int | None = Field(None, ge=1, le=16_384, description="Pixels.")
    width: int | None = Field(None, ge=1, le=16_384, description="Pixels.")
    num_frames: int | None = Field(None, ge=1, le=4_096, description="Frames of a video.")
    num_inference_steps: int | None = Field(None, ge=1, le=1_000)
    sigmas: list[Annotated[float, Field(gt=0.0, le=1_000.0)]] | None = Field(
        None, min_length=1, max_length=1_000, description="Noise levels instead of the default."
    )
    guidance_scale: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    guidance_scale_2: float | None = Field(
        None, ge=0.0, le=100.0, allow_inf_nan=False,
        description="Of the second transformer, where a model has two (Wan 2.2).",
    )  # fmt: skip
    true_cfg_scale: float | None = Field(
        None, ge=0.0, le=100.0, allow_inf_nan=False,
        description="Classifier-free guidance of a guidance-distilled model.",
    )  # fmt: skip
    strength: float | None = Field(
        None, gt=0.0, le=1.0, description="How much of an input picture is made anew."
    )
    num_images_per_prompt: int | None = Field(
        None, ge=1, le=64, description="Image i uses seed + i."
    )
    scheduler: Literal["euler", "heun", "unipc", "dpmpp"] | None = Field(
        None, description="Instead of the model's own."
    )
    lora: dict[str, Annotated[float, Field(ge=-10.0, le=10.0)]] | None = Field(
        None, max_length=8, description="Weights of LoRAs that the stage has, by name."
    )
    preview_every: int | None = Field(
        None, ge=0, le=1_000, description="Steps between previews; 0: none."
    )
    use_cache: bool | None = Field(None, description="False computes every step in full.")
    seed: Seed | None = Field(None, description="Same seed, same initial noise.")
    deterministic: Deterministic = None


class DecodeParams(StageParams):
    """Parameters of a decoder stage."""

    deterministic: Deterministic = None
    fps: float | None = Field(
        # A frame for longer than ten seconds does not fit into every format.
        None,
        ge=0.1,
        le=240.0,
        allow_inf_nan=False,
        description="Frames a second of a video.",
    )


class TalkParams(StageParams):
    """Parameters of a stage that says an answer in codes of speech (names of :class:`ARParams`)."""

    speaker: Speaker = None
    max_tokens: int | None = Field(None, ge=1, le=1_000_000, description="Codes at most.")
    min_tokens: int | None = Field(None, ge=0, le=1_000_000, description="No end before.")
    temperature: float | None = Field(None, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10.0, allow_inf_nan=False)
    seed: Seed | None = None
    deterministic: Deterministic = None


class VocodeParams(StageParams):
    """Parameters of a stage that makes sound of codes."""

    speaker: Speaker = None
    seed: Seed | None = Field(None, description="Same seed, same initial noise.")
    num_steps: int | None = Field(
        None, ge=2, le=1_000, description="Points in time of a flow-matching solver."
    )
    guidance_scale: float | None = Field(None, ge=0.0, le=100.0, allow_inf_nan=False)
    sway_coefficient: float | None = Field(
        None, ge=-1.0, le=2.0, allow_inf_nan=False,
        description="Below 0 the solver's points lie closer to the noise.",
    )  # fmt: skip


#: Of a name that several have, the last one is what ``more_parameters`` mean.
PARAMS: dict[str, type[StageParams]] = {
    "talk": TalkParams,
    "vocode": VocodeParams,
    "AR": ARParams,
    "encode": EncodeParams,
    "DiT": DiTParams,
    "decode": DecodeParams,
}


def parameter_model(engine_type: str, more: Sequence[str] = ()) -> type[StageParams]:
    """The parameters of a stage: its engine type's, and ``more`` of other types by name.

    Raises:
        ValueError: no engine type has a parameter of such a name.
    """
    return _extended(engine_type, tuple(more))


@cache
def _extended(engine_type: str, more: tuple[str, ...]) -> type[StageParams]:
    own = PARAMS[engine_type]
    if not more:
        return own
    others = {n: f for model in PARAMS.values() for n, f in model.model_fields.items()}
    if unknown := [name for name in more if name not in others]:
        raise ValueError(f"unknown parameter {unknown[0]!r}; allowed: {', '.join(sorted(others))}")
    fields: dict[str, Any] = {
        name: (others[name].annotation, others[name])
        for name in more
        if name not in own.model_fields
    }
    return create_model(own.__name__, __base__=own, **fields)

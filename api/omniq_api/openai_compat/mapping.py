"""From OpenAI's fields to jobs: the only place that knows both.

A request becomes one job for each of its prompts. Parameters keep vLLM's ``SamplingParams`` names,
which most of OpenAI's fields have, too; :data:`FIELDS` tells the others, so that an error names the
field that the client knows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omniq.config.params import ARParams
from omniq.config.served import ServedModel, served_models
from omniq.errors import InvalidRequest
from omniq_api.openai_compat.faults import OpenAIError
from omniq_api.openai_compat.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    OpenAIRequest,
    Prompts,
    ResponseFormat,
)

#: OpenAI's default of ``/v1/completions``; chats have what is left of the model's context.
COMPLETION_TOKENS = 16
#: Parameters that come from a field of another name.
FIELDS = {"structured_outputs": "response_format", "logprobs": "top_logprobs"}


@dataclass(frozen=True, slots=True)
class Submission:
    """One job to submit, and how its faults are called in OpenAI's terms."""

    pipeline: str
    inputs: dict[str, Any]
    parameters: dict[str, Any]
    metadata: dict[str, str] = field(default_factory=dict)
    outputs: list[str] | None = None
    """Which of the pipeline's outputs are wanted; None: all."""
    allow_partial: bool = False
    """Whether the text alone is good, if the other outputs cannot be made."""
    names: dict[str, str] = field(default_factory=dict)
    """Field of the job (``parameters.max_tokens``, ``input.messages``) -> OpenAI's field."""


def find_model(name: str) -> ServedModel:
    """The model of that name.

    Raises:
        OpenAIError: 404; there is none.
    """
    models = served_models()
    if name not in models:
        raise OpenAIError(
            404,
            f"The model {name!r} does not exist; available: {', '.join(models) or 'none'}",
            kind="invalid_request_error",
            code="model_not_found",
            param="model",
        )
    return models[name]


def of_chat(body: ChatRequest, model: ServedModel) -> Submission:
    """The job of one chat completion.

    Raises:
        OpenAIError: the model takes no messages, or a field is unknown.
    """
    inputs = {input_of(model, "messages", "messages"): body.messages}
    parameters = _parameters(body, model)
    names = {}
    if body.max_completion_tokens is not None:
        parameters["max_tokens"] = body.max_completion_tokens
        names["parameters.max_tokens"] = "max_completion_tokens"
    if body.logprobs:
        parameters["logprobs"] = body.top_logprobs or 0
    if body.response_format is not None:
        parameters.update(_structured(body.response_format))
    if body.tools:
        parameters["tools"] = [t.model_dump(exclude_unset=True) for t in body.tools]
    if body.tool_choice is not None:
        parameters["tool_choice"] = body.tool_choice
    if body.parallel_tool_calls is not None:
        parameters["parallel_tool_calls"] = body.parallel_tool_calls
    if body.audio is not None and body.audio.voice is not None:
        parameters["speaker"] = body.audio.voice
        names["parameters.speaker"] = "audio.voice"
    return submission_of(
        model, inputs, parameters, "messages", user=body.user, metadata=body.metadata, names=names
    )


def of_completion(body: CompletionRequest, model: ServedModel) -> list[Submission]:
    """One job for each prompt, in order.

    Raises:
        OpenAIError: the model takes no such prompts, or a field is unknown.
    """
    parameters = {"max_tokens": COMPLETION_TOKENS, **_parameters(body, model)}
    if body.logprobs is not None:
        parameters["logprobs"] = body.logprobs
    names = {"parameters.logprobs": "logprobs"}
    return [
        submission_of(model, inputs, parameters, "prompt", user=body.user, names=names)
        for inputs in _prompts(model, body.prompt, "prompt")
    ]


def of_embedding(body: EmbeddingRequest, model: ServedModel) -> list[Submission]:
    """One job for each input, in order.

    Raises:
        OpenAIError: the model takes no such input, or makes no embeddings.
    """
    if model.embedding is None:
        raise unable(model, "makes no embeddings", "model")
    parameters = _parameters(body, model)
    return [
        submission_of(model, inputs, parameters, "input", user=body.user)
        for inputs in _prompts(model, body.input, "input")
    ]


def in_openai_terms(exc: InvalidRequest, submission: Submission) -> OpenAIError:
    """A job that was refused, before it ran or by its engine, as the client's own field."""
    return refused(exc.message, exc.fields, submission, exc.code)


def refused(
    message: str, fields: list[dict[str, str]], submission: Submission, code: str
) -> OpenAIError:
    """400 for faulty job fields; ``param`` is the first one, as OpenAI calls it."""
    if not fields:
        return OpenAIError(400, message, code=code)
    faults = [(submission.names.get(f["field"]) or _bare(f["field"]), f["message"]) for f in fields]
    # One field may be several of the job's: a size is width and height.
    text = "; ".join(dict.fromkeys(f"{name}: {fault}" for name, fault in faults))
    return OpenAIError(400, text, param=faults[0][0], code=code)


def _bare(job_field: str) -> str:
    name = job_field.removeprefix("parameters.").removeprefix("input.")
    first, dot, rest = name.partition(".")
    return FIELDS.get(first, first) + dot + rest


def _parameters(body: OpenAIRequest, model: ServedModel) -> dict[str, Any]:
    """Fields that are parameters of the stage by that very name; with models of several stages
    those of the others too, and objects of a stage's own by its id.

    Raises:
        OpenAIError: 400; a field is none.
    """
    known = set(ARParams.model_fields)
    if len(model.pipeline.stages) > 1:
        known |= {*model.pipeline.takers, *(s.stage_id for s in model.pipeline.stages)}
    for name in body.more:
        if name not in known:
            raise OpenAIError(400, f"unknown field {name!r}", param=name)
    return body.more


def _structured(form: ResponseFormat) -> dict[str, Any]:
    if form.type == "json_object":
        return {"structured_outputs": {"json_object": True}}
    if form.json_schema is not None:
        return {"structured_outputs": {"json": form.json_schema.schema_}}
    return {}


def _prompts(model: ServedModel, prompts: Prompts, param: str) -> list[dict[str, Any]]:
    """The inputs of a job for each prompt: texts or token ids, one or several."""
    several: list[Any]
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        several = [prompts]
    else:
        several = list(prompts)
    return [
        {input_of(model, "text" if isinstance(p, str) else "token_ids", param): p} for p in several
    ]


def input_of(model: ServedModel, kind: str, param: str) -> str:
    """Name of the model's input of that type, which the field ``param`` is for.

    Raises:
        OpenAIError: 400; it has none.
    """
    name = model.input_of(kind)
    if name is None:
        takes = ", ".join(f"{n} ({i.type})" for n, i in model.pipeline.inputs.items())
        raise unable(model, f"takes no {kind.replace('_', ' ')}; it takes: {takes}", param)
    return name


def unable(model: ServedModel, what: str, param: str) -> OpenAIError:
    """400: the model cannot do what the field ``param`` asks for."""
    return OpenAIError(400, f"the model {model.name!r} {what}", param=param)


def submission_of(
    model: ServedModel,
    inputs: dict[str, Any],
    parameters: dict[str, Any],
    param: str,
    *,
    user: str | None,
    metadata: dict[str, str] | None = None,
    names: dict[str, str] | None = None,
) -> Submission:
    """One job; ``param`` is the field that the inputs come from unless ``names`` says another."""
    labels = {**(metadata or {}), **({"user": user} if user else {})}
    called = {f"input.{name}": param for name in inputs}
    return Submission(
        model.pipeline.name, inputs, parameters, labels, names={**called, **(names or {})}
    )

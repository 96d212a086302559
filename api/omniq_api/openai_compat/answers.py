"""From finished jobs to OpenAI's response objects."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from omniq.config.served import ServedModel
from omniq.errors import InvalidRequest
from omniq.jobs.model import JobRecord, JobState
from omniq.settings import get_settings
from omniq_api.openai_compat.faults import OpenAIError
from omniq_api.openai_compat.mapping import Submission, refused
from omniq_api.openai_error import SERVER

FAILED_STATUS = {JobState.FAILED: 500, JobState.CANCELLED: 409, JobState.EXPIRED: 504}
CHAT, COMPLETION = "chat.completion", "text_completion"


def choices_of(record: JobRecord, model: ServedModel) -> list[dict[str, Any]]:
    """The stage's choices: ``index``, ``text``, ``finish_reason``, maybe ``logprobs`` and more."""
    name = model.output_from("choices")
    if name is not None and name in record.values:
        return list(record.values[name])
    return [
        {
            "index": 0,
            "text": record.values.get(model.text or "", ""),
            "finish_reason": record.values.get(model.output_from("finish_reason") or ""),
        }
    ]


def usage_of(records: Sequence[JobRecord], model: ServedModel) -> dict[str, Any]:
    """Tokens of all jobs together."""
    metrics = [r.stages[model.stage].metrics for r in records]
    prompt = sum(int(m.get("prompt_tokens", 0)) for m in metrics)
    completion = sum(int(m.get("completion_tokens", 0)) for m in metrics)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if any("cached_tokens" in m for m in metrics):
        cached = sum(int(m.get("cached_tokens", 0)) for m in metrics)
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


def failure(record: JobRecord, submission: Submission) -> OpenAIError:
    """The error answer for a job that ended in another way than success."""
    error = record.error or {}
    message = str(error.get("message") or f"the job was {record.state}")
    if error.get("code") == InvalidRequest.code:
        # What only the engine could find wrong with the request is still the request's fault.
        fields = (error.get("details") or {}).get("fields") or []
        return refused(message, fields, submission, InvalidRequest.code)
    return OpenAIError(
        FAILED_STATUS[record.state], message, kind=SERVER, code=str(error.get("code") or "") or None
    )


def chat_completion(record: JobRecord, model: ServedModel) -> dict[str, Any]:
    """The object of ``POST /v1/chat/completions``."""
    return {
        "id": chat_id(record.id),
        "object": CHAT,
        "created": int(record.spec.created),
        "model": model.name,
        "choices": [
            {
                "index": c["index"],
                "message": _message(c),
                "logprobs": chat_logprobs(c.get("logprobs"), asked(record, model)),
                "finish_reason": chat_finish_reason(c, record, model),
            }
            for c in choices_of(record, model)
        ],
        "usage": usage_of([record], model),
        **missing(record),
    }


def missing(record: JobRecord) -> dict[str, Any]:
    """Fields of omniq's own in an answer that lacks some of the job's outputs."""
    if not record.partial:
        return {}
    lacks = {name: why.model_dump() for name, why in sorted(record.missing.items())}
    return {"partial": True, "missing": lacks}


def completion(records: Sequence[JobRecord], model: ServedModel) -> dict[str, Any]:
    """The object of ``POST /v1/completions``; the jobs in the order of their prompts."""
    choices: list[dict[str, Any]] = []
    for record in records:
        for made in choices_of(record, model):
            choices.append(
                {
                    "index": len(choices),
                    "text": made["text"],
                    "logprobs": completion_logprobs(made.get("logprobs"), asked(record, model)),
                    "finish_reason": made["finish_reason"],
                }
            )
    return {
        "id": completion_id(records[0].id),
        "object": COMPLETION,
        "created": int(records[0].spec.created),
        "model": model.name,
        "choices": choices,
        "usage": usage_of(records, model),
    }


def embeddings(records: Sequence[JobRecord], model: ServedModel, form: str) -> dict[str, Any]:
    """The object of ``POST /v1/embeddings``; the jobs in the order of their inputs."""
    assert model.embedding is not None, "checked before the jobs were submitted"
    usage = usage_of(records, model)
    return {
        "object": "list",
        "model": model.name,
        "data": [
            {"object": "embedding", "index": i, "embedding": _vector(r, model.embedding, form)}
            for i, r in enumerate(records)
        ],
        "usage": {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["prompt_tokens"]},
    }


def _vector(record: JobRecord, output: str, form: str) -> list[float] | str:
    values = record.values.get(output)
    if not isinstance(values, list):
        raise OpenAIError(500, "the embedding is too large to be sent inline", kind=SERVER)
    if form == "float":
        return values
    return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()


def _message(choice: dict[str, Any]) -> dict[str, Any]:
    """The assistant's message; whatever the engine has parsed out of the text goes along."""
    message: dict[str, Any] = {"role": get_settings().openai_role, "content": choice["text"]}
    for name in ("reasoning", "tool_calls"):
        if choice.get(name):
            message[name] = choice[name]
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return message


def chat_finish_reason(choice: dict[str, Any], record: JobRecord, model: ServedModel) -> str | None:
    """``tool_calls`` where the model chose to call; ``stop`` where the function was named."""
    named = isinstance(record.spec.parameters[model.stage].get("tool_choice"), dict)
    if choice.get("tool_calls") and choice["finish_reason"] == "stop" and not named:
        return "tool_calls"
    reason: str | None = choice["finish_reason"]
    return reason


def asked(record: JobRecord, model: ServedModel) -> int:
    """How many of the likeliest tokens the client wants to see with each token."""
    return int(record.spec.parameters[model.stage].get("logprobs") or 0)


def chat_logprobs(tokens: list[dict[str, Any]] | None, most: int) -> dict[str, Any] | None:
    """Log probabilities as chats have them: one object a token, ``most`` alternatives in each."""
    if tokens is None:
        return None
    return {
        "content": [
            {**_token(t), "top_logprobs": [_token(o) for o in _likeliest(t, most)]} for t in tokens
        ]
    }


def completion_logprobs(
    tokens: list[dict[str, Any]] | None, most: int, start: int = 0
) -> dict[str, Any] | None:
    """Log probabilities as completions have them: one list for each property.

    ``start`` is where in the answer's text they begin.
    """
    if tokens is None:
        return None
    offsets, at = [], start
    for token in tokens:
        offsets.append(at)
        at += len(token["token"])
    return {
        "tokens": [_name(t) for t in tokens],
        "token_logprobs": [t["logprob"] for t in tokens],
        "top_logprobs": [{_name(o): o["logprob"] for o in _likeliest(t, most)} for t in tokens],
        "text_offset": offsets,
    }


def _likeliest(token: dict[str, Any], most: int) -> list[dict[str, Any]]:
    """The engine adds the token itself where it is not among them."""
    return list(token.get("top_logprobs", ()))[:most]


def _token(token: dict[str, Any]) -> dict[str, Any]:
    return {
        "token": _name(token),
        "logprob": token["logprob"],
        "bytes": list(token["token"].encode("utf-8", "replace")),
    }


def _name(token: dict[str, Any]) -> str:
    if get_settings().openai_tokens_as_ids:
        return f"token_id:{token['token_id']}"
    return str(token["token"])


def chat_id(job_id: str) -> str:
    """What clients see as the id of a chat completion."""
    return f"chatcmpl-{job_id}"


def completion_id(job_id: str) -> str:
    """What clients see as the id of a completion."""
    return f"cmpl-{job_id}"

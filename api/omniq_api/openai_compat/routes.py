"""``/v1/models``, ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from omniq.config.served import ServedModel, served_models
from omniq_api.openai_compat import answers, chat_audio, images, mapping, running, speech
from omniq_api.openai_compat.answer_models import (
    ChatCompletion,
    Completion,
    Embeddings,
    Model,
    ModelList,
    answer,
)
from omniq_api.openai_compat.faults import FAULTS, OpenAIError, OpenAIRoute, responses
from omniq_api.openai_compat.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from omniq_api.openai_compat.sound_stream import SpokenJob
from omniq_api.openai_compat.stream import JobStream, chat_chunks, completion_chunks
from omniq_api.openai_compat.streaming import streamed
from omniq_api.paths import REST
from omniq_api.services import Live, idempotent

router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute)
router.include_router(images.router)
router.include_router(speech.router)

STARTED = int(time.time())


@router.get(
    "/models",
    summary="List models",
    response_model=ModelList,
    responses=responses(),
)
async def list_models() -> dict[str, Any]:
    """Every name by which the routes of OpenAI's kind know a pipeline."""
    return {"object": "list", "data": [_model_object(m) for m in served_models().values()]}


@router.get(
    f"/models/{REST}",
    summary="Read a model",
    response_model=Model,
    responses=responses(404),
)
async def read_model(name: str) -> dict[str, Any]:
    """One model."""
    return _model_object(mapping.find_model(name))


@router.post(
    "/chat/completions",
    summary="Answer a conversation",
    response_class=Response,
    dependencies=[Depends(idempotent)],
    responses={**answer(ChatCompletion, streams=True), **responses(*FAULTS)},
)
async def chat(request: Request, services: Live, body: ChatRequest) -> Response:
    """A chat completion, whole or (`stream`) as server-sent events.

    A client that disconnects cancels its job.
    """
    model = mapping.find_model(body.model)
    _needs_text(model)
    speaks = chat_audio.wants_audio(body, model)
    submission = mapping.of_chat(body, model)
    submission = replace(
        submission,
        outputs=chat_audio.outputs_of(model, audio=speaks),
        allow_partial=speaks and chat_audio.may_lack(body, model),
    )
    jobs = await running.submitted(services, [submission], stream=body.stream)
    if body.stream:
        spoken = SpokenJob(services, jobs[0], model, submission) if speaks else None
        stream = JobStream(services, jobs[0], model, submission, spoken)
        chunks = chat_chunks(stream, include_usage=body.include_usage)
        return await streamed(request, services, jobs, chunks)
    records = await running.finished(request, services, jobs, [submission])
    if not records:
        return running.gone()
    answer = answers.chat_completion(records[0], model)
    if speaks:
        said = answer["choices"][0]["message"]
        form, text = chat_audio.form_of(body), said["content"] or ""
        said["audio"] = await chat_audio.message(services, records[0], model, form, text)
    return running.answer(answer)


@router.post(
    "/completions",
    summary="Go on with a text",
    response_class=Response,
    dependencies=[Depends(idempotent)],
    responses={**answer(Completion, streams=True), **responses(*FAULTS)},
)
async def completions(request: Request, services: Live, body: CompletionRequest) -> Response:
    """A completion of one or several prompts, whole or (`stream`) as server-sent events.

    A client that disconnects cancels its jobs.
    """
    model = mapping.find_model(body.model)
    _needs_text(model)
    submissions = mapping.of_completion(body, model)
    jobs = await running.submitted(services, submissions, stream=body.stream)
    if body.stream:
        streams = [
            JobStream(services, job, model, s) for job, s in zip(jobs, submissions, strict=True)
        ]
        chunks = completion_chunks(streams, include_usage=body.include_usage)
        return await streamed(request, services, jobs, chunks)
    records = await running.finished(request, services, jobs, submissions)
    return running.answer(answers.completion(records, model)) if records else running.gone()


@router.post(
    "/embeddings",
    summary="Embed texts",
    response_class=Response,
    dependencies=[Depends(idempotent)],
    responses={**answer(Embeddings), **responses(*FAULTS)},
)
async def embeddings(request: Request, services: Live, body: EmbeddingRequest) -> Response:
    """The embedding of each input."""
    model = mapping.find_model(body.model)
    submissions = mapping.of_embedding(body, model)
    jobs = await running.submitted(services, submissions, stream=False)
    records = await running.finished(request, services, jobs, submissions)
    if not records:
        return running.gone()
    return running.answer(answers.embeddings(records, model, body.encoding_format))


def _model_object(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": STARTED,
        "owned_by": "omniq",
        "root": model.pipeline.stage(model.stage).model,
        "pipeline": model.pipeline.name,
    }


def _needs_text(model: ServedModel) -> None:
    if model.text is None:
        makes = "no text"
        if model.image is not None:
            makes = "pictures; use /v1/images/generations"
        elif model.audio is not None:
            makes = "sound; use /v1/audio/speech"
        raise OpenAIError(400, f"the model {model.name!r} makes {makes}", param="model")

"""``/v1/models``, ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/embeddings``."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from omniq.config.served import ServedModel, served_models
from omniq.errors import BrokerUnavailable, JobNotFound
from omniq.jobs.model import JobRecord
from omniq_api.openai_compat import answers, images, mapping, running
from omniq_api.openai_compat.faults import (
    FAULTS,
    SERVER,
    OpenAIError,
    OpenAIRoute,
    error_body,
    responses,
)
from omniq_api.openai_compat.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from omniq_api.openai_compat.stream import JobStream, chat_chunks, completion_chunks
from omniq_api.services import Live, Services
from omniq_api.waiting import ClientGone, give_up, unless_gone

logger = logging.getLogger("omniq.api")
router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute)
router.include_router(images.router)

Chunks = AsyncGenerator[dict[str, Any] | None]
STARTED = int(time.time())


@router.get("/models", summary="List models", responses=responses())
async def list_models() -> dict[str, Any]:
    """Every name by which the routes of OpenAI's kind know a pipeline."""
    return {"object": "list", "data": [_model_object(m) for m in served_models().values()]}


@router.get("/models/{name:path}", summary="Read a model", responses=responses(404))
async def read_model(name: str) -> dict[str, Any]:
    """One model."""
    return _model_object(mapping.find_model(name))


@router.post(
    "/chat/completions",
    summary="Answer a conversation",
    response_class=Response,
    responses=responses(*FAULTS),
)
async def chat(request: Request, services: Live, body: ChatRequest) -> Response:
    """A chat completion, whole or (`stream`) as server-sent events.

    A client that disconnects cancels its job.
    """
    model = mapping.find_model(body.model)
    _needs_text(model)
    submission = mapping.of_chat(body, model)
    jobs = await running.submitted(services, [submission], stream=body.stream)
    if body.stream:
        stream = JobStream(services, jobs[0], model, submission)
        chunks = chat_chunks(stream, include_usage=body.include_usage)
        return await _streamed(request, services, jobs, chunks)
    records = await running.finished(request, services, jobs, [submission])
    return running.answer(answers.chat_completion(records[0], model)) if records else running.gone()


@router.post(
    "/completions",
    summary="Go on with a text",
    response_class=Response,
    responses=responses(*FAULTS),
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
        return await _streamed(request, services, jobs, chunks)
    records = await running.finished(request, services, jobs, submissions)
    return running.answer(answers.completion(records, model)) if records else running.gone()


@router.post(
    "/embeddings",
    summary="Embed texts",
    response_class=Response,
    responses=responses(*FAULTS),
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
        makes = "no text" if model.image is None else "pictures; use /v1/images/generations"
        raise OpenAIError(400, f"the model {model.name!r} makes {makes}", param="model")


async def _streamed(
    request: Request, services: Services, jobs: Sequence[JobRecord], chunks: Chunks
) -> Response:
    """A stream that begins with the first chunk: what fails before is an answer with its status."""
    begun = False
    try:
        first = await unless_gone(request.receive, _first(chunks))
        begun = True
        return _ChunkResponse(services, jobs, first, chunks)
    except ClientGone:
        return running.gone()
    finally:
        if not begun:
            await chunks.aclose()
            await give_up(services, jobs)


async def _first(chunks: Chunks) -> dict[str, Any] | None:
    return await anext(chunks)


class _ChunkResponse(Response):
    """Chunks as server-sent events up to ``[DONE]``; a client that hangs up cancels the jobs."""

    media_type = "text/event-stream"

    def __init__(
        self,
        services: Services,
        jobs: Sequence[JobRecord],
        first: dict[str, Any] | None,
        chunks: Chunks,
    ) -> None:
        # Not Response's own: that would promise the length of a body.
        self.status_code, self.background = 200, None
        self._services, self._jobs, self._first, self._chunks = services, jobs, first, chunks
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        done = False
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            done = await unless_gone(receive, self._write(send))
        except ClientGone:
            pass
        finally:
            if not done:
                await give_up(self._services, self._jobs)

    async def _write(self, send: Send) -> bool:
        """Whether the jobs have ended well."""
        done = False
        async with aclosing(self._chunks) as chunks:
            try:
                await _send(send, self._first)
                async for chunk in chunks:
                    await _send(send, chunk)
                done = True
            except OpenAIError as exc:
                await _send(send, exc.body)
            except (BrokerUnavailable, JobNotFound) as exc:
                # The status line has been sent: the error is the stream's last word.
                logger.warning("a completion's stream ended early: %s", exc)
                await _send(send, error_body("a part this service needs is down", SERVER))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        return done


async def _send(send: Send, chunk: dict[str, Any] | None) -> None:
    body = b": keep-alive\n\n" if chunk is None else b"data: %b\n\n" % orjson.dumps(chunk)
    await send({"type": "http.response.body", "body": body, "more_body": True})

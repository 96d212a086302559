"""``/v1/audio/speech``."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from omniq.config.served import ServedModel
from omniq.jobs.model import JobRecord
from omniq_api.openai_compat import answers, mapping, running
from omniq_api.openai_compat.answer_models import EVENT
from omniq_api.openai_compat.faults import FAULTS, OpenAIRoute, responses
from omniq_api.openai_compat.mapping import Submission, input_of, submission_of, unable
from omniq_api.openai_compat.schemas import SpeechRequest
from omniq_api.openai_compat.sound_stream import SoundEnded, SoundPiece, SpokenJob, check_writable
from omniq_api.openai_compat.streaming import EVENTS, Wire, streamed
from omniq_api.openapi import FILE
from omniq_api.services import Live, idempotent

router = APIRouter(prefix="/audio", route_class=OpenAIRoute)

#: Formats that need nothing but samples.
PLAIN = ("wav", "pcm")
#: Fields that go to the pipeline's inputs of the same names, and what they are.
OPTIONAL = {
    "instructions": "instructions",
    "ref_audio": "recording of a voice",
    "ref_text": "recording of a voice",
}


@router.post(
    "/speech",
    summary="Speak a text",
    response_class=Response,
    dependencies=[Depends(idempotent)],
    responses={
        200: {
            "description": "The file, or events with pieces of it.",
            "content": {"audio/*": FILE, "text/event-stream": {"itemSchema": EVENT}},
        },
        **responses(*FAULTS),
    },
)
async def speak(request: Request, services: Live, body: SpeechRequest) -> Response:
    """Speech, sent while it is made where the pipeline hands it on by chunks.

    A client that disconnects cancels its job.
    """
    model = mapping.find_model(body.model)
    submission = of_speech(body, model)
    jobs = await running.submitted(services, [submission], stream=True)
    spoken = SpokenJob(services, jobs[0], model, submission)
    sse = body.stream_format == "sse"
    file = _file(spoken, body.response_format, keep_alive=sse)
    chunks = _events(file, model) if sse else file
    wire = replace(EVENTS, end=b"") if sse else _bare(body.response_format, model)
    return await streamed(request, services, jobs, chunks, wire)


def of_speech(body: SpeechRequest, model: ServedModel) -> Submission:
    """The job of one request.

    Raises:
        OpenAIError: the model does not speak, or a field asks for what it cannot do.
    """
    if model.audio is None:
        raise unable(model, "makes no sound", "model")
    if model.text is not None:
        raise unable(model, "answers; use /v1/chat/completions with modalities", "model")
    check_writable(body.response_format, PLAIN, "response_format")
    pipeline = model.pipeline
    text = input_of(model, "text", "input")
    inputs, names = {text: body.input}, {f"input.{text}": "input"}
    if "voice" in pipeline.inputs and text != "voice":
        inputs["voice"] = body.voice
    for name, what in OPTIONAL.items():
        if (value := getattr(body, name)) is not None:
            if name not in pipeline.inputs:
                raise unable(model, f"takes no {what}", name)
            inputs[name] = value
    parameters: dict[str, Any] = body.more
    if body.speed is not None and "speed" in pipeline.takers:
        parameters["speed"] = body.speed
    elif body.speed not in (None, 1.0):
        raise unable(model, "speaks at speed 1 only", "speed")
    for name in ("voice", *OPTIONAL):
        names[f"input.{name}"] = name
    return submission_of(model, inputs, parameters, "input", user=body.user, names=names)


def _bare(form: str, model: ServedModel) -> Wire:
    """The file's own bytes."""
    from omniq.outputs.audio import CONTENT_TYPES  # noqa: PLC0415 - imports PIL

    rate = model.pipeline.outputs[str(model.audio)].sample_rate
    kind = CONTENT_TYPES.get(form) or f"audio/pcm; rate={rate}"
    return Wire(kind, lambda piece: piece if isinstance(piece, bytes) else b"", b"", None)


async def _file(spoken: SpokenJob, form: str, *, keep_alive: bool) -> AsyncGenerator[Any]:
    """The pieces of the file that a client asks for, with ``keep_alive`` None when nothing has come
    for a while, and in the end the job.
    """
    from omniq.outputs.sound_files import SoundStream  # noqa: PLC0415 - imports PIL

    sound: SoundStream | None = None
    async with aclosing(spoken.pieces()) as pieces:
        async for piece in pieces:
            if isinstance(piece, SoundPiece):
                if sound is None:
                    channels = len(piece.samples)
                    comment = spoken.comment() if form not in PLAIN else ""
                    sound = SoundStream(form, piece.sample_rate, channels, comment)
                if data := await asyncio.to_thread(sound.feed, piece.samples):
                    yield data
            elif isinstance(piece, SoundEnded):
                if sound is not None and (data := await asyncio.to_thread(sound.finish)):
                    yield data
                yield piece.record
            elif keep_alive:
                yield None


async def _events(file: AsyncGenerator[Any], model: ServedModel) -> AsyncGenerator[Any]:
    """OpenAI's events of a speech."""
    async with aclosing(file):
        async for piece in file:
            if isinstance(piece, bytes):
                audio = base64.b64encode(piece).decode()
                yield {"type": "speech.audio.delta", "audio": audio}
            elif isinstance(piece, JobRecord):
                yield {"type": "speech.audio.done", "usage": _usage(piece, model)}
            else:
                yield None


def _usage(record: JobRecord, model: ServedModel) -> dict[str, int]:
    stages = [s.stage_id for s in model.pipeline.stages if s.stage_id in record.stages]
    used = [answers.usage_of([record], replace(model, stage=stage)) for stage in stages]
    read = max((u["prompt_tokens"] for u in used), default=0)
    made = sum(u["completion_tokens"] for u in used)
    return {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}

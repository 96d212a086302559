"""Sound in chat completions: ``modalities``, ``audio`` and what comes of them."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from omniq.config.served import ServedModel
from omniq.jobs.model import JobRecord
from omniq.settings import get_settings
from omniq_api.openai_compat.faults import OpenAIError
from omniq_api.openai_compat.mapping import unable
from omniq_api.openai_compat.schemas import ChatRequest
from omniq_api.openai_compat.sound_stream import SoundPiece, check_writable
from omniq_api.openai_error import SERVER
from omniq_api.services import Services

PCM = "pcm16"
#: Formats that need nothing but samples.
PLAIN = ("wav", PCM)


def wants_audio(body: ChatRequest, model: ServedModel) -> bool:
    """Whether the answer is to be spoken.

    Raises:
        OpenAIError: the model does not speak, or not in that form.
    """
    if "audio" not in (body.modalities or ()):
        if body.audio is not None:
            message = "audio is given with modalities [text, audio] only"
            raise OpenAIError(400, message, param="audio")
        return False
    if model.audio is None:
        raise unable(model, "makes no sound", "modalities")
    if body.more.get("n") not in (None, 1):
        raise OpenAIError(400, "n must be 1 where an answer is spoken", param="n")
    form = form_of(body)
    if body.stream and form != PCM:
        message = f"a stream's audio.format must be {PCM}, not {form!r}"
        raise OpenAIError(400, message, param="audio")
    check_writable(form, PLAIN, "audio.format")
    return True


def form_of(body: ChatRequest) -> str:
    """The format that the client wants."""
    if body.audio is not None and body.audio.format is not None:
        return body.audio.format
    return PCM if body.stream else "wav"


def outputs_of(model: ServedModel, *, audio: bool) -> list[str] | None:
    """Which of the pipeline's outputs the job makes; None: all of them."""
    if model.audio is None or audio:
        return None
    return [name for name in model.pipeline.outputs if name != model.audio]


def may_lack(body: ChatRequest, model: ServedModel) -> bool:
    """Whether the text of a spoken answer is good without the sound.

    Raises:
        OpenAIError: 400; the sound is not made from the text, which could be what is missing.
    """
    if body.allow_partial and model.stage not in model.pipeline.stages_for([str(model.audio)]):
        raise unable(model, "makes its sound apart from its text", "allow_partial")
    return body.allow_partial


def head(record: JobRecord) -> dict[str, Any]:
    """How a chat's sound is called, and until when the job has it."""
    keeps = int(record.spec.created + get_settings().retention)
    return {"id": f"audio_{record.id}", "expires_at": keeps}


def delta(record: JobRecord, piece: SoundPiece) -> dict[str, Any]:
    """A piece as the ``audio`` of a chunk's delta: base64 of 16-bit PCM."""
    from omniq.outputs.sound import interleaved  # noqa: PLC0415 - few requests need it

    data = base64.b64encode(interleaved(piece.samples)).decode()
    return {"id": head(record)["id"], "data": data}


async def message(
    services: Services, record: JobRecord, model: ServedModel, form: str, transcript: str
) -> dict[str, Any] | None:
    """The ``audio`` of a whole answer's message; None where it may be missing, and is.

    Raises:
        OpenAIError: the job made none.
    """
    if model.audio in record.missing:
        return None
    info = record.artifacts.get(str(model.audio))
    if info is None:
        raise OpenAIError(500, "the job made no sound", kind=SERVER)
    file, _ = await services.store.read_artifact(record, info.name)
    if info.meta["format"] != form:
        file = await asyncio.to_thread(_as, record, file, info.meta["format"], form)
    return {**head(record), "data": base64.b64encode(file).decode(), "transcript": transcript}


def _as(record: JobRecord, file: bytes, has: str, form: str) -> bytes:
    """A file's sound in another format."""
    from omniq.outputs.base import OutputContext  # noqa: PLC0415 - few requests need it
    from omniq.outputs.sound import interleaved  # noqa: PLC0415 - as above
    from omniq.outputs.sound_files import encoded, integers_of  # noqa: PLC0415 - imports PIL

    samples, rate = integers_of(file, has)
    if form == PCM:
        return interleaved(samples)
    return encoded(samples, rate, form, OutputContext.of_job(record.spec))

"""The sound of a running job, as it is made."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from omniq.config.served import ServedModel
from omniq.jobs.model import JobEvent, JobRecord
from omniq_api.openai_compat.faults import OpenAIError
from omniq_api.openai_compat.following import followed
from omniq_api.openai_compat.mapping import Submission
from omniq_api.openai_error import SERVER
from omniq_api.services import Services

Integers = np.ndarray[Any, np.dtype[np.int16]]
#: Formats of files that hold the very samples that the chunks had.
EXACT = ("wav", "flac")


def check_writable(form: str, plain: Sequence[str], field: str) -> None:
    """Whether this server can write sound in that format.

    Args:
        form: the format.
        plain: those that need nothing but samples.
        field: of the request.

    Raises:
        OpenAIError: 400; it needs PyAV, which is not there.
    """
    if form not in plain and find_spec("av") is None:
        message = f"{field}: this server writes {' and '.join(plain)} only (no PyAV)"
        raise OpenAIError(400, message, param=field.partition(".")[0])


@dataclass(frozen=True, slots=True)
class SoundPiece:
    """What follows of the sound: int16 [channels, samples]."""

    samples: Integers
    sample_rate: int


@dataclass(frozen=True, slots=True)
class SoundEnded:
    """A job has ended well."""

    record: JobRecord


@dataclass
class SpokenJob:
    """One job's sound: its chunks while it runs, and what they lacked from its file."""

    services: Services
    record: JobRecord
    model: ServedModel
    submission: Submission
    _sent: bytearray = field(default_factory=bytearray)
    """16-bit samples, channels interleaved."""
    _said: int = 0
    """Bytes that the present run has said."""
    _next: int = 0
    """Number of the next chunk."""
    _gap: bool = False
    """A chunk was missed: the rest comes from the file."""

    async def pieces(self) -> AsyncGenerator[SoundPiece | SoundEnded | None]:
        """New pieces as they come, None when nothing has come for a while, then the end.

        Raises:
            OpenAIError: the job failed or made no sound, or this server stops.
            BrokerUnavailable: the broker went away.
        """
        async with aclosing(followed(self.services, self.record, self.submission)) as found:
            async for event in found:
                if event is None:
                    yield None
                elif isinstance(event, JobEvent):
                    if (piece := self.piece_of(event)) is not None:
                        yield piece
                else:
                    if (piece := await self.rest(event)) is not None:
                        yield piece
                    yield SoundEnded(event)

    def comment(self) -> str:
        """What the file says about how it was made."""
        from omniq.outputs.base import OutputContext  # noqa: PLC0415 - few requests need it
        from omniq.outputs.image import comment_of  # noqa: PLC0415 - as above

        return comment_of(OutputContext.of_job(self.record.spec))

    def piece_of(self, event: JobEvent) -> SoundPiece | None:
        """What an event of the job adds to what the client has.

        Raises:
            OpenAIError: the job was run again and went differently.
        """
        maker, _, output = self.model.pipeline.outputs[str(self.model.audio)].source.partition(".")
        if event.stage != maker:
            return None
        if event.type == "stage.started":
            self._said = self._next = 0
        if event.type != "stage.delta" or event.data["output"] != output or self._gap:
            return None
        value = event.data["value"]
        if event.data.get("sequence") != self._next or "audio" not in value:
            self._gap = True
            return None
        self._next += 1
        new = self._new(base64.b64decode(value["audio"]))
        return _piece(new, value["channels"], value["sample_rate"]) if new else None

    def _new(self, said: bytes) -> bytes:
        """What of these samples the client has not got. A run that was begun anew says everything
        again: with the same seed the same.

        Raises:
            OpenAIError: it does not say the same.
        """
        known = self._sent[self._said : self._said + len(said)]
        if not said.startswith(known):
            message = "the request was run again and went differently; ask again"
            raise OpenAIError(500, message, kind=SERVER)
        self._said += len(said)
        new = said[len(known) :]
        self._sent += new
        return new

    async def rest(self, record: JobRecord) -> SoundPiece | None:
        """What the file has beyond the chunks, which are a courtesy: the record is the truth.

        Raises:
            OpenAIError: the job made no sound, or parts of it cannot be sent any more.
        """
        if self.model.audio in record.missing:
            return None
        info = record.artifacts.get(str(self.model.audio))
        if info is None:
            raise OpenAIError(500, "the job made no sound", kind=SERVER)
        meta = info.meta
        nbytes = 2 * meta["samples"] * meta["channels"]
        if nbytes == len(self._sent):
            return None
        if self._sent and meta["format"] not in EXACT:
            message = "parts of the sound were lost on their way; ask again"
            raise OpenAIError(500, message, kind=SERVER)
        data, _ = await self.services.store.read_artifact(record, info.name)
        whole, channels, rate = await asyncio.to_thread(_decoded, data, meta["format"])
        self._said = 0
        new = self._new(whole)
        return _piece(new, channels, rate) if new else None


def _decoded(data: bytes, form: str) -> tuple[bytes, int, int]:
    """A file's 16-bit samples with channels interleaved, how many these are, and the rate."""
    from omniq.outputs.sound import interleaved  # noqa: PLC0415 - few requests need it
    from omniq.outputs.sound_files import integers_of  # noqa: PLC0415 - imports PIL

    samples, rate = integers_of(data, form)
    return interleaved(samples), len(samples), rate


def _piece(data: bytes, channels: int, sample_rate: int) -> SoundPiece:
    return SoundPiece(np.frombuffer(data, "<i2").reshape(-1, channels).T, sample_rate)

"""Running jobs as OpenAI's streams of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from omniq.config.served import ServedModel
from omniq.jobs.model import JobEvent, JobRecord, JobState
from omniq_api.openai_compat import answers
from omniq_api.openai_compat.faults import SERVER, OpenAIError
from omniq_api.openai_compat.mapping import Submission
from omniq_api.services import Services

#: Outputs of a stage that grow by text, and the field of a chat's delta each one is.
TEXTS = {"text": "content", "reasoning": "reasoning"}
KEEP_ALIVE = 15.0


@dataclass
class _Text:
    """One growing text: what the present run has said of it, and what the client has."""

    said: int = 0
    sent: str = ""

    def take(self, piece: str) -> str:
        """What of ``piece`` is new to the client.

        A run that was begun anew says everything again: with the same seed the same.

        Raises:
            OpenAIError: it does not say the same.
        """
        known = self.sent[self.said : self.said + len(piece)]
        if not piece.startswith(known):
            raise OpenAIError(
                500, "the request was run again and went differently; ask again", kind=SERVER
            )
        self.said += len(piece)
        new = piece[len(known) :]
        self.sent += new
        return new


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice."""

    index: int
    field: str
    """``content``, ``reasoning`` or ``tool_calls``."""
    value: Any


@dataclass(frozen=True, slots=True)
class Ended:
    """A job has ended well."""

    record: JobRecord


@dataclass
class JobStream:
    """One job's pieces; ends with :class:`Ended`."""

    services: Services
    record: JobRecord
    model: ServedModel
    submission: Submission
    _texts: dict[tuple[int, str], _Text] = field(default_factory=dict)
    _calls: set[int] = field(default_factory=set)

    async def pieces(self) -> AsyncGenerator[Piece | Ended | None]:
        """New pieces as they come, None when nothing has come for a while, then the end.

        Raises:
            OpenAIError: the job failed, or this server stops.
            BrokerUnavailable: the broker went away.
        """
        events = self.services.store.events(self.record.id, block=KEEP_ALIVE)
        async with aclosing(events):
            async for event in events:
                if event is None:
                    yield None
                    continue
                if event.final:
                    break
                for piece in self._of_event(event):
                    yield piece
            else:
                raise OpenAIError(503, "this server stops; ask again", kind=SERVER)
        record = await self.services.store.get(self.record.id)
        if record.state is not JobState.SUCCEEDED:
            raise answers.failure(record, self.submission)
        for piece in self._rest(record):
            yield piece
        yield Ended(record)

    def _of_event(self, event: JobEvent) -> list[Piece]:
        if event.stage != self.model.stage:
            return []
        if event.type == "stage.started":
            for text in self._texts.values():
                text.said = 0
        if event.type != "stage.delta":
            return []
        output, value = event.data["output"], event.data["value"]
        index = int(value.get("index", 0))
        if output in TEXTS:
            return self._text(index, TEXTS[output], value["text"])
        if output == "tool_calls" and value["tool_calls"]:
            self._calls.add(index)
            return [Piece(index, "tool_calls", value["tool_calls"])]
        return []

    def _text(self, index: int, name: str, said: str) -> list[Piece]:
        new = self._texts.setdefault((index, name), _Text()).take(said)
        return [Piece(index, name, new)] if new else []

    def _rest(self, record: JobRecord) -> list[Piece]:
        """What the answer has beyond the pieces: deltas are a courtesy, the record is the truth."""
        pieces = []
        for text in self._texts.values():
            text.said = 0
        for choice in answers.choices_of(record, self.model):
            index = choice["index"]
            for output, name in TEXTS.items():
                pieces += self._text(index, name, choice.get(output) or "")
            if choice.get("tool_calls") and index not in self._calls:
                calls = [{"index": i, **c} for i, c in enumerate(choice["tool_calls"])]
                pieces.append(Piece(index, "tool_calls", calls))
        return pieces


async def chat_chunks(
    stream: JobStream, *, include_usage: bool
) -> AsyncGenerator[dict[str, Any] | None]:
    """Chunks of a chat completion; None when nothing has come for a while."""
    base = {
        "id": answers.chat_id(stream.record.id),
        "object": "chat.completion.chunk",
        "created": int(stream.record.spec.created),
        "model": stream.model.name,
    }
    usage = {"usage": None} if include_usage else {}
    greeted: set[int] = set()

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        if index not in greeted:
            greeted.add(index)
            delta = {"role": "assistant", **delta}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**base, "choices": [choice], **usage}

    async with aclosing(stream.pieces()) as pieces:
        async for piece in pieces:
            if piece is None:
                yield None
            elif isinstance(piece, Piece):
                yield chunk(piece.index, {piece.field: piece.value})
            else:
                asked = answers.asked(piece.record, stream.model)
                for choice in answers.choices_of(piece.record, stream.model):
                    # Log probabilities come at the end: pieces of text are no single tokens.
                    yield chunk(
                        choice["index"],
                        {},
                        finish_reason=choice["finish_reason"],
                        logprobs=answers.chat_logprobs(choice.get("logprobs"), asked),
                    )
                if include_usage:
                    made = answers.usage_of([piece.record], stream.model)
                    yield {**base, "choices": [], "usage": made}


async def completion_chunks(
    streams: Sequence[JobStream], *, include_usage: bool
) -> AsyncGenerator[dict[str, Any] | None]:
    """Chunks of a completion of one or several prompts, whose pieces come as they are made."""
    base = {
        "id": answers.completion_id(streams[0].record.id),
        "object": answers.COMPLETION,
        "created": int(streams[0].record.spec.created),
        "model": streams[0].model.name,
    }
    usage = {"usage": None} if include_usage else {}
    model = streams[0].model
    count = int(streams[0].record.spec.parameters[model.stage].get("n") or 1)
    records: list[JobRecord] = []

    def chunk(job: int, index: int, text: str, **more: Any) -> dict[str, Any]:
        choice = {
            "index": job * count + index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            **more,
        }
        return {**base, "choices": [choice], **usage}

    async with aclosing(_side_by_side(streams)) as pieces:
        async for job, piece in pieces:
            if piece is None:
                yield None
            elif isinstance(piece, Piece):
                if piece.field == "content":
                    yield chunk(job, piece.index, piece.value)
            else:
                records.append(piece.record)
                asked = answers.asked(piece.record, model)
                for choice in answers.choices_of(piece.record, model):
                    yield chunk(
                        job,
                        choice["index"],
                        "",
                        finish_reason=choice["finish_reason"],
                        logprobs=answers.completion_logprobs(choice.get("logprobs"), asked),
                    )
    if include_usage:
        yield {**base, "choices": [], "usage": answers.usage_of(records, model)}


async def _side_by_side(
    streams: Sequence[JobStream],
) -> AsyncGenerator[tuple[int, Piece | Ended | None]]:
    """The pieces of all jobs in the order in which they come.

    Raises:
        OpenAIError: one of them failed.
    """
    if len(streams) == 1:  # the usual case needs no tasks
        async with aclosing(streams[0].pieces()) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    waiting: asyncio.Queue[tuple[int, Piece | Ended | Exception | None]] = asyncio.Queue()

    async def follow(job: int, stream: JobStream) -> None:
        try:
            async with aclosing(stream.pieces()) as pieces:
                async for piece in pieces:
                    waiting.put_nowait((job, piece))
        except Exception as exc:  # raised again below, where the client is
            waiting.put_nowait((job, exc))

    tasks = [asyncio.create_task(follow(i, s)) for i, s in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            job, found = await waiting.get()
            if isinstance(found, Exception):
                raise found
            left -= isinstance(found, Ended)
            yield job, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

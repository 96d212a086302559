"""Running jobs as OpenAI's streams of chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from omniq.config.served import ServedModel
from omniq.jobs.model import JobEvent, JobRecord
from omniq.settings import get_settings
from omniq_api.openai_compat import answers, chat_audio
from omniq_api.openai_compat.faults import OpenAIError
from omniq_api.openai_compat.following import followed
from omniq_api.openai_compat.mapping import Submission
from omniq_api.openai_compat.sound_stream import SoundPiece, SpokenJob
from omniq_api.openai_error import SERVER
from omniq_api.services import Services

#: Outputs of a stage that grow by text, and the field of a chat's delta each one is.
TEXTS = {"text": "content", "reasoning": "reasoning"}


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


@dataclass
class _Tokens:
    """Log probabilities of one choice: how many the present run has said, and the client has."""

    said: int = 0
    sent: int = 0

    def take(self, tokens: list[Any]) -> list[Any]:
        """What of ``tokens`` is new to the client."""
        new = tokens[max(self.sent - self.said, 0) :]
        self.said += len(tokens)
        self.sent = max(self.sent, self.said)
        return new


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice."""

    index: int
    field: str
    """``content``, ``reasoning`` or ``tool_calls``."""
    value: Any
    logprobs: Sequence[Any] = ()
    """Of the tokens that have come with it, as the engine gives them."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A job has ended well."""

    record: JobRecord


@dataclass
class JobStream:
    """One job's pieces; ends with :class:`Ended`.

    With ``spoken``, the same job's sound, the pieces of both come as they are made.
    """

    services: Services
    record: JobRecord
    model: ServedModel
    submission: Submission
    spoken: SpokenJob | None = None
    _texts: dict[tuple[int, str], _Text] = field(default_factory=dict)
    _tokens: dict[int, _Tokens] = field(default_factory=dict)
    _calls: dict[tuple[int, int], _Text] = field(default_factory=dict)

    async def pieces(self) -> AsyncGenerator[Piece | SoundPiece | Ended | None]:
        """New pieces as they come, None when nothing has come for a while, then the end.

        Raises:
            OpenAIError: the job failed or made no sound that was asked for, or this server stops.
            BrokerUnavailable: the broker went away.
        """
        async with aclosing(followed(self.services, self.record, self.submission)) as found:
            async for event in found:
                if event is None:
                    yield None
                elif isinstance(event, JobEvent):
                    for piece in self._of_event(event):
                        yield piece
                    if self.spoken and (sound := self.spoken.piece_of(event)):
                        yield sound
                else:
                    for piece in self._rest(event):
                        yield piece
                    if self.spoken and (sound := await self.spoken.rest(event)):
                        yield sound
                    yield Ended(event)

    def _of_event(self, event: JobEvent) -> list[Piece]:
        if event.stage != self.model.stage:
            return []
        if event.type == "stage.started":
            self._begin_anew()
        if event.type != "stage.delta":
            return []
        output, value = event.data["output"], event.data["value"]
        index = int(value.get("index", 0))
        if output in TEXTS:
            return self._text(index, TEXTS[output], value["text"], value.get("logprobs") or ())
        if output == "tool_calls":
            return self._call_pieces(index, value["tool_calls"])
        return []

    def _begin_anew(self) -> None:
        for text in (*self._texts.values(), *self._calls.values()):
            text.said = 0
        for tokens in self._tokens.values():
            tokens.said = 0

    def _text(self, index: int, name: str, said: str, logprobs: Sequence[Any] = ()) -> list[Piece]:
        new = self._texts.setdefault((index, name), _Text()).take(said)
        tokens = self._tokens.setdefault(index, _Tokens()).take(list(logprobs))
        return [Piece(index, name, new, tokens)] if new or tokens else []

    def _call_pieces(self, index: int, said: Sequence[dict[str, Any]]) -> list[Piece]:
        """What is new of calls: the head of each goes once, then its arguments grow like a text."""
        calls = []
        for call in said:
            at, function = (index, call["index"]), call.get("function") or {}
            begun = at in self._calls
            new = self._calls.setdefault(at, _Text()).take(function.get("arguments") or "")
            if not begun:
                calls.append({**call, "function": {**function, "arguments": new}})
            elif new:
                calls.append({"index": call["index"], "function": {"arguments": new}})
        return [Piece(index, "tool_calls", calls)] if calls else []

    def _lacks(self, index: int, call: dict[str, Any]) -> bool:
        """Whether pieces of a finished call are missing.

        Parsers may write the whole call's arguments with other spaces than the pieces have.
        """
        known = self._calls.get((index, call["index"]))
        return known is None or str(call["function"]["arguments"]).startswith(known.sent)

    def _rest(self, record: JobRecord) -> list[Piece]:
        """What the answer has beyond the pieces: deltas are a courtesy, the record is the truth."""
        pieces = []
        # Parsers may write a whole text with other spaces at its ends than its pieces had.
        heard = {at for at, text in self._texts.items() if text.said >= len(text.sent)}
        self._begin_anew()
        for choice in answers.choices_of(record, self.model):
            index = choice["index"]
            tokens: Sequence[Any] = choice.get("logprobs") or ()
            for output, name in TEXTS.items():
                text, at = choice.get(output) or "", (index, name)
                if at in heard and not text.startswith(self._texts[at].sent):
                    text = self._texts[at].sent
                pieces += self._text(index, name, text, tokens)
                tokens = ()
            calls = [{"index": i, **c} for i, c in enumerate(choice.get("tool_calls") or ())]
            pieces += self._call_pieces(index, [c for c in calls if self._lacks(index, c)])
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
    asked = answers.asked(stream.record, stream.model)
    greeted: set[int] = set()

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        if index not in greeted:
            greeted.add(index)
            delta = {"role": get_settings().openai_role, **delta}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**base, "choices": [choice], **usage}

    async with aclosing(stream.pieces()) as pieces:
        async for piece in pieces:
            if piece is None:
                yield None
            elif isinstance(piece, SoundPiece):
                yield chunk(0, {"audio": chat_audio.delta(stream.record, piece)})
            elif isinstance(piece, Piece):
                delta = {piece.field: piece.value} if piece.value else {}
                tokens = answers.chat_logprobs(list(piece.logprobs) or None, asked)
                yield chunk(piece.index, delta, logprobs=tokens)
            else:
                if stream.spoken and stream.model.audio not in piece.record.missing:
                    (said, *_) = answers.choices_of(piece.record, stream.model)
                    last = {**chat_audio.head(piece.record), "transcript": said["text"]}
                    yield chunk(0, {"audio": last})
                for choice in answers.choices_of(piece.record, stream.model):
                    reason = answers.chat_finish_reason(choice, piece.record, stream.model)
                    yield {
                        **chunk(choice["index"], {}, finish_reason=reason),
                        **answers.missing(piece.record),
                    }
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
    asked = answers.asked(streams[0].record, model)
    offsets: dict[tuple[int, int], int] = {}
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

    async with aclosing(_side_by_side([s.pieces() for s in streams])) as pieces:
        async for job, piece in pieces:
            if piece is None:
                yield None
            elif isinstance(piece, Piece):
                if piece.field == "content":
                    at = (job, piece.index)
                    tokens = answers.completion_logprobs(
                        list(piece.logprobs) or None, asked, offsets.get(at, 0)
                    )
                    if tokens is not None:
                        offsets[at] = tokens["text_offset"][-1] + len(tokens["tokens"][-1])
                    yield chunk(job, piece.index, piece.value, logprobs=tokens)
            else:
                records.append(piece.record)
                for choice in answers.choices_of(piece.record, model):
                    yield chunk(job, choice["index"], "", finish_reason=choice["finish_reason"])
    if include_usage:
        yield {**base, "choices": [], "usage": answers.usage_of(records, model)}


async def _side_by_side(
    sources: Sequence[AsyncGenerator[Any]],
) -> AsyncGenerator[tuple[int, Any]]:
    """What all sources give in the order in which it comes, each with its source's number.

    Raises:
        OpenAIError: one of them failed.
    """
    if len(sources) == 1:  # the usual case needs no tasks
        async with aclosing(sources[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    waiting: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
    done = object()

    async def follow(number: int, source: AsyncGenerator[Any]) -> None:
        try:
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    waiting.put_nowait((number, piece))
            waiting.put_nowait((number, done))
        except Exception as exc:  # raised again below, where the client is
            waiting.put_nowait((number, exc))

    tasks = [asyncio.create_task(follow(i, s)) for i, s in enumerate(sources)]
    try:
        left = len(sources)
        while left:
            number, found = await waiting.get()
            if isinstance(found, Exception):
                raise found
            if found is done:
                left -= 1
            else:
                yield number, found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

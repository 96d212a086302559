"""One watcher of one job: its place among the events, and what it has been handed."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from dataclasses import dataclass

import orjson

from omniq.errors import InvalidRequest
from omniq.jobs.model import JobEvent

EVENT_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")
LARGEST_ID_PART = 2**64 - 1
BUFFER = 256
"""Events a watcher may be behind before it reads its backlog again."""

Fields = dict[bytes, bytes]
"""A job's hash."""
Order = tuple[int, int]
"""A stream id as numbers: milliseconds, sequence."""


def parse_id(text: str) -> Order:
    """A stream id as numbers.

    Raises:
        InvalidRequest: it is none.
    """
    if EVENT_ID.fullmatch(text):
        milliseconds, _, sequence = text.partition("-")
        order = int(milliseconds), int(sequence or 0)
        if max(order) <= LARGEST_ID_PART:
            return order
    raise InvalidRequest(
        f"{text!r} is no event id",
        fields=[{"field": "Last-Event-ID", "message": "must look like 1700000000000-0"}],
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """One event and its place."""

    order: Order
    event: JobEvent


class Watch:
    """One watcher of one job."""

    def __init__(self, last: Order) -> None:
        self.last = last
        self.behind = True
        self.error: Exception | None = None
        self.stopped = False
        self.record: Fields | None = None
        """The job's hash, once it has ended."""
        self.due = float("inf")
        """When the job's deadline passes and somebody has to look, by the loop's clock."""
        self.heard = 0.0
        """When it last got something, where it has to look by itself."""
        self._buffer: deque[Entry] = deque()
        self._news: asyncio.Future[None] | None = None

    def hand(self, entry: Entry) -> None:
        """Take a live event, or fall behind."""
        if len(self._buffer) >= BUFFER:
            self.restart()
            self.behind = True
        if not self.behind:
            self._buffer.append(entry)
        self.wake()

    def restart(self) -> None:
        """Forget what has been handed out; from here on it is kept."""
        self._buffer.clear()
        self.behind = False

    def next(self) -> Entry | None:
        """The next live event behind the last one, if there is one."""
        while self._buffer:
            entry = self._buffer.popleft()
            if entry.order > self.last or entry.event.final:
                return entry
        return None

    def wake(self) -> None:
        """Let the watcher look."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def news(self, timeout: float) -> bool:
        """Wait until there is something to look at. False: not within ``timeout`` seconds."""
        if self._buffer or self.behind or self.stopped or self.error:
            return True
        loop = asyncio.get_running_loop()
        news = self._news = loop.create_future()
        timer = loop.call_later(timeout, _give_up, news)
        try:
            await news
            return True
        except TimeoutError:
            return False
        finally:
            timer.cancel()
            self._news = None


class Feed:
    """One watched stream: how far it has been read, and for whom."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.last: bytes | None = None  # until its end has been looked up
        self.reading = self.changed = False
        self.watches: set[Watch] = set()


def read_entry(entry_id: bytes, row: list[bytes]) -> Entry:
    """An event as Redis has it in a stream."""
    text = entry_id.decode()
    milliseconds, _, sequence = text.partition("-")
    fields = dict(zip(row[::2], row[1::2], strict=True))
    event = JobEvent(
        id=text,
        type=fields[b"type"].decode(),
        stage=fields[b"stage"].decode() or None,
        time=float(fields[b"time"]),
        data=orjson.loads(fields[b"data"]),
    )
    return Entry((int(milliseconds), int(sequence)), event)


def _give_up(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_exception(TimeoutError())

"""Writing a chunk stream."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omniq import keys
from omniq.blobs.base import BlobRef
from omniq.streams.entries import Entry, Kind
from omniq.streams.store import ChunkStreams, RunKey


@dataclass(frozen=True, slots=True)
class Follower:
    """A stage that reads the stream: sent for when ``window`` chunks are there, and never more than
    ``limit`` chunks behind; 0: any number.
    """

    stage: str
    window: int
    limit: int


class ChunkWriter:
    """The one writer of one output of one run; for one task at a time.

    Its lease is renewed with every write; a run that writes nothing for long renews it by
    :meth:`ChunkStreams.renew`. Every method may be called again after ``BrokerUnavailable``.

    Args:
        run: the run that writes; :meth:`ChunkStreams.open` was called for it.
        on_full: awaited whenever a chunk has to wait for a reader.
    """

    def __init__(
        self,
        streams: ChunkStreams,
        run: RunKey,
        output: str,
        followers: Sequence[Follower],
        on_full: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._streams, self._run, self._output = streams, run, output
        self._limits = {f.stage: f.limit for f in followers}
        self._taken = [keys.stream_taken(run[0], run[1], output, f.stage) for f in followers]
        self._on_full = on_full
        self.count = 0
        self.closed = False
        self._marked = False

    async def write(
        self, value: Any = None, blob: BlobRef | None = None, *, last: bool = False
    ) -> int:
        """Append a chunk when no reader is too far behind; returns its sequence number.

        Raises:
            Refused: the run is no longer wanted.
            Unread: the stages that read it are not wanted any more.
            RuntimeError: the stream has been closed.
        """
        if self.closed:
            raise RuntimeError(f"the stream of output {self._output!r} is closed")
        kind = Kind.LAST if last else Kind.CHUNK
        entry = Entry(self._run[2], self.count, kind, value, blob)
        while not await self._streams.append(self._run, self._output, entry, self._limits):
            if self._on_full is not None:
                await self._on_full()
            await self._room(entry)
        self.count += 1
        self.closed = last
        return entry.sequence

    async def _room(self, entry: Entry) -> None:
        """Return when a reader may have taken a chunk, or it is time to say that we are alive."""
        news = self._streams.news
        with news.watch(*self._taken) as changed:
            for key in self._taken:  # reading is what makes the server tell
                await news.ask("XREVRANGE", key, "+", "-", "COUNT", 1)
            if await self._streams.append(self._run, self._output, entry, self._limits):
                return
            await self._streams.changed(changed)

    async def end(self) -> None:
        """Mark the end, also behind a last chunk: for readers that come back behind it.

        Raises:
            Refused: the run is no longer wanted.
        """
        await self._mark(Kind.END, None)

    async def fail(self, error: dict[str, Any]) -> None:
        """Mark that the run ends without success: readers are released at once.

        Raises:
            Refused: the run is no longer wanted.
        """
        await self._mark(Kind.ERROR, error)

    async def _mark(self, kind: Kind, value: Any) -> None:
        self.closed = True
        if not self._marked:
            entry = Entry(self._run[2], self.count, kind, value)
            await self._streams.append(self._run, self._output, entry, {})
            self._marked = True

"""Reading a chunk stream."""

from __future__ import annotations

from collections import deque

from omniq.streams.entries import CHUNKS, Entry, Kind
from omniq.streams.store import ChunkStreams, Refused, RunKey, StreamBroken

#: A position behind every chunk there can be.
ALL = 2**53


class ChunkReader:
    """Chunks of one output of one run of the stage before, in order, each once; an async iterator.

    Asking for the next chunk says that the ones before are done with, which is what the writer's
    bound counts. :meth:`next` may be called again after ``BrokerUnavailable``.

    Args:
        run: the run that reads.
        producer: stage that writes ``output``, in its run ``producer_fence``.
        start: sequence number of the first chunk wanted.
        limit: how far the reader may be behind; it reports its position several times within.
    """

    def __init__(
        self,
        streams: ChunkStreams,
        run: RunKey,
        producer: str,
        output: str,
        producer_fence: int,
        *,
        start: int = 0,
        limit: int = 1,
    ) -> None:
        self._streams, self._run = streams, run
        self._producer, self._output, self._fence = producer, output, producer_fence
        self._next = start
        self._step = max(1, limit // 4)
        self._reported = -1
        self._buffer: deque[Entry] = deque()
        self.ended = False

    def __aiter__(self) -> ChunkReader:
        return self

    async def __anext__(self) -> Entry:
        """The next chunk; see :meth:`next`."""
        entry = await self.next()
        if entry is None:
            raise StopAsyncIteration
        return entry

    async def next(self) -> Entry | None:
        """Wait for the next chunk; None at the end of the stream.

        Raises:
            Refused: the reading run is no longer wanted, which includes that the stage before has
                started anew.
            UpstreamLost: the writing run is gone without an end; the reading run was released.
            StreamBroken: chunks are missing.
        """
        if self.ended:
            return None
        while not self._buffer:
            await self._fill()
        if self._next - self._reported >= self._step:
            await self._report(self._next)
        return await self._take(self._buffer[0])

    async def skip_rest(self) -> None:
        """Nothing more will be read: the writer need not wait for this reader.

        Raises:
            Refused: the reading run is no longer wanted.
        """
        if not self.ended:
            await self._report(ALL)
            self.ended = True

    async def _fill(self) -> None:
        """Read what is there, or wait for it."""
        streams = self._streams
        stream = (self._run[0], self._producer, self._output)
        with streams.news.watch(streams.key_of(*stream)) as changed:
            self._buffer.extend(await streams.read(*stream, self._fence, self._next))
            if self._buffer:
                return
            if self._reported < self._next:
                await self._report(self._next)
            await streams.changed(changed)
        self._buffer.extend(await streams.read(*stream, self._fence, self._next))
        if not self._buffer:  # silence, or the stream was deleted
            await streams.check(self._run, self._producer, self._fence)

    async def _report(self, position: int) -> None:
        await self._streams.taken(self._run, self._producer, self._output, position)
        self._reported = position

    async def _take(self, entry: Entry) -> Entry | None:
        if entry.fence != self._fence or entry.kind is Kind.ERROR:
            await self._streams.check(self._run, self._producer, self._fence)
            # The stage before cannot have succeeded, nor go on: this run has no input any more.
            raise Refused
        self._buffer.popleft()
        if entry.sequence != self._next:
            raise StreamBroken(
                f"chunk {self._next} of {self._producer}.{self._output} is missing: "
                f"found {entry.sequence}"
            )
        if entry.closes:
            self.ended = True
        if entry.kind not in CHUNKS:
            return None
        self._next += 1
        return entry

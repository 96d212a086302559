"""Chunks between running stages: a stage's window edges, and what its engine emits by chunks.

Engines call ``emit.chunk`` and iterate ``StageInput.chunks``; here these meet the chunk streams of
:mod:`omniq.streams`. A stage without window edges pays nothing for this.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from celery.utils.log import get_logger

from omniq.blobs.base import BlobRef
from omniq.chain import early_post
from omniq.config import PipelineConfig
from omniq.engines.base import Cancelled, Chunk, StageInput, StageOutput
from omniq.errors import BlobError, BrokerUnavailable, EngineError, OmniqError
from omniq.streams import (
    ChunkReader,
    ChunkStreams,
    ChunkWriter,
    Follower,
    Refused,
    Unread,
    UpstreamLost,
)
from omniq.streams.store import BEATS, lease
from omniq_workers.channel import Channel, Item
from omniq_workers.outage import through_outages

if TYPE_CHECKING:
    import torch

    from omniq_workers.emit import JobEmit
    from omniq_workers.pieces import Pieces
    from omniq_workers.run import Run
    from omniq_workers.stage_io import StageIO

logger = get_logger(__name__)


class Windows:
    """The window edges of the stage that a worker serves.

    Args:
        pieces: passes chunks of the pipeline's outputs on to the client.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        stage_id: str,
        *,
        streams: ChunkStreams,
        io: StageIO,
        pieces: Pieces,
    ) -> None:
        self.pipeline, self.streams, self.io, self.pieces = pipeline, streams, io, pieces
        self.edges_in = [e for e in pipeline.edges_into(stage_id) if e.trigger == "window"]
        #: Streamed outputs, and who reads each.
        self.followers: dict[str, list[Follower]] = defaultdict(list)
        for edge in pipeline.edges:
            if edge.producer == stage_id and edge.window is not None:
                output = edge.source.partition(".")[2]
                self.followers[output].append(Follower(edge.consumer, edge.window, edge.limit))

    @property
    def streams_any(self) -> bool:
        """Whether the stage reads or writes any chunks."""
        return bool(self.edges_in or self.followers)

    def of(self, run: Run) -> RunWindows:
        """The chunks of one run; use it as a context around the engine."""
        return RunWindows(self, run)


class RunWindows:
    """What one run reads and hands on by chunks."""

    def __init__(self, windows: Windows, run: Run) -> None:
        self._windows, self._run = windows, run
        self._streams = windows.streams
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._channels: dict[str, Channel] = {}
        self._writers: dict[str, ChunkWriter] = {}
        #: Stages behind that the job has.
        self._followers = {
            output: [self._bound(f) for f in found]
            for output, of in windows.followers.items()
            if (found := [f for f in of if f.stage in run.spec.stages])
        }
        #: Outputs that nobody reads any more.
        self._unread: set[str] = set()
        #: When the engine first said something of an output that is the pipeline's; Unix time.
        self.first_output: float | None = None
        self._full: set[str] = set()
        self._sent: set[str] = set()
        self._ending = False
        self._renewing: asyncio.Task[None] | None = None
        self._readers: list[ChunkReader] = []

    # -- life --------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start the streams of this run anew, if it has any."""
        followers = self._followers
        if followers:
            readers = {output: [f.stage for f in of] for output, of in followers.items()}
            try:
                await through_outages(lambda: self._streams.open(self._run.key, readers))
            except Refused:
                self._run.cancel()
                await asyncio.sleep(0)  # the cancellation arrives here
            for output, of in followers.items():
                full = partial(self._wait_for_reader, output)
                self._writers[output] = ChunkWriter(self._streams, self._run.key, output, of, full)
            self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        """Stop; readers of a run that did not succeed are told."""
        for channel in list(self._channels.values()):
            await channel.stop()
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        if exc is not None and not (self._run.unwanted or self._run.lost):
            await self._tell_readers(exc)

    async def _tell_readers(self, exc: BaseException) -> None:
        error = (
            exc.to_dict()
            if isinstance(exc, OmniqError)
            else {"code": "interrupted", "message": f"the run was interrupted ({exc!r})"}
        )
        for writer in self._writers.values():
            try:
                await writer.fail(error)
            except Refused:
                return
            except BrokerUnavailable as outage:
                logger.warning("readers of job %s learn it by lease: %s", self._run.job_id, outage)
                return

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(lease() / BEATS)
            try:
                await self._streams.renew(self._run.key)
                # Again, to readers that took a silence of this run for its end.
                for stage in list(self._sent):
                    await self._send_for(stage)
            except Refused:
                self._run.cancel()
                return
            except BrokerUnavailable as exc:
                logger.warning("the lease of a chunk stream was not renewed: %s", exc)

    # -- reading -----------------------------------------------------------------------------

    def inputs(self) -> dict[str, StageInput]:
        """The inputs that arrive by chunks.

        Raises:
            EngineError: a stage before does not stream what an edge promises.
        """
        found = {}
        for edge in self._windows.edges_in:
            output = edge.source.partition(".")[2]
            made = self._run.grant.upstream.get(edge.producer, {}).get(output) or {}
            if "stream" not in made:
                raise EngineError(f"stage {edge.producer!r} streams no output {output!r}")
            reader = ChunkReader(
                self._streams,
                self._run.key,
                edge.producer,
                output,
                made["stream"],
                limit=edge.limit,
            )
            self._readers.append(reader)
            found[edge.target.partition(".")[2]] = StageInput(chunks=self._chunks(reader))
        return found

    async def _chunks(self, reader: ChunkReader) -> AsyncIterator[Chunk]:
        while True:
            try:
                entry = await through_outages(reader.next)
            except Refused as exc:
                self._run.cancel()
                raise Cancelled("nobody wants this run's outcome") from exc
            except UpstreamLost as exc:
                logger.info("job %s stage %s is released: %s", *self._run.key[:2], exc)
                self._run.let_go()
                raise Cancelled("the stage before has to run again") from exc
            if entry is None:
                return
            tensors: Mapping[str, torch.Tensor] = {}
            if entry.blob is not None:
                tensors = await self._windows.io.read(entry.blob)
            yield Chunk(entry.sequence, entry.value, tensors, last=entry.closes)

    async def drained(self) -> None:
        """The run is recorded: stages before need not wait for it any more."""
        for reader in self._readers:
            # Else they find out from the record a little later.
            with contextlib.suppress(Refused, BrokerUnavailable):
                await reader.skip_rest()

    # -- handing on --------------------------------------------------------------------------

    def _bound(self, follower: Follower) -> Follower:
        """Where the client takes what this stage makes without what the follower makes, the stage
        does not wait for it: there may be nobody who runs it.
        """
        made = (self._windows.pipeline.stages_for([o]) for o in self._run.spec.partial)
        if any(self._run.stage in stages and follower.stage not in stages for stages in made):
            return replace(follower, limit=0)
        return follower

    def speaker(self, emit: JobEmit) -> Speaker:
        """What the engine gets to speak by."""
        return Speaker(emit, self._channel, self._heard)

    def _heard(self, output: str) -> None:
        """The engine says a piece of ``output``. Any thread."""
        if self.first_output is None and output in self._windows.pieces.outputs:
            self.first_output = time.time()

    def _channel(self, output: str) -> Channel | None:
        """Where chunks of ``output`` go; None: nobody reads them. Any thread."""
        if output not in self._followers and output not in self._windows.pieces.outputs:
            return None
        found = self._channels.get(output)
        if found is None:
            new = Channel(self._loop, self._thread, self._deliver(output))
            found = self._channels.setdefault(output, new)
        return found

    async def finish(self, output: StageOutput) -> None:
        """Write what is left: outputs of which the engine emitted no chunk go as a single one.

        Raises:
            EngineError: a streamed output was not made at all.
        """
        self._ending = True
        for name in self._writers:
            channel = self._channel(name)
            assert channel is not None, "it has readers"
            if not channel.taken:
                if name not in output.values and name not in output.tensors:
                    raise EngineError(
                        f"the engine of stage {self._run.stage!r} made no output {name!r}"
                    )
                value, tensors = output.values.get(name), output.tensors.get(name, {})
                await channel.aput(Item(value, tensors, last=True, piece=False))
        for channel in list(self._channels.values()):
            await channel.drain()
        for writer in self._writers.values():
            await self._written(through_outages(writer.end))

    def outputs(self) -> dict[str, dict[str, Any]]:
        """What the record says of the streamed outputs."""
        return {name: {"stream": self._run.grant.fence} for name in self._writers}

    def _deliver(self, output: str) -> Callable[[Item], Awaitable[None]]:
        sequences = count()

        async def deliver(item: Item) -> None:
            sequence = next(sequences)
            if output in self._writers and output not in self._unread:
                await self._written(self._write(output, item))
            if item.piece and output in self._windows.pieces.outputs:
                sent = self._windows.pieces.send(self._run, output, sequence, item)
                await self._written(sent)

        return deliver

    async def _written(self, work: Awaitable[None]) -> None:
        """Await a write; a run that may not write is cancelled.

        Raises:
            Cancelled: it was.
        """
        try:
            await work
        except Refused as exc:
            self._run.cancel()
            raise Cancelled("nobody wants this run's outcome") from exc

    async def _write(self, output: str, item: Item) -> None:
        writer, io = self._writers[output], self._windows.io
        put: asyncio.Future[BlobRef] | None = None
        try:
            if not item.tensors:
                await through_outages(lambda: writer.write(item.value, last=item.last))
            else:
                name = f"{output}.{writer.count}"
                put = asyncio.ensure_future(io.put(self._run, name, item.tensors))
                blob = await asyncio.shield(put)
                await through_outages(lambda: writer.write(item.value, blob, last=item.last))
        except Unread:
            self._unread.add(output)
            await io.free([put.result()] if put is not None else [])
            return
        except BaseException:  # also when cancelled: the blob may or may not be in the stream
            if put is not None:
                await asyncio.shield(self._leave(put))
            raise
        await self._send_for_readers(output)

    async def _leave(self, put: Awaitable[BlobRef]) -> None:
        """See to the end of a blob that the stream may not hold."""
        try:
            blob = await put
            if not await self._streams.leave(self._run.job_id, blob):
                await self._windows.io.free([blob])
        except (BlobError, BrokerUnavailable) as exc:
            logger.warning("a chunk's blob was not written, or is left to be swept: %s", exc)

    async def _wait_for_reader(self, output: str) -> None:
        """A reader is too far behind: one that waits for another output's window starts now."""
        self._full.add(output)
        await self._send_for_readers(output)

    async def _send_for_readers(self, output: str) -> None:
        if self._ending and output not in self._full:
            return  # the stage's own continuation sends for them in a moment
        for follower in self._followers.get(output, ()):
            stage = follower.stage
            if stage not in self._sent and self._window_is_there(stage):
                await self._send_for(stage)

    def _window_is_there(self, stage: str) -> bool:
        return all(
            self._writers[output].count >= f.window or output in self._full
            for output, of in self._followers.items()
            for f in of
            if f.stage == stage
        )

    async def _send_for(self, stage: str) -> None:
        run, pipeline = self._run, self._windows.pipeline
        self._sent.add(stage)
        sender = f"{run.stage}-{run.grant.fence}"
        post = early_post(run.spec, pipeline, stage, sender, run.parent)
        await through_outages(lambda: self._streams.window_there(run.key, stage, post))


class Speaker:
    """The :class:`~omniq.engines.base.Emit` of one run."""

    def __init__(
        self,
        emit: JobEmit,
        channel: Callable[[str], Channel | None],
        heard: Callable[[str], object],
    ) -> None:
        self.progress, self.preview = emit.progress, emit.preview
        self._emit, self._channel, self._heard = emit, channel, heard

    def delta(self, output: str, value: Any) -> None:
        """See :class:`~omniq.engines.base.Emit`."""
        self._heard(output)
        self._emit.delta(output, value)

    def chunk(
        self,
        output: str,
        value: Any = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """See :class:`~omniq.engines.base.Emit`."""
        if (channel := self._channel(output)) is not None:
            self._heard(output)
            channel.put(Item(value, tensors or {}, last))

    async def achunk(
        self,
        output: str,
        value: Any = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """See :class:`~omniq.engines.base.Emit`."""
        if (channel := self._channel(output)) is not None:
            self._heard(output)
            await channel.aput(Item(value, tensors or {}, last))

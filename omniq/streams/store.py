"""Every change of a chunk stream, each one atomic in Redis; see ``omniq/jobs/lua/stream_*.lua``.

Writers and readers are runs of stages, so all changes are fenced as those of the job store are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from omniq import keys
from omniq.blobs.base import BlobRef
from omniq.errors import OmniqError
from omniq.jobs.model import ArtifactInfo
from omniq.jobs.scripts import JobScripts
from omniq.publish import Post, event_channel
from omniq.redis_client import Client
from omniq.settings import get_settings
from omniq.streams.entries import Entry, before, dump, parse
from omniq.streams.news import KeyNews

#: Entries read at once.
PAGE = 64
#: Renewals of a writer's lease, and looks at it by its readers, in one lease.
BEATS = 4

RunKey = tuple[str, str, int]
"""Job, stage and fence of a run."""


class Refused(Exception):
    """The run is no longer wanted: cancelled, ended, or another one took over."""


class Unread(Exception):
    """The job goes on without the stages that read the stream."""


class UpstreamLost(Exception):
    """The run that wrote the stream is gone; the reading run has been released with it."""


class StreamBroken(OmniqError):
    """A chunk stream does not hold what it must."""

    code = "stream_broken"
    retryable = True


def lease() -> float:
    """For so many seconds a writer counts as alive after it has last been heard of.

    Shorter than the lease of its task by the time in which readers look: they have freed their
    slots when the task is delivered again.
    """
    return get_settings().visibility_timeout * 2 / 3


class ChunkStreams:
    """Async access to chunk streams; one instance per event loop, safe for many tasks at once.

    All methods raise :class:`~omniq.errors.BrokerUnavailable` when Redis cannot be used; each may
    then be called again with the same arguments.
    """

    def __init__(self, redis: Client) -> None:
        self.redis = redis
        self.news = KeyNews(redis)
        self._run = JobScripts(redis).run

    def close(self) -> None:
        """Close the connection that hears of changes."""
        self.news.close()

    # -- writing -----------------------------------------------------------------------------

    async def open(self, run: RunKey, outputs: Mapping[str, Collection[str]]) -> None:
        """Start the streams of a run anew: what earlier runs wrote is freed, and whoever reads it
        released. ``outputs`` names for each streamed output the stages that read it.

        Raises:
            Refused: the run is not wanted.
        """
        job_id, stage, fence = run
        named = [keys.stream(job_id, stage, output) for output in outputs]
        named += [
            keys.stream_taken(job_id, stage, output, reader)
            for output, readers in outputs.items()
            for reader in readers
        ]
        while_running = {output: {"stream": fence} for output in outputs}
        readers = sorted({reader for of in outputs.values() for reader in of})
        opened = await self._run(
            "stream_open",
            job_id,
            [stage, fence, lease(), dump(while_running), dump(readers)],
            keys.job_streams(job_id),
            *named,
        )
        _demand(opened)

    async def append(
        self, run: RunKey, output: str, entry: Entry, limits: Mapping[str, int]
    ) -> bool:
        """Write one entry. False: a reader is as many chunks behind as ``limits`` allows it; 0
        allows any number.

        Raises:
            Refused: the run is not wanted.
            Unread: the entry is not kept, because nobody will read it.
        """
        job_id, stage, fence = run
        done = await self._run(
            "stream_append",
            job_id,
            [
                stage,
                fence,
                entry.sequence,
                entry.kind,
                dump(entry.value),
                entry.blob.model_dump_json() if entry.blob else "",
                lease(),
                dump(list(limits.items())),
            ],
            keys.stream(job_id, stage, output),
            *(keys.stream_taken(job_id, stage, output, reader) for reader in limits),
        )
        _demand(done)
        if done == -2:
            raise Unread
        return bool(done > 0)

    async def renew(self, run: RunKey) -> None:
        """The writing run is alive.

        Raises:
            Refused: it is not wanted.
        """
        job_id, stage, fence = run
        _demand(await self._run("stream_renew", job_id, [stage, fence, lease()]))

    async def window_there(self, run: RunKey, reader: str, post: Post) -> bool:
        """Let ``reader`` begin while the run goes on. ``post`` is sent, once for each run and
        reader, unless another input is missing: whoever makes that one sends for the reader then.
        """
        job_id, stage, fence = run
        message = [1, event_channel(), *post.arguments]
        args = [stage, fence, reader, *message]
        return bool(await self._run("stream_window", job_id, args, post.queue))

    async def leave(self, job_id: str, blob: BlobRef) -> bool:
        """Have a blob freed with its job. False: the job has ended; nobody reads the blob."""
        return bool(await self._run("stream_leave", job_id, [blob.model_dump_json()]))

    async def piece(
        self, run: RunKey, delta: Mapping[str, Any], artifact: ArtifactInfo | None
    ) -> None:
        """Emit ``stage.delta``; ``artifact`` becomes visible with it.

        Raises:
            Refused: the run is not wanted.
        """
        job_id, stage, fence = run
        name, described = "", b""
        if artifact is not None:
            name = artifact.name
            described = dump({**artifact.model_dump(mode="json"), "key": artifact.key})
        args = [stage, fence, dump(delta), name, described]
        _demand(await self._run("stream_piece", job_id, args))

    # -- reading -----------------------------------------------------------------------------

    @staticmethod
    def key_of(job_id: str, stage: str, output: str) -> str:
        """Key of the stream, to watch."""
        return keys.stream(job_id, stage, output)

    async def read(
        self, job_id: str, stage: str, output: str, fence: int, sequence: int
    ) -> list[Entry]:
        """Entries from (fence, sequence) on, at most :data:`PAGE`; also those of newer runs."""
        key = self.key_of(job_id, stage, output)
        place = before(fence, sequence)
        found = await self.news.ask("XREAD", "COUNT", PAGE, "STREAMS", key, place)
        return [parse(*row) for row in found[key.encode()]] if found else []

    async def taken(self, run: RunKey, producer: str, output: str, position: int) -> None:
        """The reading run has done with the first ``position`` chunks.

        Raises:
            Refused: it is not wanted.
        """
        job_id, stage, fence = run
        key = keys.stream_taken(job_id, producer, output, stage)
        _demand(await self._run("stream_taken", job_id, [stage, fence, position], key))

    async def check(self, run: RunKey, producer: str, producer_fence: int) -> None:
        """Whether a reading run may go on waiting.

        Raises:
            Refused: it is not wanted.
            UpstreamLost: the producing run is gone; the reading run has been released.
        """
        job_id, stage, fence = run
        answer = await self._run("stream_check", job_id, [stage, fence, producer, producer_fence])
        if answer == b"unwanted":
            raise Refused
        if answer == b"lost":
            raise UpstreamLost(f"the run {producer_fence} of stage {producer!r} is gone")

    async def changed(self, event: asyncio.Event) -> bool:
        """Wait for a change that :attr:`news` tells of. False: none within a beat of the lease."""
        waiting = asyncio.ensure_future(event.wait())
        try:
            done, _ = await asyncio.wait({waiting}, timeout=lease() / BEATS)
        finally:
            waiting.cancel()
        return bool(done)


def _demand(done: int) -> None:
    if done == 0:
        raise Refused

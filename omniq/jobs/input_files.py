"""A job's input files on their way into the system: let in, stored as blobs, or given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from omniq.config.pipeline import REQUEST
from omniq.errors import BlobError, BrokerUnavailable
from omniq.jobs.admission import refusal
from omniq.settings import get_settings

if TYPE_CHECKING:
    from omniq.blobs import BlobRef, RedisStore


class InputFiles:
    """The part of a :class:`~omniq.jobs.store.JobStore` that keeps files for jobs to come.

    Args:
        run: runs a job script.
    """

    def __init__(self, run: Callable[..., Awaitable[Any]]) -> None:
        self._run = run
        self._blobs: RedisStore | None = None

    def close(self) -> None:
        """Close the connections."""
        if self._blobs is not None:
            self._blobs.close()

    async def reserve(self, job_id: str, pipeline: str, nbytes: int) -> None:
        """Have room for files of so many bytes, before they are written.

        Raises:
            Overloaded: there is none.
            BrokerUnavailable: no answer.
        """
        settings = get_settings()
        watermark = 0 if settings.blob_redis_url else settings.broker_watermark
        arguments = [job_id, nbytes, settings.max_waiting_input_bytes, pipeline, watermark]
        if answer := await self._run("reserve_input", job_id, arguments):
            raise refusal(answer)

    async def put(self, job_id: str, name: str, data: bytes) -> BlobRef:
        """Store an input that is a file, in the layout of blobs, for ``JobStore.create``.

        It is dropped when an unfinished job is, should it never be created.

        Raises:
            StoreFull, BlobTooLarge: there is no room for it.
        """
        if self._blobs is None:
            from omniq.blobs import RedisStore  # noqa: PLC0415 - few jobs have files

            self._blobs = RedisStore.from_settings(ttl=get_settings().job_ttl)
        blob_id = f"{job_id}.{REQUEST}.0.{name}"
        return await asyncio.to_thread(self._blobs.put_bytes, blob_id, memoryview(data))

    async def drop(self, job_id: str, nbytes: int, refs: Iterable[BlobRef]) -> None:
        """Give up what was reserved and stored for a job that will not be created.

        What the broker refuses to free now it drops later.
        """
        for ref in refs:
            assert self._blobs is not None, "it was put"
            with suppress(BlobError, BrokerUnavailable):
                await asyncio.to_thread(self._blobs.delete, ref)
        with suppress(BrokerUnavailable):
            await self._run("drop_input", job_id, [job_id, nbytes])

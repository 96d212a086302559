"""The Redis blob store: for consumers on other hosts, and for what outlives its worker.

A blob is one hash (:func:`omniq.keys.blob`): its chunks under ``0``, ``1``, ... and ``meta``. It is
written under another key and renamed when it is complete.
"""

from __future__ import annotations

import logging
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import redis
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from redis.retry import Retry

from omniq import keys
from omniq.blobs import codec
from omniq.blobs.base import BlobRef, BlobStore
from omniq.errors import BlobCorrupt, BlobNotFound, BlobTooLarge, BrokerUnavailable, StoreFull
from omniq.redis_client import CONNECT_TIMEOUT, broker_errors, keepalive
from omniq.settings import get_settings

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
#: Seconds a server may take over one chunk.
CHUNK_TIMEOUT = 10.0
#: What a writer that died has written is dropped after so many seconds.
PART_TTL = 60.0

_META = "meta"


class _Meta(BaseModel):
    """What a reader checks a blob against."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nbytes: int = Field(ge=0)
    chunks: int = Field(ge=0)
    checksum: str


class RedisStore(BlobStore):
    """Blobs in Redis; all methods raise BrokerUnavailable when it cannot be used.

    A second :meth:`put` under one id replaces the first in one step.

    Args:
        client: redis-py client that answers bytes; closed with the store.
        ttl: seconds until a blob that nobody deletes is dropped.
        max_bytes: largest blob accepted.
        chunk_bytes: largest value sent in one command.
    """

    name = "redis"

    def __init__(
        self, client: redis.Redis, ttl: float, max_bytes: int, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        # redis-py types every answer as a union over protocols and modes that are not used here.
        self.client: Any = client
        self._ttl, self._max_bytes, self._chunk_bytes = ttl, max_bytes, chunk_bytes

    @classmethod
    def from_settings(cls) -> RedisStore:
        """A store on the configured broker, with connections of its own; connects on first use."""
        settings = get_settings()
        client = redis.Redis.from_url(
            settings.redis_url,
            socket_timeout=CHUNK_TIMEOUT,
            socket_connect_timeout=CONNECT_TIMEOUT,
            **keepalive(settings.redis_url),
            retry=Retry(NoBackoff(), 0),  # a repeated RENAME would fail though the first one worked
        )
        return cls(client, settings.blob_ttl, settings.redis_blob_max_bytes)

    # -- writing -----------------------------------------------------------------------------

    def put(self, blob_id: str, tensors: Mapping[str, torch.Tensor]) -> BlobRef:
        """Write a blob; readers see it only when it is complete.

        Raises:
            BlobTooLarge: above ``max_bytes``.
            StoreFull: Redis has reached its ``maxmemory``.
        """
        layout = codec.plan(tensors)
        return self._put(blob_id, layout.nbytes, layout.buffers(), layout.described)

    def put_bytes(self, blob_id: str, data: memoryview) -> BlobRef:
        """Write a blob that is encoded already; otherwise as :meth:`put`."""
        return self._put(blob_id, len(data), [data], {})

    def _put(
        self,
        blob_id: str,
        nbytes: int,
        buffers: Iterable[memoryview],
        described: dict[str, str],
    ) -> BlobRef:
        ref = BlobRef(id=blob_id, store=self.name, nbytes=nbytes, tensors=described)
        if nbytes > self._max_bytes:
            raise BlobTooLarge(
                f"a blob of {nbytes} bytes; OMNIQ_REDIS_BLOB_MAX_BYTES allows {self._max_bytes}"
            )
        part = keys.blob_part(blob_id, secrets.token_hex(8))
        try:
            with broker_errors():
                meta = self._write(part, nbytes, buffers)
                self._publish(part, blob_id, meta)
        except BrokerUnavailable:
            raise  # the part expires
        except BaseException:
            self._drop(part)
            raise
        return ref.model_copy(update={"checksum": meta.checksum})

    def _write(self, part: str, nbytes: int, buffers: Iterable[memoryview]) -> _Meta:
        """Send the chunks."""
        checksum = count = 0
        for chunk in _chunks(buffers, self._chunk_bytes):
            checksum = zlib.crc32(chunk, checksum)
            # Together: a writer that dies in between would leave a key that stays for ever.
            pipe = self.client.pipeline(transaction=True)
            pipe.hset(part, str(count), chunk)
            pipe.pexpire(part, int(PART_TTL * 1000))
            try:
                pipe.execute()
            except OutOfMemoryError as exc:
                raise _full(nbytes) from exc
            count += 1
        return _Meta(nbytes=nbytes, chunks=count, checksum=f"{checksum:08x}")

    def _publish(self, part: str, blob_id: str, meta: _Meta) -> None:
        """Make a written blob readable.

        Raises:
            StoreFull: Redis has no memory, or dropped some of what was written (a writer that was
                stopped for longer than PART_TTL, eviction).
        """
        key = keys.blob(blob_id)
        pipe = self.client.pipeline(transaction=True)
        pipe.hset(part, _META, meta.model_dump_json())
        pipe.hlen(part)
        pipe.pexpire(part, int(self._ttl * 1000))
        pipe.rename(part, key)
        try:
            _, fields, _, _ = pipe.execute()
        except OutOfMemoryError as exc:
            raise _full(meta.nbytes) from exc
        if fields != meta.chunks + 1:
            self.client.unlink(key)
            raise StoreFull(f"Redis dropped a part of blob {blob_id} while it was written")

    def _drop(self, part: str) -> None:
        try:
            self.client.unlink(part)
        except RedisError as exc:  # the failure to report is the one that brought us here
            logger.debug("%s is left to expire: %s", part, exc)

    # -- reading -----------------------------------------------------------------------------

    def get(self, ref: BlobRef) -> dict[str, torch.Tensor]:
        """Read a blob, chunk by chunk, into memory of this process.

        Raises:
            BlobNotFound: deleted or expired.
            BlobCorrupt: length, checksum or header do not fit.
        """
        import torch  # noqa: PLC0415 - only readers of tensors need it

        key = keys.blob(ref.id)
        with broker_errors():
            meta = self._meta(ref, key)
            # From torch, as its memory is aligned for vector instructions and not cleared first.
            data = torch.empty(meta.nbytes, dtype=torch.uint8).numpy().data
            end = checksum = 0
            for number in range(meta.chunks):
                chunk = self.client.hget(key, str(number))
                if chunk is None:
                    raise _not_found(ref)  # deleted while it is read
                start, end = end, end + len(chunk)
                if end > meta.nbytes:
                    break
                data[start:end] = chunk
                checksum = zlib.crc32(chunk, checksum)
        if end != meta.nbytes or f"{checksum:08x}" != meta.checksum:
            raise BlobCorrupt(f"blob {ref.id} in Redis is not what was written")
        return codec.parse(data)

    def _meta(self, ref: BlobRef, key: str) -> _Meta:
        try:
            raw = self.client.hget(key, _META)
        except ResponseError as exc:
            if str(exc).startswith("WRONGTYPE"):
                raise BlobCorrupt(f"{key} in Redis is no blob") from exc
            raise
        if raw is None:
            raise _not_found(ref)
        try:
            meta = _Meta.model_validate_json(raw)
        except ValidationError as exc:
            raise BlobCorrupt(f"blob {ref.id} in Redis does not say what it is") from exc
        # A reference made by another store (the blob was moved here) has no checksum.
        if meta.nbytes != ref.nbytes or ref.checksum not in (None, meta.checksum):
            raise BlobCorrupt(f"blob {ref.id} in Redis is not the one referred to")
        return meta

    def delete(self, ref: BlobRef) -> bool:
        """Free; False if it was not here."""
        with broker_errors():
            return bool(self.client.unlink(keys.blob(ref.id)))

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


def _chunks(buffers: Iterable[memoryview], size: int) -> Iterator[bytes | memoryview]:
    """The same bytes in pieces of ``size``; only pieces that span buffers are copied."""
    pending: list[memoryview] = []
    room = size
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            piece = buffer[start : start + room]
            start += len(piece)
            room -= len(piece)
            pending.append(piece)
            if not room:
                yield pending[0] if len(pending) == 1 else b"".join(pending)
                pending, room = [], size
    if pending:
        yield b"".join(pending)


def _full(nbytes: int) -> StoreFull:
    return StoreFull(
        f"Redis has no memory for a blob of {nbytes} bytes",
        hint="raise its maxmemory (OMNIQ_BROKER_MAXMEMORY), or let fewer jobs run at a time",
    )


def _not_found(ref: BlobRef) -> BlobNotFound:
    return BlobNotFound(f"blob {ref.id} is not in Redis (any more)")

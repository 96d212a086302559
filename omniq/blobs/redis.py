"""The Redis blob store: for consumers on other hosts, and for what outlives its worker.

A blob is one or more strings (:mod:`omniq.blobs.redis_frame`, :func:`omniq.keys.blob_chunk`). One
chunk is written at once. More are written under other keys, which soon expire, and renamed
together when all are there. What is written is noted (:func:`omniq.keys.blob_notes`) in the same
transaction: what a writer that dies leaves is found by its note (:mod:`omniq.blobs.redis_sweep`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import redis
import xxhash
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, ResponseError
from redis.retry import Retry

from omniq import keys
from omniq.blobs import codec, redis_frame
from omniq.blobs.base import REDIS_HOST, BlobRef, BlobStore
from omniq.blobs.redis_frame import CHUNK_BYTES, HEADER_BYTES, TRAILER_BYTES, Plan
from omniq.blobs.redis_wire import STEP, Buffer, Wire, Wires, begin, command, word
from omniq.errors import BlobCorrupt, BlobError, BlobNotFound, BlobTooLarge, StoreFull
from omniq.redis_client import CONNECT_TIMEOUT, broker_errors, keepalive
from omniq.settings import get_settings

if TYPE_CHECKING:
    import torch

#: Seconds for which a server may neither take nor send anything.
TIMEOUT = 10.0
#: Seconds until what a writer that died has written is dropped, and as many more as one takes that
#: sends SLOWEST bytes a second.
PART_TTL = 60
SLOWEST = 1 << 20

Buffers = Callable[[], Iterable[memoryview]]

_MULTI, _EXEC = command(b"MULTI"), command(b"EXEC")
#: Of the transaction that writes a chunk and its note.
CHUNK_COMMANDS = 4


class RedisStore(BlobStore):
    """Blobs in Redis; all methods raise BrokerUnavailable when it cannot be used.

    A second :meth:`put` under one id replaces the first in one step.

    Args:
        client: redis-py client that answers bytes; closed with the store. Data go over connections
            of the store's own to the same server.
        ttl: seconds until a blob that nobody deletes is dropped.
        max_bytes: largest blob accepted.
        chunk_bytes: most bytes of a blob in one value; the same in all processes.
        own_server: whether the server is another one than the jobs'. Then references say so, and
            what a job leaves is freed by way of ``garbage_host``.
    """

    name = "redis"

    def __init__(
        self,
        client: redis.Redis,
        ttl: float,
        max_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        *,
        own_server: bool = False,
    ) -> None:
        # redis-py types every answer as a union over protocols and modes that are not used here.
        self.client: Any = client
        self.garbage_host = REDIS_HOST if own_server else None
        self._wires = Wires(client)
        self._ttl, self._max_bytes, self._chunk_bytes = ttl, max_bytes, chunk_bytes
        self._system = None if own_server else ""

    @property
    def system(self) -> str:
        """Whose blobs these are: '' on the server that keeps the jobs, elsewhere a name that the
        jobs' server has, so that no system frees what belongs to the jobs of another.
        """
        if self._system is None:
            with broker_errors(), self.broker_client() as broker:
                broker.set(keys.system(), secrets.token_hex(8), nx=True)
                name: Any = broker.get(keys.system())
            self._system = name.decode()
        return self._system

    @property
    def notes(self) -> str:
        """Name of the hash of what has been written."""
        return keys.blob_notes(self.system)

    @classmethod
    def from_settings(cls, ttl: float | None = None) -> RedisStore:
        """A store on the configured server, with connections of its own; connects on first use.

        ``ttl`` replaces the setting.
        """
        settings = get_settings()
        return cls(
            _client(settings.blob_url),
            settings.blob_ttl if ttl is None else ttl,
            settings.redis_blob_max_bytes,
            own_server=settings.blob_redis_url is not None,
        )

    @staticmethod
    def broker_client() -> redis.Redis:
        """A client of the server that keeps the jobs; connects on first use."""
        return _client(get_settings().redis_url)

    # -- writing -----------------------------------------------------------------------------

    def put(self, blob_id: str, tensors: Mapping[str, torch.Tensor]) -> BlobRef:
        """Write a blob; readers see it only when it is complete.

        Raises:
            BlobTooLarge: above ``max_bytes``.
            StoreFull: Redis has reached its ``maxmemory``.
            BlobError: a tensor cannot be stored, or Redis refuses for another reason.
        """
        layout = codec.plan(tensors)
        return self._put(blob_id, layout.nbytes, layout.buffers, layout.described)

    def put_bytes(self, blob_id: str, data: memoryview) -> BlobRef:
        """Write a blob that is encoded already; otherwise as :meth:`put`."""
        return self._put(blob_id, len(data), lambda: [data], {})

    def _put(
        self, blob_id: str, nbytes: int, buffers: Buffers, described: dict[str, str]
    ) -> BlobRef:
        if nbytes > self._max_bytes:
            raise BlobTooLarge(
                f"blob {blob_id} has {nbytes} bytes; "
                f"OMNIQ_REDIS_BLOB_MAX_BYTES allows {self._max_bytes}"
            )

        notes = self.notes.encode()

        def write(wire: Wire) -> str:
            plan = Plan(nbytes, self._chunk_bytes, secrets.token_bytes(redis_frame.TOKEN_BYTES))
            return _Writing(wire, blob_id, plan, self._ttl, notes).write(buffers())

        with _errors(blob_id):
            checksum = self._wires.use(write)
        return BlobRef(
            id=blob_id,
            store=self.name,
            host=self.garbage_host,
            nbytes=nbytes,
            checksum=checksum,
            tensors=described,
        )

    # -- reading -----------------------------------------------------------------------------

    def get(self, ref: BlobRef) -> dict[str, torch.Tensor]:
        """Read a blob into memory of this process, which its tensors share.

        Raises:
            BlobNotFound: deleted, expired, or replaced while it was read.
            BlobCorrupt: length, checksum, header, dtypes or shapes are not what was written.
        """
        with _errors(ref.id):
            data = self._wires.use(lambda wire: _read(wire, ref))
        try:
            tensors = codec.parse(data)
        except BlobCorrupt as exc:
            raise _corrupt(ref, f"is {exc.message}") from exc
        if ref.tensors and (found := codec.describe(tensors)) != ref.tensors:
            raise _corrupt(ref, f"holds {found}, and {ref.tensors} are referred to")
        return tensors

    def delete(self, ref: BlobRef) -> bool:
        """Free; False if it was not here."""
        number = redis_frame.count_chunks(ref.nbytes, self._chunk_bytes)
        with _errors(ref.id):
            pipe = self.client.pipeline(transaction=True)
            pipe.unlink(*(keys.blob_chunk(ref.id, n) for n in range(number)))
            pipe.hdel(self.notes, ref.id)
            return bool(pipe.execute()[0])

    def drop_noted(self, notes: Mapping[str, int]) -> int:
        """Free what is noted, whole or half written, by the notes' names and bytes; how many were
        there.
        """
        pipe = self.client.pipeline(transaction=True)
        for note, nbytes in notes.items():
            blob_id, _, token = note.partition(":")
            numbers = range(redis_frame.count_chunks(nbytes, self._chunk_bytes))
            if token:
                pipe.unlink(*(keys.blob_part(blob_id, f"{token}.{n}") for n in numbers))
            else:
                pipe.unlink(*(keys.blob_chunk(blob_id, n) for n in numbers))
        pipe.hdel(self.notes, *notes)
        with _errors("that nobody needs"):
            return sum(map(bool, pipe.execute()[:-1]))

    def close(self) -> None:
        """Close the connections."""
        self._wires.close()
        self.client.close()


def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(
        url,
        socket_timeout=TIMEOUT,
        socket_connect_timeout=CONNECT_TIMEOUT,
        **keepalive(url),
        retry=Retry(NoBackoff(), 0),  # what may be repeated is repeated by Wires
    )


class _Writing:
    """One attempt to write a blob."""

    def __init__(self, wire: Wire, blob_id: str, plan: Plan, ttl: float, notes: bytes) -> None:
        self._wire, self._id, self._plan = wire, blob_id, plan
        self._ttl = b"%d" % max(1, ttl * 1000)
        self._digest = xxhash.xxh3_64()
        numbers = range(plan.chunks)
        self._final = [keys.blob_chunk(blob_id, n).encode() for n in numbers]
        self._parts: list[bytes] = []
        self._notes, self._note = notes, blob_id.encode()
        self._part_note = b""
        if plan.chunks > 1:
            token = plan.token.hex()
            self._parts = [keys.blob_part(blob_id, f"{token}.{n}").encode() for n in numbers]
            self._part_note = f"{blob_id}:{token}".encode()

    def write(self, buffers: Iterable[memoryview]) -> str:
        """Returns the checksum."""
        chunks = redis_frame.cut(buffers, self._plan)
        try:
            if self._plan.chunks == 1:
                self._send_chunk(self._final[0], 0, next(chunks), self._ttl, self._note)
                self._confirmed(CHUNK_COMMANDS)
            else:
                self._send_parts(chunks)
                self._publish()
        except (ResponseError, StoreFull):
            if self._parts:
                self._drop(self._parts, self._part_note)
            self._wire.close()  # gives the server the memory back that it received into
            raise
        return self._digest.hexdigest()

    def _send_parts(self, chunks: Iterator[list[memoryview]]) -> None:
        part_ttl = b"%d" % ((PART_TTL + self._plan.nbytes // SLOWEST) * 1000)
        for number, chunk in enumerate(chunks):
            self._send_chunk(self._parts[number], number, chunk, part_ttl, self._part_note)
            if number:  # the answer to the chunk before has come while this one was sent
                self._confirmed(CHUNK_COMMANDS)
        self._confirmed(CHUNK_COMMANDS)

    def _send_chunk(
        self, key: bytes, number: int, chunk: list[memoryview], ttl: bytes, note: bytes
    ) -> None:
        """``SET key <frame> PX ttl`` and its note, with the checksum computed just before the bytes
        go.
        """
        opening = _MULTI + begin(5) + word(b"SET") + word(key)
        held: list[Buffer] = [
            opening + b"$%d\r\n" % self._plan.frame_bytes(number),
            self._plan.header(number),
        ]
        size, commands = 0, CHUNK_COMMANDS
        for buffer in chunk:
            for start in range(0, len(buffer), STEP):
                piece = buffer[start : start + STEP]
                self._digest.update(piece)
                held.append(piece)
                size += len(piece)
                if size >= STEP:
                    self._wire.send(held, commands=commands)
                    held, size, commands = [], 0, 0
        end = self._digest.digest() + b"\r\n" + word(b"PX") + word(ttl)
        held.append(end + self._noting(note) + _EXEC)
        self._wire.send(held, commands=commands)

    def _noting(self, note: bytes) -> bytes:
        return command(b"HSET", self._notes, note, b"%d" % self._plan.nbytes)

    def _confirmed(self, commands: int) -> Any:
        """What the transaction of so many commands, its brackets included, has answered."""
        try:
            answers = [self._wire.answer() for _ in range(commands)]
        except OutOfMemoryError as exc:
            raise StoreFull(
                f"Redis has no memory for blob {self._id} of {self._plan.nbytes} bytes",
                hint="raise its maxmemory (OMNIQ_BROKER_MAXMEMORY), or let fewer jobs run at a "
                "time",
            ) from exc
        return answers[-1]

    def _publish(self) -> None:
        """Make the parts readable, all at once."""
        commands = [_MULTI]
        for part, key in zip(self._parts, self._final, strict=True):
            commands.append(command(b"RENAME", part, key))
            commands.append(command(b"PEXPIRE", key, self._ttl))
        commands.append(self._noting(self._note))
        commands.append(command(b"HDEL", self._notes, self._part_note))
        commands.append(_EXEC)
        self._wire.send(commands, commands=len(commands))
        done = self._confirmed(len(commands))
        if any(isinstance(answer, Exception) for answer in done):
            # This writer was stopped for longer than the parts live, or Redis evicts.
            self._drop(self._final, self._note)
            raise StoreFull(f"Redis dropped a part of blob {self._id} while it was written")

    def _drop(self, written: list[bytes], note: bytes) -> None:
        self._wire.drain()
        self._wire.ask(b"UNLINK", *written)
        self._wire.ask(b"HDEL", self._notes, note)


def _read(wire: Wire, ref: BlobRef) -> memoryview:
    """The bytes of a blob, checked."""
    import torch  # noqa: PLC0415 - only readers of tensors need it

    names = keys.blob_chunk
    wire.send([command(b"GET", names(ref.id, 0).encode())])
    digest = xxhash.xxh3_64()
    plan: Plan | None = None
    data = memoryview(b"")
    number = 0
    while plan is None or number < plan.chunks:
        header, size = _begin_chunk(wire, ref, number)
        try:
            said = redis_frame.read_header(header, number, ref.nbytes)
        except BlobCorrupt as exc:
            raise _corrupt(ref, exc.message) from exc
        if plan is None:
            plan = said
            if size == plan.frame_bytes(0):
                # From torch: aligned for vector instructions and not cleared first.
                data = torch.empty(ref.nbytes, dtype=torch.uint8).numpy().data
        if said.token != plan.token:
            raise _not_found(ref, "was replaced while it was read")
        if size != plan.frame_bytes(number):
            raise _corrupt(
                ref, f"has {size} bytes in chunk {number} in place of {plan.frame_bytes(number)}"
            )
        if number + 1 < plan.chunks:  # Redis reads the next one while this one is on its way
            wire.send([command(b"GET", names(ref.id, number + 1).encode())])
        start, end = plan.span(number)
        trailer = wire.read_value(data[start:end], digest.update, TRAILER_BYTES)
        if trailer != digest.digest():
            raise _corrupt(ref, f"has another checksum than was written (chunk {number})")
        number += 1
    if ref.checksum not in (None, digest.hexdigest()):  # None: moved here by another store
        raise _corrupt(ref, "is not the one referred to: it has another checksum")
    return data


def _begin_chunk(wire: Wire, ref: BlobRef, number: int) -> tuple[bytes, int]:
    """The header of a chunk that was asked for, and the bytes of all of it."""
    try:
        # Of a chunk as this store would write it; of others, as much as there is may be read.
        frame = HEADER_BYTES + min(ref.nbytes, CHUNK_BYTES) + TRAILER_BYTES
        size = wire.length(len(b"$%d\r\n" % frame) + HEADER_BYTES)
    except ResponseError as exc:
        if str(exc).startswith("WRONGTYPE"):
            raise _corrupt(ref, "has a key that holds no chunk") from exc
        raise
    if size is None:
        raise _not_found(ref, "is not there (any more)")
    if size < HEADER_BYTES + TRAILER_BYTES:
        raise _corrupt(ref, f"has {size} bytes in chunk {number}, too few for any")
    return wire.read(HEADER_BYTES), size


@contextmanager
def _errors(blob_id: str) -> Iterator[None]:
    setting = (
        "OMNIQ_BROKER_URL" if get_settings().blob_redis_url is None else "OMNIQ_BLOB_REDIS_URL"
    )
    try:
        with broker_errors(setting):
            yield
    except ResponseError as exc:
        raise BlobError(f"Redis refuses what is done with blob {blob_id}: {exc}") from exc


def _corrupt(ref: BlobRef, what: str) -> BlobCorrupt:
    return BlobCorrupt(f"blob {ref.id} in Redis {what}")


def _not_found(ref: BlobRef, what: str) -> BlobNotFound:
    return BlobNotFound(f"blob {ref.id} in Redis {what}")

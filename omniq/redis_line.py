"""One Redis connection that many tasks use at once: no pool, no task and no time-out a command.

redis-py gives every command a connection of its own and wraps its write and its read in time-outs
of their own, which costs more than the command. Here commands are written as they come, all of one
turn of the loop in one system call, and answers are handed out in the order of the commands.
A task that waits holds nothing but an asyncio future, so that cancelling it can lose nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from redis import exceptions
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    DefaultParser,
    SSLConnection,
    UnixDomainSocketConnection,
)

Argument = str | bytes | int | float
Take = Callable[[Any], None]
"""Takes the answer to a command: a value, or an exception if there is none."""

_INCOMPLETE = object()  # instead of hiredis' False, which a server can answer


class Line:
    """Commands over one connection, made on first use and made anew after it broke.

    Args:
        pool: says where the server is and how to log in; none of its connections is used.
        command_timeout: seconds until an answer must be there; then the connection is given up.
        connect_timeout: seconds until the server must have taken the connection.
        greeting: commands to send first on every new connection.
        on_refused: takes the server's refusal of one of them; by default it ends the connection.
        on_push: takes what the server sends unasked (RESP3 push messages).
        on_lost: called with the reason when a connection that worked has ended.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        *,
        command_timeout: float,
        connect_timeout: float,
        greeting: Sequence[tuple[Argument, ...]] = (),
        on_push: Callable[[list[Any]], None] | None = None,
        on_lost: Callable[[Exception], None] | None = None,
        on_refused: Callable[[exceptions.ResponseError], None] | None = None,
    ) -> None:
        self._pool = pool
        self._command_timeout, self._connect_timeout = command_timeout, connect_timeout
        self._greeting, self._on_refused = greeting, on_refused
        self._on_push, self._on_lost = on_push, on_lost
        self._wire: _Wire | None = None
        self._opening: asyncio.Task[_Wire] | None = None

    @property
    def connected(self) -> bool:
        """Whether commands can be sent without waiting for a connection."""
        return self._wire is not None

    async def ask(self, *command: Argument) -> Any:
        """Send one command; returns its answer (bytes, RESP3 types).

        Raises:
            redis.exceptions.ConnectionError: no connection, or it broke before the answer: the
                command may have been carried out.
            redis.exceptions.TimeoutError: the server did not answer in time.
            redis.exceptions.ResponseError: the server refused.
        """
        wire = self._wire or await self._opened()
        return await _asked(wire, command)

    def send(self, take: Take, *command: Argument) -> None:
        """Send one command on a connected line; ``take`` gets the answer or the error."""
        if self._wire is None:
            take(exceptions.ConnectionError("the connection to the broker is closed"))
        else:
            self._wire.send(command, take)

    async def subscribe(self, channel: str) -> None:
        """Have what is published to a channel handed to ``on_push``, until the connection ends.

        Raises:
            redis.exceptions.RedisError: as :meth:`ask`.
        """
        wire = self._wire or await self._opened()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        wire.subscribe(channel, _into(done))
        await done

    def close(self) -> None:
        """Close the connection; what waits for an answer fails. It may be used again."""
        if self._opening is not None:
            self._opening.cancel()
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.lost(exceptions.ConnectionError("the connection to the broker was closed"))

    async def _opened(self) -> _Wire:
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(_retrieved)
        opening = self._opening
        # Shared by all who need it: one that goes away does not cancel it.
        await asyncio.wait({opening})
        if opening.cancelled():
            raise exceptions.ConnectionError("the connection to the broker was closed")
        return opening.result()

    async def _open(self) -> _Wire:
        wire = _Wire(self._command_timeout, self._on_push)
        # Only for what it knows: address, encryption, credentials.
        target = self._pool.make_connection()
        greeted = False
        try:
            async with asyncio.timeout(self._connect_timeout):
                await _connect(wire, target)
            for command in _login(target):
                await _asked(wire, command)
            for command in self._greeting:
                try:
                    await _asked(wire, command)
                except exceptions.ResponseError as exc:
                    if self._on_refused is None:
                        raise
                    self._on_refused(exc)
            greeted = True
        except TimeoutError as exc:  # an OSError, too
            raise exceptions.TimeoutError(
                f"the broker did not take the connection within {self._connect_timeout:g} s"
            ) from exc
        except OSError as exc:
            raise exceptions.ConnectionError(f"no connection to the broker: {exc}") from exc
        finally:
            if not greeted:
                wire.lost(
                    exceptions.ConnectionError("the connection to the broker was not completed")
                )
        if wire.failure is not None:
            raise wire.failure
        self._wire = wire
        wire.on_lost = self._ended
        return wire

    def _ended(self, wire: _Wire, reason: Exception) -> None:
        if self._wire is wire:
            self._wire = None
        if self._on_lost is not None:
            self._on_lost(reason)


class _Wire(asyncio.Protocol):
    """One connection from its beginning to its end."""

    def __init__(self, timeout: float, on_push: Callable[[list[Any]], None] | None) -> None:
        self._timeout, self._on_push = timeout, on_push
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(
            protocolError=exceptions.InvalidResponse,
            replyError=DefaultParser.parse_error,
            notEnoughData=_INCOMPLETE,
        )
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[float, Take]] = deque()
        self._unsent: list[bytes] = []
        self._watch: asyncio.TimerHandle | None = None
        self.failure: Exception | None = None
        self.on_lost: Callable[[_Wire, Exception], None] | None = None

    # -- commands ------------------------------------------------------------------------------

    def send(self, command: tuple[Argument, ...], take: Take) -> None:
        """Write a command at the end of this turn of the loop."""
        if self.failure is not None:
            take(self.failure)
            return
        # First of all: one that cannot be written must not wait for an answer, or it would get the
        # next one's, and so on.
        self.write(command)
        now = self._loop.time()
        self._waiting.append((now, take))
        if self._watch is None:
            self._watch = self._loop.call_at(now + self._timeout, self._look)

    def subscribe(self, channel: str, take: Take) -> None:
        """Subscribe, which the server confirms by a push message, and refuses by an answer."""

        def taken(answer: Any) -> None:
            if isinstance(answer, exceptions.ResponseError):  # the answer to PING comes next
                self._waiting.appendleft((self._loop.time(), _ignore))
            take(answer)

        self.write(("SUBSCRIBE", channel))
        self.send(("PING",), taken)

    def write(self, command: tuple[Argument, ...]) -> None:
        """Write what no answer is waited for, at the end of this turn of the loop."""
        packed = hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub is narrow
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(packed)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        # One that is closing says so in a moment, and all that waits fails then.
        if unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    def _look(self) -> None:
        """Give up a connection whose oldest command has waited too long."""
        self._watch = None
        if not self._waiting:
            return
        due = self._waiting[0][0] + self._timeout
        if self._loop.time() < due:
            self._watch = self._loop.call_at(due, self._look)
        else:
            self.lost(
                exceptions.TimeoutError(f"the broker has not answered within {self._timeout:g} s")
            )

    def lost(self, reason: Exception) -> None:
        """End the connection; everything that waits fails with ``reason``."""
        if self.failure is not None:
            return
        self.failure = reason
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        waiting, self._waiting = self._waiting, deque()
        for _, take in waiting:
            take(type(reason)(*reason.args))  # each its own: raising changes an exception
        if self.on_lost is not None:
            self.on_lost(self, reason)

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        """Hand out every complete answer."""
        reader = self._reader
        try:
            reader.feed(data)
            while self.failure is None:
                answer = reader.gets()
                if answer is _INCOMPLETE:
                    return
                if isinstance(answer, hiredis.PushNotification):
                    if self._on_push is not None:
                        self._on_push(answer)
                else:
                    self._waiting.popleft()[1](answer)
        except (
            exceptions.InvalidResponse,
            IndexError,
        ) as exc:  # no Redis, or an answer nobody asked for
            self.lost(exceptions.ConnectionError(f"the broker sent what is no answer: {exc}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self.lost(
            exceptions.ConnectionError(f"the broker closed the connection: {exc or 'end of file'}")
        )


async def _asked(wire: _Wire, command: tuple[Argument, ...]) -> Any:
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    wire.send(command, _into(answer))
    return await answer


def _into(future: asyncio.Future[Any]) -> Take:
    def take(answer: Any) -> None:
        if future.done():  # the task that asked was cancelled
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    return take


def _ignore(_: object) -> None:
    """Take an answer that nobody waits for."""


def _retrieved(task: asyncio.Task[_Wire]) -> None:
    """All who waited may have gone: then nobody else looks at the error."""
    if not task.cancelled():
        task.exception()


async def _connect(wire: _Wire, target: AbstractConnection) -> None:
    loop = asyncio.get_running_loop()
    if isinstance(target, UnixDomainSocketConnection):
        await loop.create_unix_connection(lambda: wire, target.path)
        return
    assert isinstance(target, Connection)
    tls = target.ssl_context.get() if isinstance(target, SSLConnection) else None
    await loop.create_connection(lambda: wire, target.host, int(target.port), ssl=tls)


def _login(target: AbstractConnection) -> list[tuple[Argument, ...]]:
    hello: tuple[Argument, ...] = ("HELLO", 3)
    if target.username or target.password:
        hello += ("AUTH", target.username or "default", target.password or "")
    commands = [hello]
    if target.db:
        commands.append(("SELECT", target.db))
    return commands

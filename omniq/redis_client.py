"""Redis connections, and the one place that turns redis-py's errors into omniq's."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    InvalidResponse,
    OutOfMemoryError,
    ReadOnlyError,
    TimeoutError,
)

from omniq.errors import BrokerUnavailable
from omniq.redis_line import Line
from omniq.settings import get_settings

#: A ``redis.asyncio.Redis`` that answers bytes. redis-py types each answer as a union over
#: protocols and decoding modes that this project does not use; the alias is looser on purpose.
Client: TypeAlias = Any

COMMAND_TIMEOUT = 2.0
#: As long: a process that gets no processor for a second connects late to a server that is there.
CONNECT_TIMEOUT = COMMAND_TIMEOUT
#: Every waiting client holds a connection; redis-py's own bound of 100 would refuse the next one.
MAX_CONNECTIONS = 10_000
UNAVAILABLE = (
    ConnectionError,
    TimeoutError,
    InvalidResponse,  # no Redis listens there
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
)


BROKER_SETTING = "OMNIQ_BROKER_URL"
SHARED_LINE = frozenset({"EVAL", "EVALSHA", "HGET", "HGETALL", "HMGET", "PING", "SCRIPT LOAD"})
"""Commands of all tasks that go over one connection: short to carry out, with short answers."""


class _Redis(redis.asyncio.Redis):
    """A redis-py client whose commonest commands go over one shared :class:`Line`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._line = line(self, on_lost=self._renew_pool)
        self._renewing: asyncio.Task[None] | None = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """See redis-py."""
        name = args[0]
        if name not in SHARED_LINE:
            return await super().execute_command(*args, **options)
        if name == "SCRIPT LOAD":
            return (await self._line.ask("SCRIPT", "LOAD", *args[1:])).decode()
        answer = await self._line.ask(*args)
        return answer == b"PONG" if name == "PING" else answer

    def _renew_pool(self, reason: Exception) -> None:
        # What ended the line has ended the idle connections of the pool too, but they notice only
        # when they are used next, and fail.
        self._renewing = asyncio.create_task(self.connection_pool.disconnect(False))

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """See redis-py."""
        self._line.close()
        if self._renewing is not None:
            await self._renewing
        await super().aclose(close_connection_pool)


def connect(*, blocking: float | None = None) -> Client:
    """A client with its own pool; nothing is sent before first use.

    Commands fail within ~2 s when the server does not answer. ``blocking`` allows commands that
    wait that many seconds on the server.
    """
    url = get_settings().redis_url
    return _Redis.from_url(
        url,
        socket_timeout=COMMAND_TIMEOUT + (blocking or 0.0),
        socket_connect_timeout=CONNECT_TIMEOUT,
        **keepalive(url),
        max_connections=MAX_CONNECTIONS,
        # Never repeated blindly: a script whose answer was lost may have run.
        retry=AsyncRetry(NoBackoff(), 0),
    )


def keepalive(url: str) -> dict[str, bool]:
    """redis-py's option for connections over a network; its Unix sockets do not take it."""
    return {} if url.startswith("unix:") else {"socket_keepalive": True}


def line(client: Client, **options: Any) -> Line:
    """A connection of its own to the server of ``client``, for many tasks at once.

    Args:
        options: ``greeting``, ``on_push`` and ``on_lost`` of :class:`Line`.
    """
    return Line(
        client.connection_pool,
        command_timeout=COMMAND_TIMEOUT,
        connect_timeout=CONNECT_TIMEOUT,
        **options,
    )


class _BrokerErrors:
    """What :func:`broker_errors` returns; a generator would cost every command more."""

    __slots__ = ("_setting",)

    def __init__(self, setting: str) -> None:
        self._setting = setting

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if isinstance(exc, UNAVAILABLE):
            raise BrokerUnavailable(
                f"the broker cannot be used: {exc}",
                hint=_hint(self._setting, exc),
            ) from exc


def _hint(setting: str, exc: BaseException) -> str:
    ours = setting == BROKER_SETTING and get_settings().embedded
    if ours and isinstance(exc, ConnectionError):
        return "start a system by `omniq up` or `omniq serve`, or name a broker in OMNIQ_BROKER_URL"
    return f"check that Redis/Valkey runs at {setting} and has memory left"


def broker_errors(setting: str = BROKER_SETTING) -> _BrokerErrors:
    """A context that turns "no broker" into :class:`BrokerUnavailable`, whatever form it takes.

    Args:
        setting: names the server.
    """
    return _BrokerErrors(setting)

"""Redis connections, and the one place that turns redis-py's errors into omniq's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    TimeoutError,
)

from omniq.errors import BrokerUnavailable
from omniq.settings import get_settings

#: A ``redis.asyncio.Redis`` that answers bytes. redis-py types each answer as a union over
#: protocols and decoding modes that this project does not use; the alias is looser on purpose.
Client: TypeAlias = Any

COMMAND_TIMEOUT = 2.0
CONNECT_TIMEOUT = 1.0
#: Every waiting client holds a connection; redis-py's own bound of 100 would refuse the next one.
MAX_CONNECTIONS = 10_000
UNAVAILABLE = (ConnectionError, TimeoutError, BusyLoadingError, OutOfMemoryError, ReadOnlyError)


def connect(*, blocking: float | None = None) -> Client:
    """A client with its own pool; nothing is sent before first use.

    Commands fail within ~2 s when the server does not answer. ``blocking`` allows commands that
    wait that many seconds on the server.
    """
    return redis.asyncio.Redis.from_url(
        get_settings().redis_url,
        socket_timeout=COMMAND_TIMEOUT + (blocking or 0.0),
        socket_connect_timeout=CONNECT_TIMEOUT,
        socket_keepalive=True,
        max_connections=MAX_CONNECTIONS,
        # Never repeated blindly: a script whose answer was lost may have run. The first command on
        # a connection that died while idle fails; workers and the API's probe live with that.
        retry=AsyncRetry(NoBackoff(), 0),
    )


@contextmanager
def broker_errors() -> Iterator[None]:
    """Turn "no broker" into :class:`BrokerUnavailable`, whatever form it takes."""
    try:
        yield
    except UNAVAILABLE as exc:
        raise BrokerUnavailable(
            f"the broker cannot be used: {exc}",
            hint="check that Redis/Valkey runs at OMNIQ_BROKER_URL and has memory left",
        ) from exc

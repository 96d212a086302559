"""Telling the broker things without waiting for its answer."""

from __future__ import annotations

import select
import time
from typing import Any

import hiredis
from celery.utils.log import get_logger
from redis.exceptions import ConnectionError, InvalidResponse, ResponseError, TimeoutError

logger = get_logger(__name__)

RECEIVE = 1 << 16


class Notes:
    """Commands over one connection whose answers nobody waits for.

    Args:
        pool: of redis-py; one of its connections is taken.
    """

    def __init__(self, pool: Any) -> None:
        self._connection = pool.get_connection()
        self._socket = self._connection._sock
        self._pool = pool
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=ResponseError)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._unsent: list[bytes] = []
        self._unanswered = 0

    def add(self, *command: str | bytes | float) -> None:
        """Send a command with the next :meth:`flush`."""
        self._unsent.append(hiredis.pack_command(command))  # type: ignore[arg-type]

    def flush(self) -> None:
        """Send what there is, and look at the answers that have arrived.

        Raises:
            redis.exceptions.ConnectionError: the connection is gone, and with it an unknown part of
                what was sent.
        """
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            self._unanswered += len(unsent)
            self._check()
            self._connection.send_packed_command([b"".join(unsent)], check_health=False)
        if self._unanswered:
            self._read(0)

    def settle(self) -> None:
        """Send what there is, and wait until all of it is done.

        Raises:
            redis.exceptions.ConnectionError: as :meth:`flush`.
            redis.exceptions.TimeoutError: the answers do not come.
        """
        self.flush()
        timeout = self._connection.socket_timeout
        deadline = time.monotonic() + (timeout or 60.0)
        while self._unanswered:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the broker does not answer")
            self._read(left)

    def close(self) -> None:
        """Give up the connection; what was not sent is not sent any more."""
        self._unsent.clear()
        self._connection.disconnect()
        self._pool.release(self._connection)

    def _check(self) -> None:
        # redis-py would make a new one without a word.
        if self._connection._sock is not self._socket:
            raise ConnectionError("the connection to the broker is closed")

    def _read(self, seconds: float) -> None:
        self._check()
        sock = self._socket
        # TLS may have decrypted more than was asked for.
        pending = getattr(sock, "pending", None)
        while self._unanswered and (
            (pending is not None and pending()) or self._poll.poll(seconds * 1000)
        ):
            data = sock.recv(RECEIVE)
            if not data:
                raise ConnectionError("the broker closed the connection")
            self._reader.feed(data)
            while (answer := self._reader.gets()) is not False:
                if isinstance(answer, hiredis.PushNotification):
                    continue
                self._unanswered -= 1
                if isinstance(answer, Exception):
                    logger.error("the broker refused a note about messages: %s", answer)
            seconds = 0.0

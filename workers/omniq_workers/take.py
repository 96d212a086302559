"""Taking messages without losing one: they leave their queue and are noted as held in one step.

kombu waits with ``BRPOP``, which hands a message to a connection and keeps no trace of it; whoever
takes it notes it afterwards. A worker that dies in between loses it. Here a script takes and notes
(``take.lua``). It cannot wait, so the server is asked to tell when a queue that was found empty
changes (``CLIENT TRACKING``), whoever writes to it.
"""

from __future__ import annotations

import hashlib
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hiredis
from redis.exceptions import ConnectionError, InvalidResponse, ResponseError, TimeoutError

from omniq.jobs.scripts import FOLDER

#: Most of what was set aside that is kept, the newest.
SET_ASIDE = 1000
SOURCE = "\n".join(
    (
        f"local SET_ASIDE = {SET_ASIDE}",
        (FOLDER / "_order.lua").read_text(),
        (Path(__file__).parent / "take.lua").read_text(),
    )
)
DIGEST = hashlib.sha1(SOURCE.encode(), usedforsecurity=False).hexdigest()
RECEIVE = 1 << 18
#: Most messages taken at once, and which part of the room a worker has: the rest is for others.
MOST = 8
SHARE = 4


class CannotTake(Exception):
    """The server has not what this needs, or does not allow it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one call of the script found."""

    queue: str
    messages: list[bytes]
    undecodable: int


class Taker:
    """Takes messages over one connection that does nothing else.

    Args:
        connection: of redis-py, connected and idle.
        nothing: name of a key that does not exist, to try on.

    Raises:
        CannotTake: this server needs another way to take messages.
        redis.exceptions.ConnectionError: the connection broke.
    """

    def __init__(self, connection: Any, nothing: str) -> None:
        self._connection = connection
        self.socket = connection._sock
        self._reader = hiredis.Reader(protocolError=InvalidResponse, replyError=ResponseError)
        self._poll = select.poll()
        self._poll.register(self.socket, select.POLLIN)
        self._arguments: tuple[str | int, ...] = ()
        #: Whether an answer is on its way.
        self.asked = False
        #: Whether a queue has changed, or may have, since the script looked last.
        self.told = True
        for command in (
            ("HELLO", 3),
            ("CLIENT", "TRACKING", "ON", "NOLOOP"),
            ("SCRIPT", "LOAD", SOURCE),
            ("LMPOP", 1, nothing, "RIGHT"),
        ):
            self._send(command)
            answer = self._wait()
            if isinstance(answer, Exception):
                raise CannotTake(f"{command[0]}: {answer}")

    def ask(self, keys: Sequence[str], most: int) -> None:
        """Have up to ``most`` messages taken; keys as ``take.lua`` has them."""
        self._arguments = (len(keys), *keys, most)
        self.asked, self.told = True, False
        self._send(("EVALSHA", DIGEST, *self._arguments))

    def read(self, wait: float = 0.0) -> Taken | None:
        """What was asked for; None: it is not there yet, or there is nothing.

        To be called when the socket can be read, or with the seconds to wait for that.

        Raises:
            redis.exceptions.ConnectionError: the connection broke.
            redis.exceptions.ResponseError: the server refused.
        """
        if wait and not self._poll.poll(wait * 1000):
            return None
        self._receive()
        answer = self._next()
        if answer is None:
            return None
        self.asked = False
        if isinstance(answer, ResponseError) and str(answer).startswith("NOSCRIPT"):
            self._send(("EVAL", SOURCE, *self._arguments))
            self.asked = True
            return None
        if isinstance(answer, Exception):
            raise answer
        empty, undecodable, queue, _, *messages = answer
        if not empty:
            self.told = True
        if not messages and not undecodable:
            return None
        return Taken(queue.decode(), messages, undecodable)

    def settle(self) -> Taken | None:
        """Wait for an answer that is on its way.

        Raises:
            redis.exceptions.ConnectionError, redis.exceptions.TimeoutError: it does not come.
        """
        deadline = time.monotonic() + self._timeout
        while self.asked:
            if time.monotonic() > deadline:
                raise TimeoutError("the broker does not answer")
            if (taken := self.read(wait=self._timeout)) is not None:
                return taken
        return None

    @property
    def _timeout(self) -> float:
        return float(self._connection.socket_timeout or 60.0)

    def _send(self, command: Sequence[Any]) -> None:
        # redis-py would make a new connection without a word.
        if self._connection._sock is not self.socket:
            raise ConnectionError("the connection to the broker is closed")
        packed = hiredis.pack_command(tuple(command))
        self._connection.send_packed_command([packed], check_health=False)

    def _receive(self) -> None:
        data = self.socket.recv(RECEIVE)
        pending = getattr(self.socket, "pending", None)  # TLS may have decrypted more
        while pending is not None and pending():
            data += self.socket.recv(RECEIVE)
        if not data:
            raise ConnectionError("the broker closed the connection")
        self._reader.feed(data)

    def _next(self) -> Any:
        """The answer, of which there is one at most; None: it is not there yet. Takes in all that
        the server has said unasked.
        """
        answer = None
        while (found := self._reader.gets()) is not False:
            if isinstance(found, hiredis.PushNotification):
                self.told = True
            else:
                answer = found
        return answer

    def _wait(self) -> Any:
        deadline = time.monotonic() + self._timeout
        while True:
            found = self._reader.gets()
            if found is not False and not isinstance(found, hiredis.PushNotification):
                return found
            if found is False:
                left = deadline - time.monotonic()
                if left <= 0 or not self._poll.poll(left * 1000):
                    raise TimeoutError("the broker does not answer")
                self._receive()

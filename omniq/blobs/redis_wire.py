"""Connections that move large values between Redis and the caller's own memory without a copy.

redis-py joins a command into one string and builds every answer as an object, which costs several
copies of a large value. Here a command is a list of buffers for ``sendmsg``, and a value is
received into memory that the caller gives. redis-py still makes the connections: addresses, TLS and
logging in are as in its URLs.
"""

from __future__ import annotations

import builtins
import os
import socket
import ssl
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import redis
from redis.connection import Connection, DefaultParser, UnixDomainSocketConnection
from redis.exceptions import ResponseError, TimeoutError

T = TypeVar("T")

#: So much of a value is sent or received, and looked at, at a time: small enough for the
#: processor's cache, large enough to keep both sides busy.
STEP = 1 << 20
#: Asked of the kernel, which gives at most net.core.{w,r}mem_max.
SOCKET_BUFFER = 4 << 20
MOST_IDLE = 16
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_CRLF = b"\r\n"
_LONGEST_LINE = 64 << 10
#: ``sendmsg`` takes at most IOV_MAX buffers.
_MOST_BUFFERS = 512

Buffer = bytes | memoryview
#: Python's own, and the kernel's.
_LATE = (builtins.TimeoutError, BlockingIOError)


class Broken(redis.ConnectionError):
    """A connection ended while it was used."""


class Wire:
    """One connection. Answers come in the order of the commands; not for two threads at once.

    All methods may raise redis-py's ConnectionError (:class:`Broken`, or the other side is no
    Redis) and TimeoutError; then the connection is of no more use.
    """

    def __init__(self, connection: Any) -> None:
        connection.connect()
        self._connection = connection  # closes the socket when it is collected
        self._socket: socket.socket = connection._sock
        self._vectored = not isinstance(self._socket, ssl.SSLSocket)
        if self._vectored:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                self._socket.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
            self._let_kernel_time()
        self._ahead = b""  # received, not read yet
        self._answers_due = 0

    def _let_kernel_time(self) -> None:
        # With a time-out of its own, Python polls before each call.
        seconds = self._socket.gettimeout()
        if seconds is None:
            return
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._socket.settimeout(None)

    @property
    def clean(self) -> bool:
        """Whether every answer was read, so that the connection can be used again."""
        return not self._answers_due and not self._ahead

    def close(self) -> None:
        """End it."""
        self._answers_due = 1
        self._connection.disconnect()

    # -- commands ------------------------------------------------------------------------------

    def ask(self, *words: Buffer) -> Any:
        """Send a command and read its answer, see :meth:`answer`."""
        self.send([command(*words)])
        return self.answer()

    def send(self, buffers: Sequence[Buffer], *, commands: int = 1) -> None:
        """Write all bytes of ``buffers``, which complete so many commands."""
        self._answers_due += commands
        try:
            if not self._vectored:
                for buffer in buffers:
                    self._socket.sendall(buffer)
                return
            for start in range(0, len(buffers), _MOST_BUFFERS):
                self._send_vector([memoryview(b) for b in buffers[start : start + _MOST_BUFFERS]])
        except _LATE as exc:
            raise TimeoutError("the server does not take the data") from exc
        except OSError as exc:
            raise Broken(f"the connection broke: {exc}") from exc

    def _send_vector(self, views: list[memoryview]) -> None:
        while views:
            sent = self._socket.sendmsg(views)
            done = 0
            while done < len(views) and sent >= len(views[done]):
                sent -= len(views[done])
                done += 1
            del views[:done]
            if sent:
                views[0] = views[0][sent:]

    # -- answers -------------------------------------------------------------------------------

    def answer(self) -> Any:
        """Read the next answer: bytes, int, None or a list, in which errors are values.

        Raises:
            redis.exceptions.ResponseError: the server refused.
        """
        value = self._value()
        self._answers_due -= 1
        if isinstance(value, Exception):
            raise value
        return value

    def drain(self) -> None:
        """Read every answer that is due, whatever it is."""
        while self._answers_due:
            self._value()
            self._answers_due -= 1

    def length(self, expected: int = 0) -> int | None:
        """Begin to read an answer that is a string: its bytes, or None if there is none.

        The value follows by :meth:`read` and :meth:`read_value`.

        Args:
            expected: so many bytes will be read before the large part of the value; spares system
                calls, and copies of what comes after them.

        Raises:
            redis.exceptions.ResponseError: the server refused.
        """
        line = self._line(expected)
        if line[:1] == b"$" and line != b"$-1":
            return _number(line)
        self._answers_due -= 1
        if line in (b"$-1", b"_"):
            return None
        if line[:1] == b"-":
            raise _error(line)
        raise redis.ConnectionError(f"a string was asked for, and the answer is {line[:40]!r}")

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes of a value, few."""
        data = memoryview(bytearray(count))
        self._fill([data])
        return bytes(data)

    def read_value(
        self, view: memoryview, look: Callable[[memoryview], object], trailer_bytes: int
    ) -> bytes:
        """Fill ``view`` with the rest of a value, but for its last bytes, which are returned.

        ``look`` sees each part of ``view`` in order, soon after it has come.
        """
        trailer = memoryview(bytearray(trailer_bytes + len(_CRLF)))
        total = len(view)
        for start in range(0, total, STEP):
            part = view[start : start + STEP]
            self._fill([part, trailer] if start + STEP >= total else [part])
            look(part)
        if not total:
            self._fill([trailer])
        if trailer[-2:] != _CRLF:
            raise _no_answer(bytes(trailer))
        self._answers_due -= 1
        return bytes(trailer[:-2])

    def _fill(self, views: list[memoryview]) -> None:
        views = [v for v in views if v]
        while views:
            if self._ahead:
                count = min(len(self._ahead), len(views[0]))
                views[0][:count] = self._ahead[:count]
                self._ahead = self._ahead[count:]
            else:
                count = self._receive(views)
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def _value(self) -> Any:
        line = self._line()
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return _error(line)
        if kind == b":":
            return _number(line)
        if line in (b"$-1", b"*-1", b"_"):
            return None
        if kind == b"$":
            data = self.read(_number(line) + 2)
            return data[:-2]
        if kind == b"*":
            return [self._value() for _ in range(_number(line))]
        raise _no_answer(line)

    def _line(self, expected: int = 0) -> bytes:
        while (end := self._ahead.find(_CRLF)) < 0:
            if len(self._ahead) > _LONGEST_LINE:
                raise _no_answer(self._ahead)
            buffer = bytearray(expected or 4096)
            self._ahead += buffer[: self._receive([memoryview(buffer)])]
        line, self._ahead = self._ahead[:end], self._ahead[end + 2 :]
        return line

    def _receive(self, views: list[memoryview]) -> int:
        """At least one byte, into the first of ``views`` and on."""
        try:
            if self._vectored and len(views) > 1:
                count = self._socket.recvmsg_into(views)[0]
            else:
                count = self._socket.recv_into(views[0])
        except _LATE as exc:
            raise TimeoutError("the server does not answer") from exc
        except OSError as exc:
            raise Broken(f"the connection broke: {exc}") from exc
        if not count:
            raise Broken("the server closed the connection")
        return count


def command(*words: Buffer) -> bytes:
    """A whole command; for long words see :func:`begin`."""
    return begin(len(words)) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


def begin(words: int) -> bytes:
    """The start of a command of so many words."""
    return b"*%d\r\n" % words


def word(value: Buffer) -> bytes:
    """One short word of a command."""
    return b"$%d\r\n%s\r\n" % (len(value), value)


def _no_answer(data: bytes) -> redis.ConnectionError:
    return redis.ConnectionError(f"not the answer of a Redis server: {data[:40]!r}")


def _number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError as exc:
        raise _no_answer(line) from exc


def _error(line: bytes) -> ResponseError:
    error: ResponseError = DefaultParser.parse_error(line[1:].decode(errors="replace"))
    return error


class Wires:
    """Connections to the server of one redis-py client, for any number of threads.

    A server on this machine that listens on a Unix socket too is used by that.

    Args:
        client: says where the server is and how to log in; none of its connections is used.
    """

    def __init__(self, client: Any) -> None:
        pool = client.connection_pool
        self._kind, self._options = pool.connection_class, {**pool.connection_kwargs, "protocol": 2}
        self._idle: list[Wire] = []
        self._pid = os.getpid()
        self._socket_path: str | None = None
        self._looked = False

    def use(self, work: Callable[[Wire], T]) -> T:
        """The value of ``work``; once again on a new connection if the one it had broke.

        ``work`` must be such that it may be repeated after any part of it.
        """
        try:
            return self._use(self._take(), work)
        except Broken:
            # What ended it has ended the idle ones too: a restart, or a time limit of the server.
            self.close()
            return self._use(self._connect(), work)

    def close(self) -> None:
        """Close what is idle; what is in use is kept for later, as ever."""
        idle, self._idle = self._idle, []
        if self._pid == os.getpid():
            for wire in idle:
                wire.close()

    def _use(self, wire: Wire, work: Callable[[Wire], T]) -> T:
        try:
            return work(wire)
        except (redis.ConnectionError, TimeoutError):
            wire.close()
            raise
        finally:
            if wire.clean and len(self._idle) < MOST_IDLE:
                self._idle.append(wire)
            else:
                wire.close()

    def _take(self) -> Wire:
        if self._pid != os.getpid():  # connections of a parent process are not ours
            self._idle, self._pid = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    # -- connecting ----------------------------------------------------------------------------

    def _connect(self) -> Wire:
        if self._socket_path is not None:
            try:
                return self._connect_socket(self._socket_path)
            except redis.ConnectionError:  # restarted without it
                self._socket_path, self._looked = None, False
        wire = Wire(self._kind(**self._options))
        if self._looked or self._kind is not Connection:
            return wire
        if self._options.get("host", "localhost") not in _LOOPBACK:
            return wire
        self._looked = True
        return self._by_socket(wire) or wire

    def _by_socket(self, wire: Wire) -> Wire | None:
        """A connection over the Unix socket of the server of ``wire``, which is closed then."""
        try:
            named = wire.ask(b"CONFIG", b"GET", b"unixsocket")
            path = os.fsdecode(named[1]) if named else ""
            if not path or not stat.S_ISSOCK(Path(path).stat().st_mode):
                return None
            by_socket = self._connect_socket(path)
        except (ResponseError, OSError, redis.ConnectionError):
            return None  # not allowed to ask, or not reachable from here
        # Through a forwarded port, the path may be that of another server on this machine.
        if _run_id(by_socket) != _run_id(wire):
            by_socket.close()
            return None
        wire.close()
        self._socket_path = path
        return by_socket

    def _connect_socket(self, path: str) -> Wire:
        tcp_only = ("host", "port", "socket_keepalive", "socket_keepalive_options", "socket_type")
        options = {k: v for k, v in self._options.items() if k not in tcp_only}
        kind: Any = UnixDomainSocketConnection  # a class that redis-py's types call abstract
        return Wire(kind(path=path, **options))


def _run_id(wire: Wire) -> bytes | None:
    try:
        lines = wire.ask(b"INFO", b"server").split()
    except ResponseError:
        return os.urandom(8)  # not allowed to ask: equal to nothing
    return next((line for line in lines if line.startswith(b"run_id:")), None)

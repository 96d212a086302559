"""The embedded broker that serves one Python process: a free port, nothing on disk, own namespace.

All systems of a process share it, since a process talks to one broker at a time
(:mod:`omniq.runtime.binding`); it starts with the first and ends with the last.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time

import redis

from omniq.errors import BrokerUnavailable, ConfigError
from omniq.runtime.binding import bind, unbind
from omniq.runtime.broker import LINGER, STOP_TIMEOUT
from omniq.runtime.processes import child_command, private_broker_process
from omniq.runtime.spawn import Child

ATTEMPTS = 5
START_TIMEOUT = 15.0
SIGNAL_PAUSE = 0.1
"""Seconds between two signals, or they would count as one."""


class PrivateBroker:
    """One running private broker. Use :meth:`acquire` and :meth:`release`."""

    _current: PrivateBroker | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.users = 0
        self.namespace = f"omniq-{secrets.token_hex(6)}"
        self.child, self.port = self._start()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    @classmethod
    def acquire(cls) -> PrivateBroker:
        """The process's broker, started if need be; settings point to it.

        Raises:
            BrokerUnavailable: it does not start.
            ConfigError: this process uses another broker already.
        """
        with cls._lock:
            broker = cls._current
            if broker is None or broker.child.exit_code is not None:
                broker = cls()
            try:
                bind(broker.url, broker.namespace)
            except ConfigError:
                broker._stop_if_unused()
                raise
            cls._current = broker
            broker.users += 1
            return broker

    @classmethod
    def in_use(cls) -> bool:
        """Whether this process has one."""
        return cls._current is not None

    def release(self) -> None:
        """Done with it: the last user stops it."""
        with self._lock:
            unbind()
            self.users -= 1
            self._stop_if_unused()

    def _stop_if_unused(self) -> None:
        if self.users:
            return
        if PrivateBroker._current is self:
            PrivateBroker._current = None
        self.child.terminate()
        # The workers have ended. Who is still connected is this process itself, by idle connections
        # of Celery's pools; a second signal says not to wait for those.
        time.sleep(SIGNAL_PAUSE)
        self.child.terminate()
        self.child.wait(LINGER + STOP_TIMEOUT + 2.0)
        self.child.close()

    def _environment(self) -> dict[str, str]:
        """Its own namespace, and no configured broker, which this one is not."""
        env = {k: v for k, v in os.environ.items() if k != "OMNIQ_BROKER_URL"}
        return {**env, "OMNIQ_NAMESPACE": self.namespace}

    def _start(self) -> tuple[Child, int]:
        said = ""
        for _ in range(ATTEMPTS):
            port = _free_port()
            child = Child(
                "broker", child_command(private_broker_process(port)), self._environment()
            )
            if _serves(child, port):
                return child, port
            said = "\n".join(child.last_lines())
            child.kill()
            child.close()
        raise BrokerUnavailable(f"the embedded broker does not start:\n{said}")


def _free_port() -> int:
    """Free a moment ago: whoever takes it in between makes the next attempt necessary."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serves(child: Child, port: int) -> bool:
    deadline = time.monotonic() + START_TIMEOUT
    with redis.Redis(port=port, socket_timeout=1.0, socket_connect_timeout=1.0) as client:
        while child.exit_code is None and time.monotonic() < deadline:
            try:
                # Its own line, too: another server may have taken the port just before it.
                if client.ping() and any(f":{port}," in line for line in child.last_lines()):
                    return True
            except redis.RedisError:
                pass
            time.sleep(0.02)
    return False

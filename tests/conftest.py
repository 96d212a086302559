"""Fixtures shared by all tests: a real Valkey server and clean settings."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from support import Valkey

os.environ.setdefault("HF_HUB_OFFLINE", "1")
for _name in [n for n in os.environ if n.startswith("OMNIQ_")]:
    del os.environ[_name]  # a developer's own settings must not steer the tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough", action="store_true", help="tests that try at random try for minutes"
    )


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether tests that try at random are to try for minutes instead of seconds."""
    return bool(request.config.getoption("--thorough"))


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


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets settings of this process by their names, for this test."""
    from omniq.settings import get_settings

    def apply(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"OMNIQ_{name.upper()}", str(value))
        get_settings.cache_clear()

    yield apply
    monkeypatch.undo()
    get_settings.cache_clear()

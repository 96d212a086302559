"""One connection for many tasks: order, cancellation, time-outs, and what a restart does to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, ConnectionError, ResponseError, TimeoutError
from support import Valkey, free_port, wait_until

from omniq.errors import BrokerUnavailable
from omniq.jobs.store import JobStore
from omniq.redis_client import connect
from omniq.redis_line import Line
from omniq.settings import get_settings


@contextlib.asynccontextmanager
async def line(url: str, **options: Any) -> AsyncIterator[Line]:
    client = Redis.from_url(url)
    one = Line(client.connection_pool, command_timeout=0.5, connect_timeout=0.5, **options)
    yield one
    one.close()


async def test_many_tasks_get_their_own_answers_over_one_connection(
    broker: Valkey, aredis: Redis
) -> None:
    # Other tests' clients may still be connected, and go meanwhile.
    others = {client["id"] for client in await aredis.client_list()}
    async with line(broker.url) as one:
        answers = await asyncio.gather(*(one.ask("ECHO", f"n{i}") for i in range(2000)))
        assert answers == [f"n{i}".encode() for i in range(2000)]
        assert len({client["id"] for client in await aredis.client_list()} - others) == 1


async def test_cancelled_askers_do_not_shift_the_answers_of_others(broker: Valkey) -> None:
    rng = random.Random(1)
    async with line(broker.url) as one:

        async def asks(i: int) -> None:
            assert await one.ask("ECHO", str(i)) == str(i).encode()

        for _ in range(20):
            tasks = [asyncio.create_task(asks(i)) for i in range(100)]
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            for task in rng.sample(tasks, 50):
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                assert result is None or isinstance(result, asyncio.CancelledError)


async def test_what_cannot_be_written_shifts_no_answer_of_others(broker: Valkey) -> None:
    async with line(broker.url) as one:
        await one.ask("PING")
        unwritable = one.ask("ECHO", "\ud800"), one.ask("ECHO", object())  # type: ignore[arg-type]
        asked = [one.ask("ECHO", str(i)) for i in range(4)]
        found = await asyncio.gather(*unwritable, *asked, return_exceptions=True)
        assert [type(answer) for answer in found[:2]] == [UnicodeEncodeError, TypeError]
        assert found[2:] == [b"0", b"1", b"2", b"3"]
        assert await one.ask("ECHO", "next") == b"next"


async def test_a_subscription_is_confirmed_or_refused_and_shifts_no_answer(
    broker: Valkey, aredis: Redis
) -> None:
    rules = ["on", ">x", "~*", "+@all", "resetchannels", "&mine:*"]
    await aredis.execute_command("ACL", "SETUSER", "limited", *rules)
    heard: list[list[bytes]] = []
    async with line(
        broker.url.replace("://", "://limited:x@"), on_push=lambda push: heard.append(push[:])
    ) as one:
        results = await asyncio.gather(
            one.ask("ECHO", "a"),
            one.subscribe("theirs:x"),
            one.ask("ECHO", "b"),
            one.subscribe("mine:x"),
            one.ask("ECHO", "c"),
            return_exceptions=True,
        )
        assert isinstance(results.pop(1), ResponseError)
        assert results == [b"a", b"b", None, b"c"]
        await aredis.publish("mine:x", "hello")
        while len(heard) < 2:
            await asyncio.sleep(0.01)
    assert heard == [[b"subscribe", b"mine:x", 1], [b"message", b"mine:x", b"hello"]]
    await aredis.execute_command("ACL", "DELUSER", "limited")


async def test_an_error_answer_is_raised_and_the_line_goes_on(broker: Valkey) -> None:
    async with line(broker.url) as one:
        results = await asyncio.gather(
            one.ask("ECHO", "a"), one.ask("NONSENSE"), one.ask("ECHO", "b"), return_exceptions=True
        )
        assert results[0] == b"a" and results[2] == b"b"
        assert isinstance(results[1], ResponseError)


async def test_large_answers_and_all_types_come_whole(broker: Valkey) -> None:
    async with line(broker.url) as one:
        large = os.urandom(5_000_000)
        await one.ask("SET", "k", large)
        await one.ask("HSET", "h", "f", "v", b"g", 1.5)
        got = await asyncio.gather(
            one.ask("GET", "k"), one.ask("HGETALL", "h"), one.ask("GET", "x")
        )
        assert got == [large, {b"f": b"v", b"g": b"1.5"}, None]


async def test_a_frozen_server_fails_every_waiting_command_in_time(own_valkey: Valkey) -> None:
    async with line(own_valkey.url) as one:
        await one.ask("PING")
        assert own_valkey.process is not None
        os.kill(own_valkey.process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        try:
            results = await asyncio.gather(
                *(one.ask("PING") for _ in range(10)), return_exceptions=True
            )
        finally:
            os.kill(own_valkey.process.pid, signal.SIGCONT)
        assert all(isinstance(r, TimeoutError) for r in results)
        assert 0.4 < time.monotonic() - begun < 2
        assert await one.ask("PING") == b"PONG"


def test_a_connection_that_closes_under_a_command_fails_it_and_nothing_else(broker: Valkey) -> None:
    """As on the workers' loop, whose connections refuse what is written to them then."""
    faults: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context))
        async with line(broker.url) as one:
            await one.ask("PING")
            assert one._wire is not None and one._wire._transport is not None

            async def ask() -> None:
                await asyncio.sleep(0)  # until just before the line hears of the end
                await one.ask("PING")

            asked = asyncio.ensure_future(ask())
            loop.call_soon(one._wire._transport.abort)
            with pytest.raises(ConnectionError):
                await asked
            assert await one.ask("ECHO", "again") == b"again"

    loop = uvloop.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    assert faults == []


async def test_a_restart_is_survived_by_the_next_command(own_valkey: Valkey) -> None:
    lost: list[Exception] = []
    async with line(own_valkey.url, on_lost=lost.append) as one:
        await one.ask("PING")
        own_valkey.stop(kill=True)
        with pytest.raises(ConnectionError):
            await one.ask("PING")
        with pytest.raises(ConnectionError):
            await one.ask("PING")
        assert len(lost) == 1
        own_valkey.start()
        assert await one.ask("PING") == b"PONG"


async def test_the_pool_beside_the_line_is_as_good_as_new_after_a_restart(
    own_valkey: Valkey,
) -> None:
    """Idle pooled connections died with the server; the next command must not find that out."""
    client = connect()
    await asyncio.gather(*(client.set(str(i), i) for i in range(5)), client.ping())
    await asyncio.to_thread(own_valkey.stop)
    await asyncio.to_thread(own_valkey.start)
    assert await client.ping()
    assert await asyncio.gather(*(client.get(str(i)) for i in range(5))) == [
        str(i).encode() for i in range(5)
    ]
    await client.aclose()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A server with a password and a Unix socket: its port and the socket."""
    port, path = free_port(), tmp_path / "s"
    process = subprocess.Popen(
        [Valkey(tmp_path).binary, "--port", str(port), "--unixsocket", str(path), "--save", "",
         "--requirepass", "secret", "--loglevel", "warning"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(path.exists, 10)
    yield port, path
    process.kill()
    process.wait()


async def test_credentials_databases_and_sockets_of_the_url_are_used(
    guarded: tuple[int, Path],
) -> None:
    port, path = guarded
    async with line(f"redis://:secret@127.0.0.1:{port}/3") as one:
        await one.ask("SET", "k", "tcp")
    async with line(f"unix://:secret@{path}?db=3") as one:
        assert await one.ask("GET", "k") == b"tcp"
    async with line(f"unix://:secret@{path}") as one:
        assert await one.ask("GET", "k") is None
    async with line(f"redis://127.0.0.1:{port}") as one:
        with pytest.raises(AuthenticationError):
            await one.ask("GET", "k")


async def test_a_peer_that_speaks_no_redis_is_an_unusable_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("OMNIQ_BROKER_URL", f"redis://127.0.0.1:{port}/0")
        get_settings.cache_clear()
        store = JobStore.from_settings()
        with pytest.raises(BrokerUnavailable):
            await store.get("x")
        await store.close()
    get_settings.cache_clear()

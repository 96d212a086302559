"""A whole system as children of one Python process: it starts, explains itself, leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from omniq_process import alive, descendants
from stand_in import stand_in
from support import wait_until

from omniq.errors import ConfigError, NotReady
from omniq.runtime.binding import bind, unbind
from omniq.runtime.local import LocalSystem
from omniq.runtime.private_broker import PrivateBroker
from omniq.settings import get_settings


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[dict[str, str]]:
    with stand_in(tmp_path) as env:
        yield env


@pytest.fixture(autouse=True)
def others() -> list[psutil.Process]:
    """Children that other tests of the session have (its Valkey)."""
    return descendants(os.getpid())


def children(others: list[psutil.Process]) -> list[psutil.Process]:
    """This process's own children, but not those from before the test."""
    return [p for p in alive(descendants(os.getpid())) if p not in others]


def segments(namespace: str) -> list[str]:
    return [f.name for f in Path("/dev/shm").iterdir() if namespace in f.name]


def test_starts_ready_and_stops_without_a_trace(
    pipeline: dict[str, str], others: list[psutil.Process]
) -> None:
    seen: list[tuple[str, str]] = []
    before = get_settings().namespace
    with LocalSystem("stand-in", on_progress=lambda *change: seen.append(change)) as system:
        namespace = get_settings().namespace
        assert namespace != before
        assert not get_settings().embedded
        assert {("first", "ready"), ("second", "ready")} <= set(seen)
        assert len(children(others)) == 4  # two workers, broker, Valkey
        system.check()
    assert not children(others)
    assert not segments(namespace)
    assert get_settings().embedded
    assert get_settings().namespace == before


def test_worker_that_cannot_load_is_reported_with_its_reason(
    tmp_path: Path, others: list[psutil.Process]
) -> None:
    with (
        stand_in(tmp_path, second={"broken": "no such model folder"}),
        pytest.raises(NotReady) as caught,
    ):
        LocalSystem("stand-in").start()
    text = caught.value.message
    assert "second" in text
    assert "no such model folder" in text
    assert "memory:" in text
    assert not children(others)


def test_timeout_says_which_stage_and_what_it_was_doing(
    tmp_path: Path, others: list[psutil.Process]
) -> None:
    with stand_in(tmp_path, second={"load": 60}), pytest.raises(NotReady) as caught:
        LocalSystem("stand-in", ready_timeout=12).start()
    text = caught.value.message
    assert "not ready within 12 s" in text
    assert "stage second: worker" in text
    assert "is loading for" in text
    assert "stage first:" not in text
    assert not children(others)


def test_worker_that_dies_later_is_noticed(
    pipeline: dict[str, str], others: list[psutil.Process]
) -> None:
    with LocalSystem("stand-in") as system:
        worker = next(p for p in children(others) if "stand-in.second" in " ".join(p.cmdline()))
        worker.kill()
        wait_until(lambda: _raises(system), 5, "the death is noticed")
    assert not children(others)


def _raises(system: LocalSystem) -> bool:
    try:
        system.check()
    except NotReady as exc:
        return "second was killed by SIGKILL" in exc.message
    return False


def test_survives_the_thread_that_started_it(pipeline: dict[str, str]) -> None:
    """The kernel ties a child to the thread that forked it; short-lived ones must not count."""
    system = LocalSystem("stand-in")
    thread = threading.Thread(target=system.start)
    thread.start()
    thread.join()
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            system._children[0].process.wait(1.0)
        system.check()
    finally:
        system.close()


def test_closing_twice_is_harmless(pipeline: dict[str, str], others: list[psutil.Process]) -> None:
    system = LocalSystem("stand-in").start()
    system.close()
    system.close()
    assert not children(others)


def test_two_systems_in_one_process_share_the_private_broker(
    pipeline: dict[str, str], others: list[psutil.Process]
) -> None:
    first = LocalSystem("stand-in").start()
    url = get_settings().url
    second = LocalSystem("stand-in").start()
    assert get_settings().url == url
    first.close()
    second.check()
    assert get_settings().url == url
    second.close()
    assert not children(others)


def test_one_process_cannot_use_two_brokers(pipeline: dict[str, str]) -> None:
    bind("redis://127.0.0.1:1/0")
    try:
        with pytest.raises(ConfigError, match="already uses the broker"):
            bind("redis://127.0.0.1:2/0")
    finally:
        unbind()
    assert get_settings().embedded


def test_private_brokers_do_not_collide() -> None:
    code = textwrap.dedent("""
        from omniq.runtime.private_broker import PrivateBroker
        broker = PrivateBroker.acquire()
        print(broker.port, broker.namespace, flush=True)
        input()
        broker.release()
    """)
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [p.stdout.readline().split() for p in pair if p.stdout]
    assert said[0][0] != said[1][0]
    assert said[0][1] != said[1][1]
    started = [p for other in pair for p in descendants(other.pid)]
    assert len(started) == 4
    for process in pair:
        process.communicate("\n", timeout=20)
    assert not alive(started)


def test_private_broker_keeps_nothing_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    PrivateBroker.acquire().release()
    assert not list(tmp_path.iterdir())


#: With SIGINT as a terminal has it; what runs in the background, these tests perhaps, ignores it.
SCRIPT = """
import os, signal, sys, time
from omniq import LocalSystem
signal.signal(signal.SIGINT, signal.default_int_handler)
LocalSystem("stand-in").start()
print("ready", flush=True)
input()
{then}
"""


@pytest.mark.parametrize(
    ("then", "how"),
    [
        ("pass", None),
        ("raise RuntimeError('a bug')", None),
        ("time.sleep(60)", signal.SIGTERM),
        ("time.sleep(60)", signal.SIGKILL),
        ("time.sleep(60)", signal.SIGINT),
        ("pid = os.fork(); pid or sys.exit(0); os.wait(); time.sleep(60)", signal.SIGKILL),
    ],
    ids=["end", "exception", "terminated", "killed", "interrupted", "forked-then-killed"],
)
def test_nothing_outlives_the_python_process(
    pipeline: dict[str, str], then: str, how: signal.Signals | None
) -> None:
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(then=then)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert script.stdin is not None
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"
    started = descendants(script.pid)
    assert len(started) == 4  # two workers, broker, Valkey
    script.stdin.write("\n")
    script.stdin.flush()
    if how is not None:
        time.sleep(0.5)  # it sleeps by now; nothing outside tells
        assert len(alive(started)) == 4
        script.send_signal(how)
    script.wait(30)
    wait_until(lambda: not alive(started), 15, "all its processes end")

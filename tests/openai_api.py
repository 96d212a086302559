"""The real OpenAI client against a real server process of the API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
from omniq_process import omniq_processes
from support import free_port, wait_until


@contextlib.asynccontextmanager
async def openai_client(folder: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of an ``omniq api`` on the broker that the environment names."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with omniq_processes(folder) as start:
        server = start("api", "--port", str(port))

        def up() -> bool:
            assert server.process.poll() is None, server.output()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/health").status_code == 200
            return False

        wait_until(up, 60, "the API answers")
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120
        ) as client:
            yield client

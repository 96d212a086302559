"""Clients that are no clients: heads and bodies without end, silence, and leaving at any time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
import uvicorn
from api_support import BODY, only_job, state_is
from omniq_api import http_protocol
from omniq_api.app import create_app
from support import free_port

from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore

BODY_TEXT = json.dumps(BODY).encode()
SHORT = 0.3


@pytest.fixture
async def port(
    broker: object, monkeypatch: pytest.MonkeyPatch, setting: Callable[..., None]
) -> AsyncIterator[int]:
    """A server of this process, whose patience is short."""
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", SHORT)
    monkeypatch.setattr(http_protocol, "STALL_SECONDS", SHORT)
    setting(body_timeout=SHORT)
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(),
            port=port,
            http=http_protocol.GuardedProtocol,
            log_config=None,
            timeout_graceful_shutdown=1,
        )
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield port
    server.should_exit = True
    await serving


def request(method: str, path: str, body: bytes = b"", *headers: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1".encode(), b"host: x", *headers]
    if body:
        lines += [b"content-type: application/json", b"content-length: %d" % len(body)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def answer(port: int, *pieces: bytes) -> bytes:
    """What the server says to these pieces until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


PIECE = b"x" * (16 << 10)
WITHOUT_END = {
    "header": [b"GET /health HTTP/1.1\r\nhost: x\r\na: ", *[PIECE] * 400],
    "headers": [b"GET /health HTTP/1.1\r\n", *[b"a: b\r\n" * 2000] * 400],
    "url": [b"GET /", *[PIECE] * 400],
    "line breaks": [b"\r\n" * 5000] * 400,
}


@pytest.mark.parametrize("pieces", WITHOUT_END.values(), ids=WITHOUT_END)
async def test_a_head_without_end_is_refused_at_once(port: int, pieces: list[bytes]) -> None:
    said = await answer(port, *pieces)
    # Who goes on sending may lose the answer to the reset.
    assert said == b"" or said.startswith(b"HTTP/1.1 431 ")
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200


async def test_a_head_may_be_large_and_a_body_larger(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/health", headers={"a": "x" * 50_000})).status_code == 200
        long = {**BODY, "input": {"prompt": "x" * 2_000_000}}
        assert (await client.post("/v1/jobs", json=long)).status_code == 422


async def test_trailers_without_end_close_the_connection(port: int, store: JobStore) -> None:
    head = request("POST", "/v1/jobs", b"", b"content-type: application/json",
                   b"transfer-encoding: chunked")  # fmt: skip
    said = await answer(port, head, b"2\r\n{}\r\n0\r\n", *[b"a: b\r\n" * 2000] * 400)
    assert b"200 OK" not in said
    assert (await store.list())[0] == []


@pytest.mark.parametrize("begin", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n", b"\r\n"])
async def test_a_head_that_does_not_come_closes_the_connection(port: int, begin: bytes) -> None:
    said = await answer(port, begin)
    assert said == b"" or said.startswith(b"HTTP/1.1 408 ")


async def test_a_head_that_does_not_come_behind_a_request_closes_it(port: int) -> None:
    async with asyncio.timeout(4):  # sooner than a connection that is only kept alive
        said = await answer(port, request("GET", "/health") + b"G")
    assert said.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/chat/completions"])
async def test_a_body_that_does_not_come_whole_is_answered_408(port: int, path: str) -> None:
    head = request("POST", path, b"", b"content-type: application/json", b"content-length: 99")
    said = await answer(port, head, b"{")
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b'"body_too_slow"' in said


async def test_a_body_that_nobody_needs_breaks_no_stream(
    port: int, store: JobStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        job = (await client.post("/v1/jobs", json=BODY)).json()["id"]
    said = await answer(port, request("GET", f"/v1/jobs/{job}/events", b"", b"content-length: 9"))
    assert said.startswith(b"HTTP/1.1 200 ")
    assert "Traceback" not in caplog.text


async def test_a_client_that_reads_nothing_is_dropped(port: int, store: JobStore) -> None:
    metadata = {str(i): "x" * 512 for i in range(16)}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(200):
            assert (await client.post("/v1/jobs", json={**BODY, "metadata": metadata})).is_success
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    ask = request("GET", "/v1/jobs?limit=200")
    writer.write(ask * 20)  # more than fits between the two
    await asyncio.sleep(8 * SHORT)
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    said = b""
    try:
        while piece := await asyncio.wait_for(reader.read(1 << 20), 5):
            said += piece
    except ConnectionError:
        pass
    assert said.count(b"HTTP/1.1 200 ") < 20
    writer.close()


@pytest.mark.parametrize("behind", [b"", request("GET", "/health")], ids=["alone", "pipelined"])
async def test_who_leaves_is_noticed_also_with_a_request_behind(
    port: int, store: JobStore, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request("POST", "/v1/generate", BODY_TEXT) + behind)
    job = await only_job(store)
    writer.close()
    await state_is(store, job, JobState.CANCELLED)
    assert "Traceback" not in caplog.text

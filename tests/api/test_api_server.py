"""The server process: starting, stopping, and what only shows over a real connection."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from api_support import (
    BODY,
    ApiServer,
    eventually,
    only_job,
    parse_sse,
    problem,
    serving,
    watching_connections,
)
from redis.asyncio import Redis

from omniq.jobs.model import JobState
from omniq.jobs.store import JobStore


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_stopping_ends_streams_and_long_polls_at_once(
    server: ApiServer, http: httpx.AsyncClient, aredis: Redis, number: int
) -> None:
    """Streams can be resumed elsewhere, long polls answer with the present state."""
    job_id = (await http.post("/v1/jobs", json=BODY)).json()["id"]
    poll = asyncio.create_task(http.get(f"/v1/jobs/{job_id}?wait=60"))

    async def waits() -> bool:
        return await watching_connections(aredis) == 1

    await eventually(waits)
    async with http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        pieces = response.aiter_text()
        text = ""
        while not parse_sse(text):
            text += await anext(pieces)
        status = await asyncio.to_thread(server.stop, number)
        text += "".join([piece async for piece in pieces])
    assert status == 0
    assert [e.type for e in parse_sse(text)] == ["job.queued"]
    assert (await poll).json()["state"] == "queued"
    log = server.log()
    assert "Traceback" not in log
    assert "timeout graceful shutdown exceeded" not in log


async def test_stopping_leaves_the_job_of_a_generate_call_running(
    server: ApiServer, http: httpx.AsyncClient, store: JobStore, aredis: Redis
) -> None:
    asking = asyncio.create_task(http.post("/v1/generate", json=BODY))

    async def waits() -> bool:
        return await watching_connections(aredis) == 1

    await eventually(waits)
    job_id = await only_job(store)
    status = await asyncio.to_thread(server.stop)
    found = problem(await asking)
    assert (status, found.status, found.code) == (0, 503, "shutting_down")
    assert found.body["job"] == f"/v1/jobs/{job_id}"
    assert (await store.get(job_id)).state is JobState.QUEUED


async def test_a_client_that_does_not_read_does_not_delay_stopping(
    server: ApiServer, http: httpx.AsyncClient
) -> None:
    job_id = (await http.post("/v1/jobs", json=BODY)).json()["id"]
    with socket.create_connection(("127.0.0.1", server.port)) as idle:
        idle.sendall(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        with socket.create_connection(("127.0.0.1", server.port)) as half:
            half.sendall(b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n")
            half.sendall(b"content-type: application/json\r\n\r\n{")
            await asyncio.sleep(0.2)
            status = await asyncio.to_thread(server.stop)
    assert status == 0


JSON, FORM = "application/json", "multipart/form-data; boundary=edge"


def test_a_client_that_leaves_within_its_body_is_no_fault_to_log(server: ApiServer) -> None:
    for path, kind in (
        ("/v1/jobs", JSON),
        ("/v1/jobs", FORM),
        ("/v1/generate", JSON),
        ("/v1/chat/completions", JSON),
        ("/v1/images/edits", FORM),
    ):
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            leaving.sendall(f"{head}content-length: 999\r\nexpect: 100-continue\r\n\r\n".encode())
            assert leaving.recv(100).startswith(b"HTTP/1.1 100"), "the body is being read"
            leaving.sendall(b'{"a' if kind == JSON else b"--edge\r\ncontent-dispo")
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.stop() == 0
    log = server.log()
    assert "Traceback" not in log
    assert "ERROR" not in log


def test_a_malformed_form_is_answered_and_not_logged(server: ApiServer) -> None:
    answer = httpx.post(
        f"{server.url}/v1/images/edits", content=b"--edgy\r\n", headers={"content-type": FORM}
    )
    assert answer.status_code == 400
    server.stop()
    assert "multipart" not in server.log()


def test_a_taken_port_is_an_error_exit(server: ApiServer) -> None:
    second = ApiServer(port=server.port)
    try:
        assert second.process.wait(20) != 0
        assert "address already in use" in second.log()
    finally:
        second.kill()


def test_a_wrong_pipeline_file_is_told_at_the_start(broker: object, tmp_path: object) -> None:
    server = ApiServer(env={"OMNIQ_PIPELINES": json.dumps([f"{tmp_path}/missing.yaml"])})
    try:
        assert server.process.wait(20) != 0
        assert "missing.yaml" in server.log()
    finally:
        server.kill()


def test_requests_are_not_logged_unless_asked_for(server: ApiServer) -> None:
    for _ in range(3):
        httpx.get(f"{server.url}/health")
    server.stop()
    assert "GET /health" not in server.log()


@pytest.mark.parametrize("header", ["content-length", "transfer-encoding: chunked"])
def test_curl_gets_the_413_of_a_body_it_has_not_sent_to_the_end(
    broker: object, header: str
) -> None:
    with serving(OMNIQ_MAX_BODY_BYTES="100000") as server:
        sent = subprocess.run(
            ["curl", "-sS", "-X", "POST", "-H", "content-type: application/json", "-H", header,
             "-H", "expect:", "--data-binary", "@-", f"{server.url}/v1/jobs"],
            input=b" " * 30_000_000, capture_output=True, check=False, timeout=20,
        )  # fmt: skip
        assert json.loads(sent.stdout)["code"] == "body_too_large", sent.stderr
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_endless_body_is_cut_off(broker: object) -> None:
    with serving(OMNIQ_MAX_BODY_BYTES="100000") as server, Path("/dev/zero").open("rb") as zeros:
        sent = subprocess.run(
            ["curl", "-sS", "-X", "POST", "-H", "content-type: application/json",
             "-T", "-", f"{server.url}/v1/jobs"],
            stdin=zeros, capture_output=True, check=False, timeout=20,
        )  # fmt: skip
        assert json.loads(sent.stdout)["code"] == "body_too_large", sent.stderr
        assert httpx.get(f"{server.url}/health").status_code == 200


async def test_connections_are_kept_for_further_requests(
    server: ApiServer, http: httpx.AsyncClient
) -> None:
    for _ in range(3):
        response = await http.get("/health")
        assert response.headers.get("connection") != "close"
        assert "server" not in response.headers

"""What the API's tests share: a worker played through the real job store, and a real server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from PIL import Image
from redis.asyncio import Redis
from support import free_port

from omniq.blobs import RedisStore
from omniq.jobs.model import ArtifactInfo, JobRecord, JobState, StageResult, Verdict
from omniq.jobs.store import JobStore

PROMPT = "a red circle above a blue square"
BODY = {"pipeline": "tiny-omni", "input": {"prompt": PROMPT}}


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()


PNG = _png()


async def eventually(
    predicate: Callable[[], Awaitable[Any]], timeout: float = 10.0, what: str = ""
) -> Any:
    """Await ``predicate`` until it is true; the test fails when it does not come true in time."""
    deadline = time.monotonic() + timeout
    while not (value := await predicate()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {what or predicate}"
        await asyncio.sleep(0.01)
    return value


async def begin(store: JobStore, job_id: str, stage: str) -> int:
    """Start a stage's run as a worker would; returns its fence."""
    grant = await store.begin_stage(job_id, stage, "test-worker", redelivered=False)
    assert grant.verdict is Verdict.RUN
    return grant.fence


async def play(store: JobStore, job_id: str, *, steps: int = 3, pause: float = 0.0) -> JobRecord:
    """Do what the workers of tiny-omni do with a job, by the same calls."""
    fence = await begin(store, job_id, "ar")
    await store.delta(job_id, "ar", fence, "text", "A red")
    assert await store.finish_stage(
        job_id, "ar", fence, StageResult(values={"text": "A red circle."})
    )
    fence = await begin(store, job_id, "dit")
    for step in range(1, steps + 1):
        await asyncio.sleep(pause)
        assert await store.progress(job_id, "dit", fence, step, steps)
    assert await store.finish_stage(job_id, "dit", fence, StageResult())
    fence = await begin(store, job_id, "decode")
    key = await store.put_artifact(job_id, "image", fence, PNG)
    info = ArtifactInfo(
        name="image",
        content_type="image/png",
        nbytes=len(PNG),
        key=key,
        meta={"width": 64, "height": 64},
    )
    assert await store.finish_stage(job_id, "decode", fence, StageResult(artifacts={"image": info}))
    return await store.get(job_id)


async def only_job(store: JobStore) -> str:
    """Id of the one job there is, once there is one."""

    async def find() -> str | None:
        jobs, _ = await store.list()
        assert len(jobs) < 2
        return jobs[0].id if jobs else None

    return str(await eventually(find, what="a job"))


async def stored(store: JobStore, job_id: str, name: str = "image") -> dict[str, np.ndarray]:
    """What the stages of a job get as an input."""
    ref = (await store.get(job_id)).spec.files[name]
    blobs = RedisStore.from_settings()
    try:
        return {n: t.numpy() for n, t in blobs.get(ref).items()}
    finally:
        blobs.close()


async def watching_connections(aredis: Redis) -> int:
    """Connections by which servers and clients follow jobs, each for all its watchers."""
    return int((await aredis.info("clients"))["tracking_clients"])


async def state_is(store: JobStore, job_id: str, state: JobState) -> None:
    """Wait until the job is in that state."""

    async def reached() -> bool:
        return (await store.get(job_id)).state is state

    await eventually(reached, what=f"job {state}")


@dataclass
class Problem:
    """A checked problem document."""

    status: int
    code: str
    detail: str
    fields: list[str]
    body: dict[str, Any]


def problem(response: httpx.Response) -> Problem:
    """The response's problem document, checked for what RFC 9457 and omniq promise."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    body = json.loads(response.content)
    assert body["status"] == response.status_code
    assert body["type"] == f"urn:omniq:problem:{body['code']}"
    assert body["title"] and body["detail"] and body["instance"]
    faults = body.get("errors", [])
    assert all(set(f) == {"field", "message"} and f["message"] for f in faults)
    assert "Traceback" not in response.text
    return Problem(body["status"], body["code"], body["detail"], [f["field"] for f in faults], body)


@dataclass
class ApiServer:
    """A replica of the API in a process of its own."""

    env: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"
        code = (
            "import sys; from omniq_api.main import run_api; "
            f"sys.exit(run_api('127.0.0.1', {self.port}))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **self.env},
            stderr=subprocess.PIPE,
        )

    def wait_up(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, "the API has not come up"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Exit status; it must end long before anything that clients wait for."""
        self.process.send_signal(number)
        try:
            return self.process.wait(20)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def log(self) -> str:
        """What it has logged; to be read once it has ended."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()


@contextlib.contextmanager
def serving(**env: str) -> Iterator[ApiServer]:
    """A running replica, killed at the end."""
    server = ApiServer(env=env)
    try:
        server.wait_up()
        yield server
    finally:
        server.kill()
        assert server.process.stderr is not None
        server.process.stderr.close()


@dataclass
class Sse:
    """One parsed server-sent event."""

    id: str
    type: str
    data: dict[str, Any]


def parse_sse(text: str) -> list[Sse]:
    """All complete events of a stream; comments and ``retry`` are skipped."""
    events = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if "event" in fields:
            events.append(Sse(fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return events

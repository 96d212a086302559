"""Files of a request on other hosts: a real server, an allow-list, and what is refused."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load
from test_input_files import PIPELINE, PIXELS, encoded

from omniq.config import PipelineConfig
from omniq.errors import ArtifactNotFound, InputTooLarge, InvalidRequest
from omniq.inputs import InputFile, read_inputs

CHAT = PipelineConfig.model_validate(
    {
        "name": "chat",
        "inputs": {"messages": {"type": "messages"}},
        "stages": [{"stage_id": "ar", "engine_type": "AR", "model": "none"}],
        "edges": [{"from": "input.messages", "to": "ar.messages"}],
        "outputs": {"text": {"from": "ar.text", "type": "text"}},
    }
)


class Handler(BaseHTTPRequestHandler):
    asked: list[tuple[str, dict[str, str]]]
    port: int

    def do_GET(self) -> None:
        self.asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
        answer = getattr(self, "_" + self.path.split("?")[0].strip("/"), None)
        if answer is None:
            self.send_error(404)
        else:
            answer()

    def _send(self, data: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in {"content-length": str(len(data)), **named}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _picture(self) -> None:
        self._send(encoded())

    def _redirect(self) -> None:
        self._send(b"", 302, location="/picture", set_cookie="a=b")

    def _loop(self) -> None:
        self._send(b"", 302, location="/loop")

    def _away(self) -> None:
        self._send(b"", 307, location=f"http://127.0.0.2:{self.port}/picture")

    def _metadata(self) -> None:
        self._send(b"", 302, location="http://169.254.169.254/latest/meta-data")

    def _file(self) -> None:
        self._send(b"", 302, location="file:///etc/passwd")

    def _nowhere(self) -> None:
        self._send(b"", 302, location="http://[")

    def _liar(self) -> None:
        self._send(b"x" * 10, content_length="99999999999")

    def _endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(200):
            self.wfile.write(b"x" * 1000)

    def _gzip(self) -> None:
        self._send(b"x", content_encoding="gzip")

    def _late(self) -> None:
        time.sleep(0.4)
        self._send(encoded())

    def _slow(self) -> None:
        self.send_response(200)
        self.end_headers()
        for _ in range(100):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.05)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.asked, Handler.port = [], server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{Handler.port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def allowed(setting: Any) -> None:
    setting(remote_media=json.dumps(["127.0.0.1"]))


async def fetch(job: str, artifact: str) -> bytes:
    raise ArtifactNotFound(f"{job} {artifact}")


async def read(url: Any) -> Any:
    made = (await read_inputs(PIPELINE, {"image": url}, fetch))["image"]
    assert isinstance(made, InputFile)
    return load(made.data)["0000"]


async def test_by_default_nothing_is_fetched(host: str) -> None:
    before = len(Handler.asked)
    with pytest.raises(InvalidRequest, match="nothing is fetched from a network here"):
        await read(f"{host}/picture")
    messages = turn(f"{host}/picture")
    assert (await read_inputs(CHAT, {"messages": messages}, fetch))["messages"] == messages
    assert len(Handler.asked) == before


@pytest.mark.parametrize("path", ["picture", "redirect"])
async def test_a_file_of_an_allowed_host(host: str, allowed: None, path: str) -> None:
    assert np.array_equal(await read(f"{host}/{path}"), PIXELS)
    _, headers = Handler.asked[-1]
    assert headers["accept-encoding"] == "identity"
    assert "cookie" not in headers and "authorization" not in headers


REFUSED = [
    ("{host}/none", "its host answers with status 404"),
    ("{host}/loop", "redirects more than 3 times"),
    ("{host}/nowhere", "redirects to what is no URL"),
    ("{host}/away", "host '127.0.0.2' is not allowed"),
    ("{host}/metadata", "host '169.254.169.254' is not allowed"),
    ("{host}/file", "scheme https or http"),
    ("{host}/gzip", "compressed body"),
    ("http://127.0.0.1:1/x", r"cannot be fetched \(ConnectError\)"),
    ("http://user:secret@127.0.0.1/x", "must not hold a user name"),
    ("http://example.com/x", r"host 'example\.com' is not (allowed|known)"),
    ("ftp://127.0.0.1/x", "nothing is fetched"),
    ("file:///etc/passwd", "nothing is fetched"),
    ("HTTP://127.0.0.1/\r\nx", "must be an ASCII URL"),
]


@pytest.mark.parametrize(("url", "message"), REFUSED)
async def test_what_is_not_fetched(host: str, allowed: None, url: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        await read(url.format(host=host))
    assert [f["field"] for f in caught.value.fields] == ["input.image"]
    assert "secret" not in caught.value.message


async def test_any_public_host_is_not_this_one(host: str, setting: Any) -> None:
    setting(remote_media=json.dumps(["*"]))
    before = len(Handler.asked)
    for url in (f"{host}/picture", host.replace("127.0.0.1", "localhost") + "/picture"):
        with pytest.raises(InvalidRequest, match="leads to an address that is not public"):
            await read(url)
    assert len(Handler.asked) == before


@pytest.mark.parametrize("path", ["liar", "endless"])
async def test_too_many_bytes_are_not_read(
    host: str, allowed: None, setting: Any, path: str
) -> None:
    setting(max_input_bytes=50_000)
    with pytest.raises(InputTooLarge, match="must have at most 50000 bytes"):
        await read(f"{host}/{path}")


async def test_a_slow_host_is_left(host: str, allowed: None, setting: Any) -> None:
    """Though each piece of its answer is in time."""
    setting(remote_timeout=0.4)
    with pytest.raises(InvalidRequest, match=r"did not arrive within 0\.4 s"):
        await read(f"{host}/slow")


def turn(*urls: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": u, "detail": "low"}} for u in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}]


async def test_files_in_messages_become_data_urls(host: str, allowed: None) -> None:
    messages = turn(f"{host}/picture", "data:image/png;base64,AAAA")
    made = (await read_inputs(CHAT, {"messages": messages}, fetch))["messages"]
    text, first, second = made[0]["content"]
    assert text == {"type": "text", "text": "look"}
    assert first["image_url"]["detail"] == "low"
    assert base64.b64decode(first["image_url"]["url"].partition(",")[2]) == encoded()
    assert second == messages[0]["content"][2]
    with pytest.raises(InvalidRequest, match=r"input\.messages: host '10\.0\.0\.1' is not allowed"):
        await read_inputs(CHAT, {"messages": turn("http://10.0.0.1/x")}, fetch)


async def test_results_of_other_jobs_in_messages_become_data_urls() -> None:
    """Without any host that may be asked."""
    asked = []

    async def stored(job: str, name: str) -> bytes:
        asked.append((job, name))
        if job == "gone":
            raise ArtifactNotFound("no artifact 'image' of job 'gone'")
        return encoded()

    messages = turn("/v1/jobs/a1/artifacts/image", "https://example.com/x.png", "data:,")
    made = (await read_inputs(CHAT, {"messages": messages}, stored))["messages"]
    _, first, *others = made[0]["content"]
    assert asked == [("a1", "image")]
    assert base64.b64decode(first["image_url"]["url"].partition(",")[2]) == encoded()
    assert others == messages[0]["content"][2:], "left to the stage, which refuses the URL"
    with pytest.raises(InvalidRequest, match=r"input\.messages: no artifact 'image' of job 'gone'"):
        gone = {"messages": turn("/v1/jobs/gone/artifacts/image")}
        await read_inputs(CHAT, gone, stored)


async def test_files_of_a_conversation_are_bounded_together(
    host: str, allowed: None, setting: Any
) -> None:
    with pytest.raises(InvalidRequest, match="at most 16 files that lie elsewhere, names 17"):
        await read_inputs(CHAT, {"messages": turn(*[f"{host}/picture"] * 17)}, fetch)
    setting(remote_timeout=1.0)
    with pytest.raises(InvalidRequest, match=r"did not arrive within 1 s"):
        await read_inputs(CHAT, {"messages": turn(*[f"{host}/late"] * 4)}, fetch)
    setting(max_input_bytes=len(encoded()) * 2 - 1)
    with pytest.raises(InputTooLarge, match="bytes together"):
        await read_inputs(CHAT, {"messages": turn(*[f"{host}/picture"] * 2)}, fetch)

"""Random bad inputs for what strangers reach: bytes, texts, requests. All from one seed.

Requests that are valid HTTP and JSON and at odds with the schema are schemathesis' business
(``schema_fuzz.py``). Those here are spoilt as bytes: JSON and forms cut short, with flipped bits,
doubled parts, NaN or lone surrogates, paths and headers that no schema has.
"""

from __future__ import annotations

import json
import random
from typing import Any
from urllib.parse import quote

#: Numbers at which something changes, as texts and as bytes.
EDGES = (0, 1, -1, 2**7, 2**8, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64)
TEXTS = (
    "", " ", "\0", "../../etc/passwd", "..\\..", "%2e%2e%2f", "a" * 5000, "é赤🙂", "\ud800", "NaN",
    "null", "-0", "1e999", "{{7*7}}", "${x}", "'; DROP TABLE jobs;--", "\r\nset-cookie: a=b",
    "data:,", "data:image/png;base64,AAAA", "data:;base64,!!", "http://169.254.169.254/",
    "file:///etc/passwd", "/v1/jobs/x/artifacts/y", "0-0", "9" * 40, "tiny-omni", "image", "*",
    "<script>", "\u202e", "true", "[]", "omniq:job:x", "01970000-0000-7000-8000-000000000000",
)  # fmt: skip


def text(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return rng.choice(TEXTS)
    return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0xD800)))) for _ in range(9))


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Cut, flipped, doubled, filled with edges; sometimes something else altogether."""
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(200))
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not made:
            return b""
        # Heads decide most: half of all changes are among the first bytes.
        at = rng.randrange(len(made) if rng.random() < 0.5 else min(len(made), 256))
        match rng.randrange(6):
            case 0:
                made[at] ^= 1 << rng.randrange(8)
            case 1:
                made[at] = rng.choice((0, 0x7F, 0x80, 0xFF))
            case 2:
                del made[at : at + rng.choice((1, 4, 64, len(made)))]
            case 3:
                made[at:at] = made[at : at + rng.choice((1, 8, 100))]
            case 4:
                number = rng.choice(EDGES) % 2**64
                width = rng.choice((2, 4, 8))
                order = rng.choice(("little", "big"))
                made[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, order)
            case 5:
                other = rng.randrange(len(made))
                made[at : at + 16] = made[other : other + 16]
    return bytes(made)


def value(rng: random.Random, depth: int = 3) -> Any:
    """Any JSON value, and what JSON has not."""
    kind = rng.randrange(9 if depth else 7)
    if kind == 0:
        return rng.choice(EDGES) * rng.choice((1, -1, 10**20))
    if kind == 1:
        return rng.choice((0.5, -1e308, 1e-320, float("nan"), float("inf"), -0.0))
    if kind < 5:
        return text(rng)
    if kind < 7:
        return rng.choice((None, True, False, [], {}))
    if kind == 7:
        return [value(rng, depth - 1) for _ in range(rng.choice((1, 2, 40)))]
    return {text(rng)[:40]: value(rng, depth - 1) for _ in range(rng.choice((1, 3)))}


#: Right requests, to be spoilt: method, path, content type, body.
BOUNDARY = "edge"
JSON, FORM = "application/json", f"multipart/form-data; boundary={BOUNDARY}"


def _form(*parts: tuple[str, bytes]) -> bytes:
    head = "--{}\r\ncontent-disposition: form-data; name={}\r\n\r\n"
    found = [head.format(BOUNDARY, n).encode() + data + b"\r\n" for n, data in parts]
    return b"".join(found) + f"--{BOUNDARY}--\r\n".encode()


_JOB = {"pipeline": "talk", "input": {"prompt": "a"}, "parameters": {"seed": 1}, "priority": 3}
_SAID = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
_PAINT = {"model": "paint", "prompt": "a"}
REQUESTS = [
    ("POST", "/v1/jobs?wait=1", JSON, _JOB),
    ("POST", "/v1/jobs", FORM, _form(("request", json.dumps(_JOB).encode()), ("image", b"x"))),
    ("POST", "/v1/generate?wait=5", JSON, _JOB),
    ("POST", "/v1/chat/completions", JSON, {"model": "talk", "messages": _SAID, "stream": True}),
    ("POST", "/v1/completions", JSON, {"model": "talk", "prompt": ["a", [1, 2]], "max_tokens": 2}),
    ("POST", "/v1/embeddings", JSON, {"model": "embed", "input": "a", "dimensions": 2}),
    ("POST", "/v1/audio/speech", JSON, {"model": "speak", "input": "a", "voice": "b"}),
    ("POST", "/v1/images/generations", JSON, {**_PAINT, "size": "64x64", "n": 2}),
    (
        "POST",
        "/v1/images/edits",
        FORM,
        _form(("model", b"paint"), ("prompt", b"a"), ('image; filename="a"', b"x")),
    ),
    ("GET", "/v1/jobs?limit=2&state=queued&cursor=1.5~a", "", b""),
    ("GET", "/v1/jobs/01970000000070008000/events", "", b""),
    ("GET", "/v1/jobs/01970000000070008000/artifacts/image", "", b""),
    ("GET", "/v1/models/talk", "", b""),
    ("GET", "/v1/pipelines/talk", "", b""),
    ("POST", "/v1/dlq/message.0/retry", "", b""),
]  # fmt: skip
HEADERS = (
    "accept", "last-event-id", "idempotency-key", "if-none-match", "content-type", "range",
    "content-encoding", "x-forwarded-prefix", "expect",
)  # fmt: skip


def request(rng: random.Random) -> dict[str, Any]:
    """One request for httpx (method, url, headers, content), its bytes spoilt."""
    method, url, kind, right = rng.choice(REQUESTS)
    body = right if isinstance(right, bytes) else json.dumps(right).encode()
    headers = {"content-type": kind} if kind else {}
    chosen = rng.random()
    if body and chosen < 0.6:
        body = mutated(rng, body)
    elif isinstance(right, dict) and chosen < 0.8:
        spoilt = {**right, rng.choice(list(right)): value(rng)}
        body = json.dumps(spoilt).encode()  # NaN and lone surrogates, too
    elif chosen < 0.9:
        name = rng.choice(HEADERS)
        headers[name] = "".join(c for c in text(rng) if " " <= c < "\x7f")[:2000]
    else:
        data = mutated(rng, url.encode())
        url = "/" + quote(data, safe="/?=&%~" if rng.random() < 0.8 else "")
    return {"method": method, "url": url, "headers": headers, "content": body}

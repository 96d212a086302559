"""Random bad inputs for what strangers reach: bytes, texts, requests. All from one seed."""

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


class Schemas:
    """Values for the schemas of an OpenAPI document: near to right ones, with faults."""

    def __init__(self, document: dict[str, Any], rng: random.Random, wrong: float = 0.08) -> None:
        self.document, self.rng, self.wrong = document, rng, wrong

    def of(self, schema: Any, depth: int = 0) -> Any:
        """A value that fits but for faults, each part with probability ``wrong``."""
        rng = self.rng
        if not isinstance(schema, dict) or rng.random() < self.wrong or depth > 8:
            return value(rng)
        if "$ref" in schema:
            return self.of(self._named(schema["$ref"]), depth + 1)
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self.of(rng.choice(schema[several]), depth + 1)
        fixed = [schema["const"]] if "const" in schema else schema.get("enum")
        if not fixed and rng.random() < 0.4:
            fixed = schema.get("examples")
        return rng.choice(fixed) if fixed else self._plain(schema, depth)

    def _plain(self, schema: dict[str, Any], depth: int) -> Any:
        rng, kind = self.rng, schema.get("type")
        if kind == "object" or "properties" in schema:
            required = set(schema.get("required", ()))
            made = {
                name: self.of(inner, depth + 1)
                for name, inner in schema.get("properties", {}).items()
                if name in required or rng.random() < 0.4
            }
            if rng.random() < 0.15:
                made[text(rng)[:40]] = value(rng)
            inner = schema.get("additionalProperties")
            if isinstance(inner, dict) and rng.random() < 0.5:
                made[rng.choice(("seed", "width", "a", text(rng)[:40]))] = self.of(inner, depth + 1)
            return made
        if kind == "array":
            count = rng.choice((0, 1, 1, 2, 20))
            return [self.of(schema.get("items", {}), depth + 1) for _ in range(count)]
        if kind in ("integer", "number"):
            low, high = schema.get("minimum", 0), schema.get("maximum", 100)
            number = rng.choice((low, high, rng.randint(int(low), max(int(low), int(high)))))
            return number + rng.choice((0, 0, 0, 1, -1, 0.5))
        if kind == "boolean":
            return rng.random() < 0.5
        return text(rng) if kind == "string" else value(rng)

    def _named(self, ref: str) -> Any:
        found: Any = self.document
        for part in ref.removeprefix("#/").split("/"):
            found = found[part]
        return found

    def request(self) -> dict[str, Any]:
        """One request for httpx: method, url, headers, content."""
        rng = self.rng
        path = rng.choice(list(self.document["paths"]))
        methods = self.document["paths"][path]
        method = rng.choice(list(methods)) if rng.random() < 0.95 else "patch"
        operation = methods.get(method, {})
        url, query, headers = path, [], {}
        for each in operation.get("parameters", ()):
            given = str(self.of(each.get("schema", {})))
            name = each["name"]
            if each["in"] == "path":
                url = url.replace(
                    "{" + name + "}", quote(_encodable(given), safe="/" * rng.randrange(2))
                )
            elif rng.random() < 0.6 and each["in"] == "query":
                query.append(f"{name}={quote(_encodable(given))}")
            elif rng.random() < 0.6 and each["in"] == "header":
                headers[name] = _header(given)
        body, kind = self._body(operation)
        if kind:
            headers["content-type"] = kind
        if rng.random() < 0.1:
            name = rng.choice(("accept", "last-event-id", "idempotency-key", "if-none-match"))
            headers[name] = _header(text(rng))
        for left in ("{name}", "{job_id}", "{path}"):
            url = url.replace(left, "x")
        return {
            "method": method.upper(),
            "url": url + ("?" + "&".join(query) if query else ""),
            "headers": headers,
            "content": body,
        }

    def _body(self, operation: dict[str, Any]) -> tuple[bytes, str]:
        rng = self.rng
        kinds = operation.get("requestBody", {}).get("content", {})
        if not kinds:
            return b"", ""
        kind = rng.choice(list(kinds))
        made = self.of(kinds[kind].get("schema", {}))
        if kind.startswith("multipart/"):
            return self._form(made)
        data = json.dumps(made).encode()
        if rng.random() < 0.15:
            data = mutated(rng, data)
        if rng.random() < 0.03:
            kind = rng.choice(("text/plain", "application/json; charset=utf-7", "x", ""))
        return data, kind

    def _form(self, made: Any) -> tuple[bytes, str]:
        rng, edge = self.rng, b"edge"
        parts = b""
        for name, item in made.items() if isinstance(made, dict) else ():
            data = (
                item.encode("utf-8", "replace")
                if isinstance(item, str)
                else json.dumps(item).encode()
            )
            shown = json.dumps(name[:40])
            file = f"; filename={json.dumps(text(rng)[:40])}" if rng.random() < 0.4 else ""
            head = f"content-disposition: form-data; name={shown}{file}\r\n\r\n"
            parts += b"--" + edge + b"\r\n" + head.encode("utf-8", "replace") + data + b"\r\n"
        body = parts + b"--" + edge + b"--\r\n"
        if rng.random() < 0.2:
            body = mutated(rng, body)
        return body, "multipart/form-data; boundary=edge"


def _encodable(given: str) -> str:
    return given.encode("utf-8", "replace").decode()


def _header(given: str) -> str:
    """As far as a client can send it."""
    return "".join(c for c in given if " " <= c < "\x7f")[:2000]

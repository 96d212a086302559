"""Messages as they lie in Redis, decoded fast."""

from __future__ import annotations

import json
from binascii import a2b_base64
from typing import Any

import orjson
from kombu.transport import virtual
from kombu.utils import json as kombu_json

#: Content types of messages that are worked on ahead; all that the application accepts.
ACCEPT = frozenset({"application/json"})
#: What kombu's JSON has that JSON has not.
TYPED = b'"__type__"'


class Message(virtual.Message):
    """A message that is made, and whose JSON is decoded, fast."""

    def __init__(self, payload: dict[str, Any], channel: Any = None, **kwargs: Any) -> None:
        headers, properties = payload.get("headers"), payload["properties"]
        if (
            not headers
            or headers.get("compression")
            or properties.get("body_encoding") != "base64"
            or kwargs.keys() != {"accept"}
        ):
            super().__init__(payload, channel, **kwargs)
            return
        # What kombu's own does for such a message.
        self._raw, self.channel, self.accept = payload, channel, kwargs["accept"]
        self.headers, self.properties = headers, properties
        self.delivery_tag = properties["delivery_tag"]
        self.delivery_info = properties.get("delivery_info") or {}
        self.content_type = payload.get("content-type")
        self.content_encoding = payload.get("content-encoding")
        self.body = a2b_base64(payload.get("body") or b"")
        self.errors: list[Any] = []
        self._decoded_cache, self._state = None, "RECEIVED"

    def _decode(self) -> Any:
        body = self.body
        if (
            self.content_type == "application/json"
            and self.content_type in (self.accept or ())
            and isinstance(body, bytes)
            and TYPED not in body
        ):
            return orjson.loads(body)
        return super()._decode()


def loads(item: bytes) -> dict[str, Any]:
    """What lies in a queue's list, and is known to be a message of kombu's.

    Raises:
        ValueError: it is not JSON by the book.
    """
    loaded: dict[str, Any] = (
        kombu_json.loads(item.decode()) if TYPED in item else orjson.loads(item)
    )
    return loaded


def loads_leniently(item: bytes) -> dict[str, Any]:
    """As :func:`loads`, of whatever the server's scripts have taken for JSON."""
    try:
        return loads(item)
    except ValueError:
        loaded: dict[str, Any] = json.loads(item.decode(errors="replace"))
        return loaded

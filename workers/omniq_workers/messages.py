"""Messages as they lie in Redis, decoded fast."""

from __future__ import annotations

import json
from typing import Any

import orjson
from kombu.transport import virtual
from kombu.utils import json as kombu_json

#: Content types of messages that are worked on ahead; all that the application accepts.
ACCEPT = frozenset({"application/json"})
#: What kombu's JSON has that JSON has not.
TYPED = b'"__type__"'


class Message(virtual.Message):
    """A message whose JSON is decoded fast."""

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

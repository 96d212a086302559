"""Messages made in one step against kombu's own."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import orjson
import pytest
from kombu import Connection
from kombu.transport import virtual
from omniq_workers.messages import ACCEPT, Message

BODY = orjson.dumps([[], {"job": "j", "stage": "s"}, {"chain": None}])


def raw(body: bytes | str, encoding: str | None = "base64", **headers: Any) -> dict[str, Any]:
    return {
        "body": body if isinstance(body, str) else base64.b64encode(body).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers,
        "properties": {
            "correlation_id": "id",
            "delivery_info": {"exchange": "", "routing_key": "q"},
            "body_encoding": encoding,
            "delivery_tag": "tag",
        },
    }


@pytest.mark.parametrize(
    "payload",
    [
        raw(BODY, task="omniq.stage", id="id"),
        raw(BODY),
        raw(BODY.decode(), None, task="omniq.stage"),
        raw(zlib.compress(BODY), task="omniq.stage", compression="application/x-gzip"),
        raw("", task="omniq.stage"),
    ],
    ids=["plain", "no headers", "not encoded", "compressed", "no body"],
)
@pytest.mark.parametrize("options", [{"accept": ACCEPT}, {}], ids=["accept", "no options"])
def test_a_message_is_what_kombu_makes_of_it(
    payload: dict[str, Any], options: dict[str, Any]
) -> None:
    with Connection("memory://") as connection:
        channel = connection.channel()
        ours = Message(payload, channel, **options)
        kombus = virtual.Message(payload, channel, **options)
        for name in (*virtual.Message.__mro__[1].__slots__[:-1], "_raw", "errors", "acknowledged"):
            assert getattr(ours, name) == getattr(kombus, name), name
        if payload["body"]:
            assert ours.payload == kombus.payload == orjson.loads(BODY)

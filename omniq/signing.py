"""Signed task messages: who may write to the queues, and has no key, cannot start work.

With ``OMNIQ_MESSAGE_KEYS`` every task message carries an HMAC-SHA256 of what steers the work: the
task's name and id, its arguments with all that follows it, and the headers in :data:`SIGNED`. What
a broker changes when it delivers a message again (its tag, that it is redelivered) is not signed.
Two places make messages, and both sign: :func:`omniq.publish.post`, and Celery's own publishers
by :class:`SignedAMQP`. Whoever puts a message somewhere else (a redelivery, a job that is held
back) puts it there as it is.

Celery's ``auth`` serializer signs the body alone: a genuine body passes under the name of another
task. It also wants a certificate for every process, and packs the body so that neither Lua nor the
reconciler could read it.
"""

from __future__ import annotations

import hmac
from binascii import a2b_base64
from collections.abc import Mapping
from typing import Any

import orjson
from celery.app.amqp import AMQP
from kombu.serialization import dumps

from omniq.errors import OmniqError
from omniq.settings import get_settings

#: The header with the signature, in hex.
HEADER = "omniq_signature"
#: Headers that are signed, in the order in which they are.
SIGNED = (
    "task", "id", "root_id", "parent_id", "group", "retries", "eta", "expires", "timelimit",
    "ignore_result", "replaced_task_nesting",
)  # fmt: skip


class BadSignature(OmniqError):
    """A message that was not signed by one of the keys, or was changed since."""

    code = "bad_signature"


def sign(headers: dict[str, Any], body: bytes) -> None:
    """Add the signature to a message's headers, if there are keys.

    Args:
        body: as it is encoded, before base64.
    """
    if keys := get_settings().message_keys:
        headers[HEADER] = _digest(keys[0], headers, body)


def check(message: Mapping[str, Any]) -> None:
    """Look at a message's signature, if there are keys.

    Args:
        message: as it lies in a queue.

    Raises:
        BadSignature: it has none that any of the keys gives.
    """
    keys = get_settings().message_keys
    if not keys:
        return
    try:
        headers, body = message["headers"], message["body"].encode()
        if message["properties"].get("body_encoding") == "base64":
            body = a2b_base64(body)
        given = headers.get(HEADER)
        digests = [_digest(key, headers, body) for key in keys]
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        raise BadSignature(f"it is no message: {exc!r}") from exc
    if not isinstance(given, str) or not given.isascii():
        raise BadSignature("it is not signed")
    if not any(hmac.compare_digest(given, digest) for digest in digests):
        raise BadSignature("it was signed with another key, or changed since")


def _digest(key: str, headers: Mapping[str, Any], body: bytes) -> str:
    signed = orjson.dumps([headers.get(name) for name in SIGNED], option=orjson.OPT_SORT_KEYS)
    return hmac.digest(key.encode(), b"%d:%b%b" % (len(signed), signed, body), "sha256").hex()


class SignedAMQP(AMQP):
    """Celery's publisher of task messages, which signs them if there are keys."""

    def _create_task_sender(self) -> Any:
        send = super()._create_task_sender()

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            if get_settings().message_keys:
                # A retry repeats the headers of the message that it retries, its signature too.
                own = options.get("headers") or {}
                headers = {**message.headers, **own}
                serializer = options.get("serializer") or self.app.conf.task_serializer
                sign(headers, dumps(message.body, serializer)[2].encode())
                options["headers"] = {**own, HEADER: headers[HEADER]}
            return send(producer, name, message, **options)

        return send_task_message

"""What a signature of a task message covers, and who makes one."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import kombu.pools
import pytest
import redis

from omniq import chain, keys, signing
from omniq.celery import app, queue_keys
from omniq.cli.config import settings_table
from omniq.config import get_pipeline
from omniq.jobs.model import JobSpec, new_job_id
from omniq.settings import Settings
from omniq.tasks import cancel_job

OLD, NEW = "an old secret, long enough", "a new secret, long enough"
Message = dict[str, Any]


@pytest.fixture(autouse=True)
def no_connection_left() -> Iterator[None]:
    """Other tests count connections."""
    yield
    kombu.pools.reset()


@pytest.fixture
def signed_by(setting: Any, broker: object) -> Callable[..., None]:
    """Sets the keys."""

    def change(*secrets: str) -> None:
        setting("message_keys", json.dumps(secrets))
        app.follow_settings()

    return change


def by_hand() -> Message:
    pipeline, now = get_pipeline("tiny-omni"), time.time()
    spec = JobSpec(
        id=new_job_id(now), pipeline="tiny-omni", inputs={"prompt": "x"}, parameters={},
        stages=pipeline.topological_order(), created=now,
    )  # fmt: skip
    message: Message = json.loads(chain.first_posts(spec, pipeline)[0].message)
    return message


def by_celery(client: redis.Redis, **options: Any) -> Message:
    cancel_job.apply_async(kwargs={"job": "x"}, **options)
    message: Message = json.loads(client.lpop(queue_keys(keys.control_queue())[0]))  # type: ignore[arg-type]
    return message


def body_of(message: Message, change: Callable[[Any], None]) -> None:
    body = json.loads(base64.b64decode(message["body"]))
    change(body)
    message["body"] = base64.b64encode(json.dumps(body).encode()).decode()


FORGED: dict[str, Callable[[Message], object]] = {
    "task": lambda m: m["headers"].update(task="omniq.submit"),
    "id": lambda m: m["headers"].update(id="other"),
    "root": lambda m: m["headers"].update(root_id="other"),
    "retries": lambda m: m["headers"].update(retries=1),
    "eta": lambda m: m["headers"].update(eta="2099-01-01T00:00:00+00:00"),
    "expires": lambda m: m["headers"].update(expires="2099-01-01T00:00:00+00:00"),
    "time limit": lambda m: m["headers"].update(timelimit=[1, 1]),
    "arguments": lambda m: body_of(m, lambda b: b[1].update(job="other")),
    "what follows": lambda m: body_of(m, lambda b: b[2].update(chain=[])),
    "encoding": lambda m: m["properties"].update(body_encoding="none"),
    "no signature": lambda m: m["headers"].pop(signing.HEADER),
    "no text": lambda m: m["headers"].update({signing.HEADER: 1}),
    "not ASCII": lambda m: m["headers"].update({signing.HEADER: "é" * 64}),
    "no headers": lambda m: m.pop("headers"),
    "headers of another kind": lambda m: m.update(headers=[]),
    "no body": lambda m: m.update(body=None),
    "a number too large": lambda m: m["headers"].update(retries=1 << 70),
}


@pytest.mark.parametrize("change", FORGED)
def test_what_was_changed_is_refused(signed_by: Callable[..., None], change: str) -> None:
    signed_by(NEW)
    message = by_hand()
    signing.check(message)
    FORGED[change](message)
    with pytest.raises(signing.BadSignature):
        signing.check(message)


def test_what_a_redelivery_changes_is_not_signed(signed_by: Callable[..., None]) -> None:
    signed_by(NEW)
    message = by_hand()
    message["headers"]["redelivered"] = True
    message["properties"]["delivery_tag"] = "other"
    message["properties"]["delivery_info"]["redelivered"] = True
    signing.check(message)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"countdown": 60}, {"expires": 60}, {"time_limit": 9, "soft_time_limit": 8},
        {"headers": {signing.HEADER: "of the message that is retried", "more": 1}},
        {"link": cancel_job.s(job="é")}, {"serializer": "json"},
    ],
)  # fmt: skip
def test_celery_publishers_sign_too(
    signed_by: Callable[..., None], redis_client: redis.Redis, options: dict[str, Any]
) -> None:
    signed_by(NEW)
    signing.check(by_celery(redis_client, **options))


def test_keys_are_rotated(signed_by: Callable[..., None], redis_client: redis.Redis) -> None:
    """The new one is added for all first, then it is put first, then the old one goes."""
    signed_by(OLD)
    before = by_hand()
    signed_by(OLD, NEW)
    signing.check(before)
    signed_by(NEW, OLD)
    signing.check(before)
    after = by_celery(redis_client)
    signed_by(NEW)
    signing.check(after)
    with pytest.raises(signing.BadSignature, match="another key"):
        signing.check(before)


def test_without_keys_nothing_is_signed_or_looked_at(
    signed_by: Callable[..., None], redis_client: redis.Redis
) -> None:
    for message in (by_hand(), by_celery(redis_client)):
        assert signing.HEADER not in message["headers"]
        signing.check({})


def test_keys_have_a_length_and_are_not_shown(signed_by: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match="at least 16 characters"):
        Settings(message_keys=["short"])
    signed_by(NEW)
    shown = {row["name"]: row["value"] for row in settings_table()}
    assert shown["OMNIQ_MESSAGE_KEYS"] == ["***"]

"""Stage tasks as Celery and kombu put them into Redis, made by hand.

``apply_async`` spends ten times as long on what a stage task does not need (a repr of its
arguments, a client object, a subscription to its result, a declaration of its queue), and it needs
a thread and a round trip of its own. A message made here says what Celery's own would say; it goes
out inside the script that records why it is sent, so that nothing is recorded and not queued, or
the other way round.

A *signature* is a Celery signature in its serialised form, a plain dictionary.
"""

from __future__ import annotations

import os
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any
from uuid import uuid4

import orjson
from celery.utils.nodenames import anon_nodename
from celery.utils.time import utcoffset
from redis import ConnectionPool

from omniq import keys
from omniq.celery import app, queue_key
from omniq.settings import get_settings
from omniq.signing import sign

#: Name of the task that runs one stage of one job.
STAGE = "omniq.stage"

Signature = Mapping[str, Any]

#: Options of a signature that a hand-made message carries; one with any other is left to Celery.
OPTIONS = frozenset(
    {"task_id", "queue", "priority", "shadow", "argsrepr", "kwargsrepr", "reply_to"}
    | {"link", "link_error"}
)
NEEDED = frozenset({"task_id", "queue"})


@dataclass(frozen=True, slots=True)
class Post:
    """One message for one queue."""

    stage: str
    """Which stage's task it is."""
    queue: str
    """Redis list it is pushed to."""
    message: bytes
    """As kombu reads it."""
    event: bytes
    """Celery's ``task-sent`` event, as kombu reads it."""
    tag: str
    """The message's delivery tag."""
    name: str
    """Of the queue, without its priority."""

    @property
    def arguments(self) -> tuple[str | bytes, ...]:
        """As ``_run.lua`` reads it; besides, the script gets :attr:`queue` as a key."""
        return self.stage, self.message, self.event, self.tag, self.name


@dataclass(frozen=True, slots=True)
class Parent:
    """The task that sends another one: what of its request the new message repeats."""

    id: str
    root: str
    priority: int | None


@dataclass(frozen=True, slots=True)
class Continuation:
    """What follows a stage's task."""

    posts: list[Post]
    """Messages to stages of the same job."""
    callbacks: list[Signature]
    chain: list[Signature]
    """What else there is, for Celery to send: other people's tasks behind a stage."""

    @property
    def rest(self) -> dict[str, list[Signature]]:
        """What Celery has to send, by its names."""
        return {"callbacks": self.callbacks, "chain": self.chain}


def post(
    signature: Signature,
    *,
    chain: Sequence[Signature] | None = None,
    result: Any = None,
    parent: Parent | None = None,
) -> Post:
    """The message that ``apply_async`` of this signature of a stage's task would send.

    Args:
        chain: what comes behind, last one first.
        result: of the parent; the task's first argument.
    """
    options = signature["options"]
    task_id, queue = options["task_id"], options["queue"]
    args, kwargs = [*signature["args"]], signature["kwargs"]
    priority = options.get("priority")
    root = parent_id = None
    if parent is not None:
        args.insert(0, result)
        root, parent_id = parent.root, parent.id
        if parent.priority is not None:
            priority = parent.priority
    root = root or task_id
    argsrepr, kwargsrepr = options.get("argsrepr", ""), options.get("kwargsrepr", "")
    body = orjson.dumps(
        (
            args,
            kwargs,
            {
                "callbacks": options.get("link"),
                "errbacks": options.get("link_error"),
                "chain": chain,
                "chord": None,
            },
        )
    )
    pid = os.getpid()
    tag = next(_tags(pid))
    headers = {
        "lang": "py",
        "task": STAGE,
        "id": task_id,
        "shadow": options.get("shadow"),
        "eta": None,
        "expires": None,
        "group": None,
        "group_index": None,
        "retries": 0,
        "timelimit": (None, None),
        "root_id": root,
        "parent_id": parent_id,
        "argsrepr": argsrepr,
        "kwargsrepr": kwargsrepr,
        "origin": _origin(pid),
        "ignore_result": True,
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
    }
    sign(headers, body)
    message = {
        "body": b64encode(body).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers,
        "properties": {
            "correlation_id": task_id,
            "reply_to": options.get("reply_to") or "",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": priority or 0,
            "body_encoding": "base64",
            "delivery_tag": tag,
        },
    }
    sent = {
        "uuid": task_id,
        "root_id": root,
        "parent_id": parent_id,
        "name": STAGE,
        "args": argsrepr,
        "kwargs": kwargsrepr,
        "retries": 0,
        "eta": None,
        "expires": None,
        "queue": queue,
        "exchange": "",
        "routing_key": queue,
    }
    return Post(
        stage=kwargs["stage"],
        queue=queue_key(queue, priority or 0),
        message=orjson.dumps(message),
        event=_event(sent, pid),
        tag=tag,
        name=queue,
    )


def continuation(
    embed: Mapping[str, Any], job: str, *, result: Any, parent: Parent
) -> Continuation:
    """What follows the task whose message has this ``embed`` (its callbacks and its chain).

    Args:
        job: messages are made by hand for stages of this job only.
        result: what the task returns; the first argument of what follows.
    """
    posts: list[Post] = []
    callbacks: list[Signature] = []
    for signature in embed.get("callbacks") or ():
        if _by_hand(signature, job):
            posts.append(post(signature, result=result, parent=parent))
        else:
            callbacks.append(signature)
    chain = list(embed.get("chain") or ())
    if chain and _by_hand(chain[-1], job):
        posts.append(post(chain[-1], chain=chain[:-1], result=result, parent=parent))
        chain = []
    return Continuation(posts, callbacks, chain)


def posted(posts: Sequence[Post]) -> list[Any]:
    """Arguments of a script that sends ``posts``; their queues are its last keys."""
    if not posts:
        return [0, ""]
    return [len(posts), event_channel(), *(x for p in posts for x in p.arguments)]


def event_channel() -> str:
    """Where Celery's events are published: kombu's name of the fan-out exchange's topic."""
    return f"/{_database(get_settings().redis_url)}.{keys.event_exchange()}/task.sent"


def _by_hand(signature: Signature, job: str) -> bool:
    """Whether it is the plain signature of a stage of this job."""
    return (
        signature["task"] == STAGE
        and not signature.get("subtask_type")
        and not signature.get("immutable")
        and signature["kwargs"].get("job") == job
        and "stage" in signature["kwargs"]
        and OPTIONS.issuperset(signature["options"])
        and NEEDED.issubset(signature["options"])
    )


def _event(fields: dict[str, Any], pid: int) -> bytes:
    if not app.announces:
        return b""
    hostname = _origin(pid)
    event = {
        "type": "task-sent",
        "hostname": hostname,
        "utcoffset": utcoffset(),
        "pid": pid,
        "clock": app.clock.forward(),
        "timestamp": time.time(),
        **fields,
    }
    message = {
        "body": b64encode(orjson.dumps(event)).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"hostname": hostname},
        "properties": {
            "delivery_mode": 1,
            "delivery_info": {"exchange": keys.event_exchange(), "routing_key": "task.sent"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": next(_tags(pid)),
        },
    }
    return orjson.dumps(message)


@lru_cache(maxsize=4)
def _tags(pid: int) -> Iterator[str]:
    """Delivery tags of one process, in the form of UUIDs: no two messages have the same."""
    ours = str(uuid4())[:24]
    return map(f"{ours}{{:012x}}".format, count())


@lru_cache(maxsize=4)
def _origin(pid: int) -> str:
    """Who sends, in Celery's way; of its own in every process, also in a forked one."""
    return anon_nodename()


@lru_cache(maxsize=4)
def _database(url: str) -> int:
    return int(ConnectionPool.from_url(url).connection_kwargs.get("db") or 0)

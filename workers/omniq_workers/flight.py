"""One task in flight: its message deliveries, its coroutine, its outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.exceptions import SoftTimeLimitExceeded

from omniq.errors import EngineError

if TYPE_CHECKING:
    from omniq.jobs.model import StageGrant
    from omniq_workers.intake import Slot
    from omniq_workers.pool import EnginePool


class Stop(StrEnum):
    """Why a running body is cancelled from outside."""

    RETURN = "return"
    """The worker stops: the message goes back to its queue."""
    REVOKED = "revoked"
    """Celery's ``revoke(terminate=True)``, or the task's deadline (``expires``)."""
    SOFT_LIMIT = "soft_limit"
    """Celery's soft time limit: the body may still end in its own way."""
    HARD_LIMIT = "hard_limit"
    """Celery's hard time limit."""


#: Celery has settled the message and the result already; the body's own outcome is dropped.
SETTLED_BY_CELERY = frozenset({Stop.REVOKED, Stop.HARD_LIMIT})


class Delivery:
    """One arrival of the task's message, as it came, and then as Celery has it.

    Args:
        message: kombu's message.
        connection: number of the broker connection it came by; an older one can no longer
            acknowledge.
    """

    def __init__(self, message: Any, connection: int) -> None:
        self._message, self.connection = message, connection
        info, properties = message.delivery_info or {}, message.properties or {}
        #: The message's headers and delivery information, under Celery's names.
        self.request: dict[str, Any] = {
            **message.headers,
            "delivery_info": {
                "redelivered": bool(info.get("redelivered")),
                "priority": properties.get("priority"),
            },
        }
        #: Arguments for Celery's tracer: name, id, request, body, content type, encoding.
        self.target: tuple[Any, ...] = ()
        #: Celery's ``Request``: settles the message, sends events. None before it knows of it.
        self.celery: Any = None
        self._payload: tuple[list[Any], dict[str, Any], dict[str, Any]] | None = None

    @classmethod
    def accepted(cls, target: tuple[Any, ...], celery: Any, connection: int) -> Delivery:
        """A delivery that Celery hands over."""
        delivery = cls(celery.message, connection)
        delivery.accept(target, celery)
        return delivery

    def accept(self, target: tuple[Any, ...], celery: Any) -> None:
        """Celery knows of it now."""
        self.target, self.celery, self.request = target, celery, target[2]

    @property
    def payload(self) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """The message's body: arguments, keyword arguments, and what follows the task.

        A body that fits no task raises as a task's own error would.
        """
        if self._payload is None:
            # A body without a content type is of an older protocol, which Celery has translated.
            translated = bool(self.target) and not self.target[4]
            body = self.target[3] if translated else self._message.payload
            args, kwargs, embed = body
            self._payload = args, kwargs, embed or {}
        return self._payload

    @property
    def redelivered(self) -> bool:
        """Whether the broker delivered this message before, to whomever."""
        return bool((self.request.get("delivery_info") or {}).get("redelivered"))


@dataclass(eq=False)
class Flight:
    """A task between its acceptance and its settlement."""

    pool: EnginePool
    task: Task
    id: str
    deliveries: list[Delivery]
    started: float = field(default_factory=time.monotonic)
    future: asyncio.Task[Any] | None = None
    timers: list[Any] = field(default_factory=list)
    stopped: Stop | None = None
    ended: bool = False
    rest: dict[str, Any] | None = None
    """What is left of the message's callbacks and chain for Celery to send; None: all of it."""
    slot: Slot | None = None
    """What its message takes up of the worker's room; None: Celery sees to that."""
    grant: StageGrant | None = None
    """The stage's run, if that has begun with the message's arrival."""
    _result: Any = None
    _exception: BaseException | None = None

    @property
    def delivery(self) -> Delivery:
        """The newest delivery: the one that can be acknowledged."""
        return self.deliveries[-1]

    @property
    def continuation(self) -> dict[str, Any]:
        """What follows the task, as far as Celery has to send it."""
        embed = self.delivery.payload[2]
        return embed if self.rest is None else {**embed, **self.rest}

    @property
    def dropped(self) -> bool:
        """Whether Celery has settled it, whatever the body still does."""
        return self.stopped in SETTLED_BY_CELERY

    @property
    def light(self) -> bool:
        """Whether Celery has nothing to send, to store or to look up for the ended task."""
        return not self.failed and self.rest is not None and self.all_but(self.rest)

    def all_but(self, rest: Mapping[str, Any]) -> bool:
        """Whether a success leaves nothing for Celery to send, to store or to look up, if this is
        what is left of callbacks and chain.
        """
        delivery = self.delivery
        return (
            not any(rest.values())
            and not delivery.payload[2].get("chord")
            and bool(delivery.request.get("ignore_result"))
            and not delivery.redelivered
        )

    @property
    def failed(self) -> bool:
        """Whether the body raised."""
        return self._exception is not None

    def stop(self, why: Stop) -> None:
        """Cancel the body; the first reason counts, except that Celery's settlement is final."""
        if self.stopped is None or why in SETTLED_BY_CELERY:
            self.stopped = why
        self.pool.loop.call(self._cancel)

    def _cancel(self) -> None:
        if self.future is not None:
            self.future.cancel()

    def terminate(self, signal: int | None = None) -> None:
        """Celery's name: called after it has announced the task as revoked or cancelled."""
        self.stop(Stop.REVOKED)

    def end(self, future: asyncio.Task[Any] | None) -> None:
        """Keep the body's outcome; None: it never ran."""
        self.ended = True
        if future is None or future.cancelled():
            if self.stopped is Stop.SOFT_LIMIT:
                self._exception = SoftTimeLimitExceeded(self.id)
            elif self.stopped is not None:
                self._exception = asyncio.CancelledError()
            else:
                self._exception = EngineError("the task was cancelled from within the worker")
        else:
            self._exception = future.exception()
            self._result = None if self._exception is not None else future.result()

    def outcome(self) -> Any:
        """The body's result; raises what the body raised."""
        if self._exception is not None:
            raise self._exception
        return self._result

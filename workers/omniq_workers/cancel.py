"""Hearing of cancelled jobs while their stages run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from celery.utils.log import get_logger

from omniq import keys
from omniq.errors import BrokerUnavailable
from omniq.redis_client import UNAVAILABLE, connect

logger = get_logger(__name__)

LISTEN_SECONDS = 5.0
RECONNECT_SECONDS = 0.5
#: Most announcements that are remembered.
MOST_ANNOUNCED = 1000


@dataclass(frozen=True, slots=True)
class Cancellation:
    """A job is to stop; or one stage of it, where that has run up to this fence: later runs, of a
    dead letter that is tried again, are not meant.
    """

    job: str
    stage: str = ""
    fence: float = float("inf")

    @classmethod
    def parse(cls, text: str) -> Cancellation:
        """From :func:`omniq.keys.cancel_channel`."""
        job, stage, fence = (*text.split(" "), "", "")[:3]
        return cls(job, stage, float(fence or "inf"))

    def means(self, job: str, stage: str, fence: int) -> bool:
        """Whether that run has to stop."""
        return self.job == job and self.stage in ("", stage) and fence <= self.fence


class Announced:
    """The newest cancellations: one may be heard of before the begin of the run that it means,
    which comes by another connection.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Cancellation] = {}

    def add(self, cancelled: Cancellation) -> None:
        """One was announced."""
        self._known[cancelled.job, cancelled.stage] = cancelled
        if len(self._known) > MOST_ANNOUNCED:
            del self._known[next(iter(self._known))]

    def means(self, job: str, stage: str, fence: int) -> bool:
        """Whether one of them stops that run."""
        found = (self._known.get((job, name)) for name in ("", stage))
        return any(one is not None and one.means(job, stage, fence) for one in found)


async def listen(
    on_cancel: Callable[[Cancellation], object], on_subscribed: Callable[[], Awaitable[object]]
) -> None:
    """Call ``on_cancel`` for every announced cancellation, until this task is cancelled.

    Announcements are not kept for those who are not connected: ``on_subscribed`` is awaited after
    every new subscription, to look for what was missed.
    """
    redis = connect(blocking=LISTEN_SECONDS)
    try:
        while True:
            try:
                async with redis.pubsub() as channel:
                    await channel.subscribe(keys.cancel_channel())
                    await on_subscribed()
                    while True:
                        message = await channel.get_message(
                            ignore_subscribe_messages=True, timeout=LISTEN_SECONDS
                        )
                        if message is not None:
                            on_cancel(Cancellation.parse(message["data"].decode()))
            except (*UNAVAILABLE, BrokerUnavailable) as exc:
                logger.warning("cancellations are not heard: %s", exc)
                await asyncio.sleep(RECONNECT_SECONDS)
    finally:
        await redis.aclose()

"""Hearing of cancelled jobs while their stages run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from celery.utils.log import get_logger

from omniq import keys
from omniq.errors import BrokerUnavailable
from omniq.redis_client import UNAVAILABLE, connect

logger = get_logger(__name__)

LISTEN_SECONDS = 5.0
RECONNECT_SECONDS = 0.5


async def listen(
    on_cancel: Callable[[str, str], object], on_subscribed: Callable[[], Awaitable[object]]
) -> None:
    """Call ``on_cancel(job id, stage)`` for every announced cancellation, until this task is
    cancelled; stage is empty if the whole job is.

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
                            job_id, _, stage = message["data"].decode().partition(" ")
                            on_cancel(job_id, stage)
            except (*UNAVAILABLE, BrokerUnavailable) as exc:
                logger.warning("cancellations are not heard: %s", exc)
                await asyncio.sleep(RECONNECT_SECONDS)
    finally:
        await redis.aclose()

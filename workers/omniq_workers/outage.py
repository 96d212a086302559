"""Getting a decisive write through a short outage of the broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from celery.utils.log import get_logger

from omniq.errors import BrokerUnavailable

logger = get_logger(__name__)

T = TypeVar("T")
PATIENCE = 30.0
FIRST_WAIT = 0.1
LONGEST_WAIT = 1.0
#: A call that failed only after so many seconds had a working broker until then.
WORKED = 5.0


async def through_outage(call: Callable[[bool], Awaitable[T]], patience: float = PATIENCE) -> T:
    """Await ``call(again)`` until the broker answers.

    ``again`` is False the first time. When it is True an earlier call may have taken effect though
    its answer was lost, which the caller has to allow for.

    Raises:
        BrokerUnavailable: still not after ``patience`` seconds.
    """
    deadline = time.monotonic() + patience
    wait, again = FIRST_WAIT, False
    while True:
        try:
            return await call(again)
        except BrokerUnavailable as exc:
            if time.monotonic() + wait > deadline:
                raise
            if not again:
                logger.warning("waiting for the broker: %s", exc)
            again = True
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)


async def through_outages(call: Callable[[], Awaitable[T]], patience: float = PATIENCE) -> T:
    """Await ``call()``, which may wait for long and be repeated, through every short outage.

    Raises:
        BrokerUnavailable: one outage lasted longer than ``patience`` seconds.
    """
    deadline = 0.0
    while True:
        began = time.monotonic()
        try:
            return await call()
        except BrokerUnavailable as exc:
            now = time.monotonic()
            if deadline < began or now - began > WORKED:  # this is another outage
                logger.warning("waiting for the broker: %s", exc)
                deadline = now + patience
            if now > deadline:
                raise
            await asyncio.sleep(FIRST_WAIT)

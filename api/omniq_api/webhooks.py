"""Delivering webhooks, in the background of every process of the API (see omniq.jobs.webhooks)."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime

import httpx

from omniq.errors import BrokerUnavailable, InvalidRequest, JobNotFound, JobUnreadable
from omniq.guarded_http import exchange
from omniq.jobs.model import JobRecord
from omniq.jobs.store import JobStore
from omniq.jobs.webhooks import PAUSES, Due, Schedule, Webhook, message, signed
from omniq.net_guard import checked_url
from omniq.settings import get_settings
from omniq_api.schemas import job_view

logger = logging.getLogger("omniq.api")

AT_ONCE = 16
EACH = 4
"""Of these for one receiver, which may not answer."""
LOOK = 0.5
"""Seconds between looks at the schedule."""
LEASE = 30.0
"""Seconds, beyond the receiver's time, after which a delivery not settled is anybody's."""


class Deliverer:
    """Delivers what is due; any number of processes may, each message is one's at a time."""

    def __init__(self, store: JobStore) -> None:
        self._store, self._schedule = store, Schedule(store.redis)
        #: What is on its way, and to whom.
        self._flights: dict[asyncio.Task[None], str] = {}
        self._landed = asyncio.Event()

    async def run(self) -> None:
        """Deliver until this task is cancelled; what is on its way then is sent again."""
        silent = False
        try:
            while True:
                try:
                    await self._look()
                    silent = False
                except BrokerUnavailable as exc:
                    if not silent:
                        logger.warning("webhooks wait for the broker: %s", exc)
                    silent = True
                except Exception:  # whatever one look meets, others' messages still go
                    logger.exception("webhooks could not be looked at")
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK):
                        await self._landed.wait()
        finally:
            for flight in self._flights:
                flight.cancel()

    async def _look(self) -> None:
        self._landed.clear()
        if not (room := AT_ONCE - len(self._flights)):
            return
        lease = get_settings().webhook_timeout + LEASE
        has = Counter(self._flights.values())
        for due in await self._schedule.claim(room, lease, EACH, has):
            flight = asyncio.create_task(self._serve(due))
            self._flights[flight] = due.receiver
            flight.add_done_callback(self._ended)

    def _ended(self, flight: asyncio.Task[None]) -> None:
        del self._flights[flight]
        self._landed.set()

    async def _serve(self, due: Due) -> None:
        """One try, and what follows from it."""
        try:
            fault = await self._send(due)
            again: float | None = None
            if fault is not None and due.tries <= len(PAUSES):
                again = PAUSES[due.tries - 1] * (1 + random.random() / 2)
                logger.info("webhook of job %s: %s; again in %.0f s", due.job, fault, again)
            elif fault is not None:
                logger.warning("webhook of job %s: %s; given up", due.job, fault)
            await self._schedule.settle(due, again)
        except BrokerUnavailable as exc:
            logger.warning("webhook of job %s is sent again after its lease: %s", due.job, exc)

    async def _send(self, due: Due) -> str | None:
        """Why it was not delivered; None: it was, or never can be."""
        settings = get_settings()
        try:
            record = await self._store.get(due.job)
            async with asyncio.timeout(settings.webhook_timeout):
                return await _post(record, due.hook)
        except TimeoutError:
            return f"no answer within {settings.webhook_timeout:g} s"
        except JobNotFound:
            return None
        except (InvalidRequest, JobUnreadable) as exc:  # the next one may read what this cannot
            return exc.message
        except BrokerUnavailable:
            raise
        except httpx.HTTPError as exc:
            return f"{type(exc).__name__}: {exc}"
        except Exception:  # one message must not end the others, and is tried again like any
            logger.exception("webhook of job %s could not be sent", due.job)
            return "it could not be sent"


async def _post(record: JobRecord, hook: Webhook) -> str | None:
    settings = get_settings()
    # Looked up anew each time: a name may lead elsewhere by now.
    target = await checked_url(
        hook.url, allow=settings.webhook_allow, schemes=settings.webhook_schemes
    )
    ended = record.finished or record.spec.created
    finished = datetime.fromtimestamp(ended, UTC).isoformat()
    body = message(record.state.value, finished, job_view(record, "").model_dump(mode="json"))
    headers = {
        "content-type": "application/json",
        # Of this end: a job that is tried again ends again, which is another message.
        **signed(f"{record.id}.{ended * 1e6:.0f}", int(time.time()), body, hook.secret),
    }
    limit = settings.webhook_timeout
    async with exchange("POST", target, headers=headers, content=body, timeout=limit) as answer:
        # The body is left unread: nothing in it matters.
        if answer.is_success:
            return None
        if answer.status_code == httpx.codes.GONE:
            logger.info("webhook of job %s: its receiver wants no more", record.id)
            return None
        return f"the receiver answered {answer.status_code}"

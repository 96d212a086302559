"""What the routes share: the stores, whether the broker answers, and whether the server stops."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, Header, Request
from pydantic import AfterValidator

from omniq.errors import BrokerUnavailable
from omniq.jobs.model import JobEvent
from omniq.jobs.store import JobStore
from omniq.jobs.webhooks import Webhook
from omniq.jobs.workers import WorkerRegistry
from omniq.redis_client import Client, broker_errors, connect
from omniq.submit import IDEMPOTENCY_KEY, KEY_RULE
from omniq.tenants import TenantKey
from omniq_api.keys import KEY, STORE, UNKNOWN
from omniq_api.openai_compat.faults import SERVICES
from omniq_api.problems import ProblemError
from omniq_api.revocation import Revocations
from omniq_api.webhooks import Deliverer

PROBE_TIMEOUT = 1.0
PROBE_TRUST = 0.25


class BrokerProbe:
    """Finds out within a second whether the broker answers.

    A command on a broker that hangs fails only after its own, longer time-out, and a publication
    cannot be taken back half-way; so nothing is begun on a broker that has not answered lately.
    """

    def __init__(self, redis: Client) -> None:
        self.redis = redis
        self._answered = float("-inf")
        self._running: asyncio.Task[None] | None = None

    async def check(self) -> None:
        """Return if the broker has answered within ``PROBE_TRUST`` seconds or does so now.

        Raises:
            BrokerUnavailable: it refuses, or has not answered within ``PROBE_TIMEOUT``.
        """
        if time.monotonic() - self._answered < PROBE_TRUST:
            return
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._ping())
        # Shared by all who ask at the same time; one that goes away must not cancel it.
        await asyncio.shield(self._running)

    async def _ping(self) -> None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                with broker_errors():
                    await self.redis.ping()
        except TimeoutError as exc:
            raise BrokerUnavailable(
                f"the broker has not answered within {PROBE_TIMEOUT:g} s"
            ) from exc
        self._answered = time.monotonic()


class Services:
    """One per process; lives as long as the app. Some requests get a copy (:meth:`of`)."""

    #: The tenant's that asks; None: the operator.
    key: TenantKey | None = None
    #: By which the request is known if it comes again.
    idempotency_key: str | None = None
    #: Whether all its jobs are those of an earlier one.
    replayed = False

    def __init__(self, redis: Client, stopping: asyncio.Event) -> None:
        self.store = JobStore(redis)
        self.workers = WorkerRegistry(redis)
        self.redis = redis
        self.probe = BrokerProbe(redis)
        self.revocations = Revocations(redis)
        self.stopping = stopping

    def of(self, key: TenantKey | None, idempotency_key: str | None) -> Services:
        """The same for one request; of a tenant, to whom other tenants' jobs are unknown."""
        services = copy.copy(self)
        services.key, services.idempotency_key = key, idempotency_key
        if key is not None:
            services.store = self.store.of(key.share)
        return services

    def events(
        self, job_id: str, after: str = "0", *, block: float
    ) -> AsyncGenerator[JobEvent | None]:
        """As ``JobStore.events``, until the key with which they were asked for is revoked.

        Raises:
            KeyRevoked: it has been.
        """
        events = self.store.events(job_id, after, block=block)
        return self.revocations.until_revoked(self.key, events)

    @property
    def webhook(self) -> Webhook | None:
        """Told of the end of jobs that name none themselves."""
        return None if self.key is None else self.key.webhook

    async def end_waits(self) -> None:
        """When the server stops, end every event stream and long poll."""
        await self.stopping.wait()
        self.store.stop_watching()

    async def close(self) -> None:
        """Close the connections."""
        await self.store.close()


@asynccontextmanager
async def open_services(stopping: asyncio.Event) -> AsyncIterator[Services]:
    """Services on the configured broker, which need not answer yet."""
    services = Services(connect(), stopping)
    tasks = [
        asyncio.create_task(services.end_waits()),
        asyncio.create_task(Deliverer(services.store).run()),
    ]
    try:
        yield services
    finally:
        for task in tasks:
            task.cancel()
        await services.close()


def any_services(request: Request) -> Services:
    """The process's services, whether or not the broker answers."""
    services: Services = request.app.state.services
    return services


async def live_services(request: Request) -> Services:
    """The services for who asks, once the broker has answered.

    Raises:
        BrokerUnavailable: it does not.
    """
    services = any_services(request)
    scope, idempotency_key = request.scope, request.headers.get("idempotency-key")
    if scope.get(UNKNOWN):
        raise BrokerUnavailable("whether keys are asked for could not be found out")
    await services.probe.check()
    key: TenantKey | None = scope.get(KEY)
    if key is None and idempotency_key is None:
        return services
    services = services.of(key, idempotency_key)
    scope[SERVICES], scope[STORE] = services, services.store
    return services


async def operators_services(request: Request) -> Services:
    """As :func:`live_services`, for the operator only.

    Raises:
        ProblemError: 403, a tenant asks.
    """
    services = await live_services(request)
    if services.key is not None:
        raise ProblemError(403, "operators_only", "a tenant's key may not ask for this")
    return services


def _check_key(value: str | None) -> str | None:
    if value is not None and not IDEMPOTENCY_KEY.fullmatch(value):
        raise ValueError(KEY_RULE)
    return value


# A coroutine although it awaits nothing: FastAPI sends plain functions through a thread pool.
async def mount_path(request: Request) -> str:
    """The path the API is mounted under, without a trailing slash; usually empty."""
    return str(request.scope.get("root_path", "")).rstrip("/")


IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="A request that comes again with the same key and content is answered with the "
        "job of the first one; with other content, 409. 1 to 255 printable ASCII characters.",
        json_schema_extra={"pattern": IDEMPOTENCY_KEY.pattern},
    ),
    AfterValidator(_check_key),
]


async def idempotent(key: IdempotencyKey = None) -> None:
    """For routes that make jobs: their header, which :func:`live_services` reads."""


Live = Annotated[Services, Depends(live_services)]
Operator = Annotated[Services, Depends(operators_services)]
Base = Annotated[str, Depends(mount_path)]

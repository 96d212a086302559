"""A task's copies in one worker: one runs, and all their messages are settled with it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from omniq_workers.flight import Flight, Stop
from omniq_workers.messages import ACCEPT, Message
from omniq_workers.pool import EnginePool

from omniq.publish import STAGE, post
from omniq.tasks import app

TASK = "job.a"


class Held:
    """A stage runner whose run ends when it is told to."""

    def __init__(self) -> None:
        self.end = asyncio.Event()

    async def run(self, job_id: str, stage: str) -> str:
        await self.end.wait()
        return "made"


class Request:
    """What the pool uses of Celery's request."""

    def __init__(self, message: Message) -> None:
        self.message, self.acknowledged = message, False
        info = {"redelivered": message.delivery_info.get("redelivered", False)}
        request = {**message.headers, "hostname": "w@test", "delivery_info": info}
        self.target = (STAGE, TASK, request, message.body, "application/json", "utf-8")

    def on_success(self, outcome: object) -> None:
        self.acknowledged = True

    on_failure = on_success


def message(*, redelivered: bool) -> Message:
    signature = {
        "task": STAGE,
        "args": (),
        "kwargs": {"job": "job", "stage": "a"},
        "options": {"task_id": TASK, "queue": "omniq.p.a"},
    }
    raw = orjson.loads(post(signature).message)
    raw["properties"]["delivery_info"]["redelivered"] = redelivered
    return Message(raw, accept=ACCEPT)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, broker: object) -> Any:
    app.follow_settings()
    pool: Any = EnginePool(app=app)
    pool._finisher = ThreadPoolExecutor(1)
    pool._service = SimpleNamespace(max_in_flight=4)
    pool.hub = SimpleNamespace(call_soon=lambda *_: None)
    pool.loop.start()
    monkeypatch.setattr(app, "stage_runner", Held())
    yield pool
    pool.loop.stop()
    pool._finisher.shutdown()


@pytest.mark.parametrize("how", ["succeeds", "revoked"])
def test_a_copy_that_celery_hears_of_first_is_settled_too(pool: Any, how: str) -> None:
    """A run has begun ahead of Celery; before Celery hears of it, its copy comes and is adopted."""
    ahead, copy = (Request(message(redelivered=again)) for again in (False, True))

    async def begin() -> bool:
        return bool(pool.start_ahead(ahead.message, None, None))

    assert pool.loop.run(begin(), timeout=5)

    def hears(request: Request) -> Flight:
        flight = pool.on_apply(
            None,
            request.target,
            callback=request.on_success,
            accept_callback=lambda pid, started: None,
        )
        assert isinstance(flight, Flight)
        return flight

    flight = hears(copy)
    assert hears(ahead) is flight
    assert [d.celery for d in flight.deliveries] == [ahead, copy]
    if how == "revoked":
        flight.stop(Stop.REVOKED)  # as Celery, which has acknowledged one of them
        ahead.acknowledged = True
    else:
        pool.loop.call(app.stage_runner.end.set)
    while pool.flights:
        pool._settle(*pool._settled.get(timeout=5))
    assert ahead.acknowledged and copy.acknowledged

"""A Celery application with small tasks, to drive EnginePool through Celery's features."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from omniq.celery import create_app
from omniq.tasks import EngineTask, RetryLater

QUEUE = "pool.test"
NOTES = Path(os.environ.get("POOL_NOTES", "notes"))


def note(*words: object) -> None:
    """Append one line that every process can see at once."""
    with NOTES.open("a") as file:
        file.write(f"{time.time():.3f} {os.getpid()} {' '.join(map(str, words))}\n")


app = create_app("pool_app", include=[])
app.conf.task_default_queue = QUEUE
app.conf.task_default_exchange = QUEUE
app.conf.task_default_routing_key = QUEUE


@app.task(base=EngineTask, name="gen")
async def gen(x: Any, delay: float = 0.05, fail: str | None = None) -> Any:
    note("start", x)
    try:
        await asyncio.sleep(delay)
    except asyncio.CancelledError:
        note("cancelled", x)
        raise
    if fail:
        raise ValueError(fail)
    note("end", x)
    return x


@app.task(base=EngineTask, name="flaky", bind=True)
async def flaky(self: Any, x: Any, tries: int) -> Any:
    from omniq.tasks import current_flight

    retries = current_flight.get().delivery.request["retries"]  # type: ignore[attr-defined]
    note("try", x, retries)
    if retries < tries:
        raise RetryLater(ConnectionError("not yet"), 0.1)
    return retries


@app.task(base=EngineTask, name="limited", soft_time_limit=0.5, time_limit=1.5)
async def limited(hang: bool = False) -> None:
    try:
        await asyncio.sleep(30)
    except asyncio.CancelledError:
        if hang:
            await asyncio.sleep(30)
        raise


@app.task(name="plain")
def plain(x: Any) -> Any:
    return ["plain", x]


@app.task(name="on_error")
def on_error(request: Any, exc: Any, traceback: Any) -> None:
    note("errback", request.id, repr(exc))


@app.task(base=EngineTask, name="block")
async def block(seconds: float) -> None:
    if "blocking" in NOTES.read_text():
        return  # delivered again
    note("blocking")
    time.sleep(seconds)  # what an engine must never do

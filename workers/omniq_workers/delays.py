"""Retries wait as long as they were told to, whatever the clocks of two hosts say.

Celery sends the time of a retry, by the clock of the worker that failed; the one that takes the
message compares it with its own. Where these differ by an hour a delay of a second takes an hour.
omniq's retries say their delay, too (:meth:`omniq.tasks.EngineTask._retry`), and no more than that
is waited for once the message has been taken.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from celery.worker.strategy import default

from omniq.tasks import DELAY


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Celery's default strategy, behind :func:`shortened`."""
    handle = default(task, app, consumer, **options)

    def handle_soon(message: Any, *args: Any, **kwargs: Any) -> Any:
        message.headers = shortened(message.headers)
        return handle(message, *args, **kwargs)

    return handle_soon


def shortened(headers: dict[str, Any]) -> dict[str, Any]:
    """A message's headers with its time no later than its delay from now.

    Those that are given stay as they are: a message that is delivered again has to be what was
    signed.
    """
    eta, delay = headers.get("eta"), headers.get(DELAY)
    if not isinstance(eta, str) or not isinstance(delay, int | float):
        return headers
    latest = datetime.now(UTC) + timedelta(seconds=delay)
    try:
        late = datetime.fromisoformat(eta) > latest
    except (TypeError, ValueError):
        return headers  # not ours: Celery says what is wrong with it
    return {**headers, "eta": latest.isoformat()} if late else headers

"""Leases: a live worker's unacknowledged messages stay its own, a dead one's are delivered again.

The time at which each message was received is noted, and what is older than the visibility timeout
is handed out again (:mod:`omniq_workers.restore`). Renewing these times lets the timeout be
seconds, however long a task runs.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger

from omniq.settings import get_settings

logger = get_logger(__name__)

#: Renewals in one visibility timeout.
RENEWALS = 4


class Leases(bootsteps.StartStopStep):
    """Consumer bootstep that renews the lease of every message this worker holds.

    It stops renewing, and consuming, while the engine loop has not turned for ``stall_timeout``
    seconds: a worker that is wedged loses its tasks to another one, as if it had died. What runs on
    the model's thread may take as long as it likes: time limits are for that.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, c: Any, **kwargs: Any) -> None:
        super().__init__(c, **kwargs)
        self._timer: Any = None
        self._wedged = False

    def start(self, c: Any) -> None:
        """Renew now and then, also while the worker drains."""
        self._wedged = False
        self.timeout = float(c.app.conf.broker_transport_options["visibility_timeout"])
        self._timer = c.timer.call_repeatedly(self.timeout / RENEWALS, self.renew, (c,))
        c.pool.while_draining = [lambda: self._renew_if_connected(c)]

    def stop(self, c: Any) -> None:
        """The connection is gone or going; its messages are restored or lapse."""
        if self._timer is not None:
            self._timer.cancel()

    def _renew_if_connected(self, c: Any) -> None:
        try:
            self.renew(c)
        except c.connection_errors as exc:
            logger.warning("leases were not renewed while draining: %s", exc)

    def renew(self, c: Any) -> None:
        """Renew all leases, unless the loop has been silent for too long."""
        if c.task_consumer is None or c.connection is None:
            return
        silence = c.pool.loop.silence
        if silence > get_settings().stall_timeout:
            self._let_go(c, silence)
            return
        if self._wedged:
            logger.warning("the engine loop turns again; taking tasks again")
            self._wedged = False
            c.task_consumer.consume()
        channel = c.task_consumer.channel
        tags = list(channel.qos._delivered)  # kombu has no other list of them
        if tags:
            channel.renew(tags)

    def _let_go(self, c: Any, silence: float) -> None:
        if self._wedged:
            return
        self._wedged = True
        logger.critical(
            "the engine loop has not turned for %.1f s; its %d tasks go to other workers",
            silence,
            len(c.pool.flights),
        )
        # Else this worker would be the first to take them again.
        c.task_consumer.cancel()

"""Celery's consumer with omniq's patience: a broker that comes back is noticed within seconds."""

from __future__ import annotations

from typing import Any

from celery.utils.log import get_logger
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown

logger = get_logger(__name__)

FIRST_WAIT = 0.2
WAIT_STEP = 0.3
LONGEST_WAIT = 2.0


class StageConsumer(Consumer):
    """``worker_consumer = "omniq_workers.consumer:StageConsumer"``."""

    def ensure_connected(self, conn: Any) -> Any:
        """Connect, trying for ever, at most two seconds apart (Celery: up to thirty)."""

        def failed(exc: Exception, interval: float) -> None:
            logger.error("no broker at %s (%s); next try in %.1f s", conn.as_uri(), exc, interval)

        connected = conn.ensure_connection(
            failed,
            None,
            interval_start=FIRST_WAIT,
            interval_step=WAIT_STEP,
            interval_max=LONGEST_WAIT,
            callback=maybe_shutdown,
        )
        self.first_connection_attempt = False
        self.broker_connection_retry_attempt = 0
        return connected

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Give the lost connection's messages back, if the broker can be reached already.

        Otherwise they are delivered again when their leases lapse. Celery and kombu would try on
        closing the channel, when its transport is gone, and that ends the worker.
        """
        self.pool.connection_lost()
        if self.task_consumer is not None:
            channel = self.task_consumer.channel
            try:
                channel.qos.restore_unacked_once()
            except self.connection_errors as error:
                logger.warning("messages of the lost connection are delivered later: %s", error)
            channel.do_restore = False
        super().on_connection_error_after_connected(exc)

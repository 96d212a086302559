"""Celery's consumer with omniq's patience, in both directions: a broker that comes back is noticed
within seconds, and nothing waits for the next turn of the hub's loop, which may be long in coming.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from celery.exceptions import CPendingDeprecationWarning
from celery.utils.log import get_logger
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown
from redis.exceptions import RedisError

from omniq_workers.events import StageDispatcher

logger = get_logger(__name__)

FIRST_WAIT = 0.2
WAIT_STEP = 0.3
LONGEST_WAIT = 2.0
#: Acknowledgements and task events are sent together, at most so many seconds late.
PACE = 0.02
#: Queues are looked at so often, in seconds, whether or not the broker tells of a new message.
LOOK_AGAIN = 1.0

# Whenever the broker is lost, of a setting that is as it has to be (omniq.celery).
warnings.filterwarnings(
    "ignore", "\nIn Celery 5.1 we introduced", category=CPendingDeprecationWarning
)


class StageConsumer(Consumer):
    """``worker_consumer = "omniq_workers.consumer:StageConsumer"``."""

    _news_due = 0.0

    def register_with_event_loop(self, hub: Any) -> None:
        """The hub's loop starts; the channel of the tasks is there."""
        super().register_with_event_loop(hub)
        channel = self.task_consumer.channel
        if isinstance(self.event_dispatcher, StageDispatcher):
            self.event_dispatcher.beside = channel
        arrivals, pool = channel.arrivals, self.pool
        arrivals.start_ahead, arrivals.give_back = pool.start_ahead, pool.give_back
        arrivals.handed, pool.hand_over = pool.handed, arrivals.hand_over
        if self.app.service is not None:
            self._take_on_loop(channel)
        self.pool.tell_after = self.tell_after
        hub.call_repeatedly(LOOK_AGAIN, channel.look_again)
        self.pool.limited = lambda name: self.task_buckets[name] is not None

    def _take_on_loop(self, channel: Any) -> None:
        intake = self.app.service.intake(
            own=(channel.unacked_key, channel.unacked_index_key, channel.undecodable_key),
            room=lambda: channel.qos.prefetch_count or 0,
            arrive=channel.arrivals.arrive,
            undecodable=channel.report,
        )
        loop, hub = self.pool.loop, self.hub
        try:
            loop.run(intake.start())
        except RedisError as exc:
            logger.warning("messages are taken by the way of Celery's own loop: %s", exc)
            loop.call(intake.close)
        else:
            channel.take_by(intake, loop, lambda: hub.call_soon(channel.arrivals.hand_over))

    def call_soon_ack(self, p: Any, *args: Any, **kwargs: Any) -> Any:
        """Acknowledge or reject now; kombu's hub may sleep before it does what is called soon."""
        p(*args, **kwargs)
        self.on_send_event_buffered()
        return p

    def on_send_event_buffered(self) -> None:
        """Have acknowledgements and events sent in a moment."""
        now = time.monotonic()
        if now >= self._news_due:
            self._news_due = now + PACE
            self.hub.call_later(PACE, self.send_news)

    def tell_after(self, work: Callable[[], object]) -> None:
        """Do ``work``, and send what it makes known at once."""
        due, self._news_due = self._news_due, float("inf")
        try:
            work()
        finally:
            self._news_due = due
        self.send_news()

    def send_news(self) -> None:
        """Send what the broker and those who watch have still to be told."""
        if self.task_consumer is None or self.connection is None:
            self._flush_events()
            return
        channel = self.task_consumer.channel
        channel.note_done()  # goes along with the events, if there are any
        self._flush_events()
        channel.flush()

    def on_unknown_message(self, body: Any, message: Any) -> None:
        """Set aside what is no task's message; then as Celery, which logs and drops it."""
        self.task_consumer.channel.set_aside(message)
        super().on_unknown_message(body, message)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """As :meth:`on_unknown_message`."""
        self.task_consumer.channel.set_aside(message)
        super().on_decode_error(message, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        """As :meth:`on_unknown_message`."""
        self.task_consumer.channel.set_aside(message)
        super().on_invalid_task(body, message, exc)

    def shutdown(self) -> None:
        """Send the last events; then as Celery."""
        self._flush_events()
        super().shutdown()

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
        if self.task_consumer is not None:
            self.task_consumer.channel.arrivals.stop()
        self.pool.connection_lost()
        if self.task_consumer is not None:
            channel = self.task_consumer.channel
            try:
                channel.recover()
                channel.qos.restore_unacked_once()
            except self.connection_errors as error:
                logger.warning("messages of the lost connection are delivered later: %s", error)
            channel.do_restore = False
        super().on_connection_error_after_connected(exc)

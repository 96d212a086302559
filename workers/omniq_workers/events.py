"""Celery's events, sent without waiting."""

from __future__ import annotations

from typing import Any

from celery.events import EventDispatcher
from redis.exceptions import ConnectionError

from omniq_workers.transport import Channel


class StageDispatcher(EventDispatcher):
    """Publishes by :meth:`omniq_workers.transport.Channel.tell` where the channel has it."""

    #: The worker's channel of tasks: events go along with what that one has to send.
    beside: Channel | None = None

    def _publish(self, event: Any, producer: Any, routing_key: str, **options: Any) -> None:
        channel = self.beside or (None if producer is None else producer.channel)
        if not isinstance(channel, Channel):
            super()._publish(event, producer, routing_key, **options)
            return
        try:
            if channel.closed:  # with its connection: the worker says that it is offline
                raise ConnectionError("the connection to the broker is closed")
            channel.tell(self.exchange.name, routing_key, event, self.headers)
        except channel.connection_errors:
            if not self.buffer_while_offline:
                raise
            self._outbound_buffer.append((event, routing_key))

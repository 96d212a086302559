"""kombu's Redis transport with fewer round trips: what it puts into Redis is the same.

kombu waits for two transactions a message, one to note that it was received and one to note that
it is done with, each on a client made for it. Here such notes go over one connection; that a
message was received is written at once, that it is done with goes along with the next note or a
moment later. Their answers are read when the next ones are sent. When many messages wait they are
taken several at a time, and work on a stage's begins before Celery has heard of it.

Everything here runs on the hub's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import Empty
from typing import Any
from uuid import uuid4

import hiredis
import orjson
from celery.utils.log import get_logger
from kombu import Connection
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils import json as kombu_json
from redis.exceptions import ResponseError

from omniq_workers.notes import Notes

logger = get_logger(__name__)

#: Most messages taken at once, and which part of the room a worker has: the rest is for others.
MOST = 8
SHARE = 4
#: Content types of messages that are worked on ahead; all that the application accepts.
ACCEPT = frozenset({"application/json"})
#: What kombu's JSON has that JSON has not.
TYPED = b'"__type__"'


class Message(virtual.Message):
    """A message whose JSON is decoded fast."""

    def _decode(self) -> Any:
        body = self.body
        if (
            self.content_type == "application/json"
            and self.content_type in (self.accept or ())
            and isinstance(body, bytes)
            and TYPED not in body
        ):
            return orjson.loads(body)
        return super()._decode()


class QoS(kombu_redis.QoS):
    """The messages that this channel holds; see the module's text."""

    def append(self, message: Any, delivery_tag: str) -> None:
        """Hold a message; what came by the channel's own pop has been noted as received."""
        if delivery_tag in self.channel.noted:
            self.channel.noted.discard(delivery_tag)
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def can_consume(self) -> bool:
        """Whether there is room for another message; those not handed over yet take some."""
        room = self.can_consume_max_estimate()
        return room is None or room > 0

    def can_consume_max_estimate(self) -> int | None:
        """How many messages there is room for; None: any number."""
        room: int | None = super().can_consume_max_estimate()
        return None if room is None else max(0, room - len(self.channel.ahead))

    def ack(self, delivery_tag: str) -> None:
        """Be done with a message, as soon as the notes are flushed."""
        self.channel.done.append(delivery_tag)
        virtual.QoS.ack(self, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Be done with a message, or put it back at the head of its queue."""
        if not requeue:
            self.ack(delivery_tag)
        else:
            super().reject(delivery_tag, requeue=True)

    def restore_by_tag(self, tag: str, client: Any = None, leftmost: bool = False) -> None:
        """Put a message back; only after everything noted before has been done."""
        self.channel.settle()
        super().restore_by_tag(tag, client, leftmost)


class Channel(kombu_redis.Channel):
    """See the module's text."""

    QoS = QoS
    Message = Message

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: Tags that are noted as received, and not yet handed to :class:`QoS`.
        self.noted: set[str] = set()
        #: Tags of messages that are done with, and not yet noted so.
        self.done: list[str] = []
        #: Messages that are worked on already, and their queues; :meth:`hand_over` delivers them.
        self.ahead: list[tuple[Message, str]] = []
        #: Starts to work on a message; False: it has to be delivered first.
        self.start_ahead: Callable[[Message], bool] | None = None
        self._notes: Notes | None = None
        self._takes_many = True
        self._callback_of: dict[str, Any] = {}
        self._keys_of: dict[tuple[str, ...], list[str]] = {}
        super().__init__(*args, **kwargs)

    @property
    def notes(self) -> Notes:
        """The connection for commands nobody waits for; made on first use."""
        if self._notes is None:
            self._notes = Notes(self.pool)
        return self._notes

    def flush(self) -> None:
        """Send all notes. Raises as :meth:`Notes.flush`."""
        self._note_done()
        if self._notes is not None:
            self._notes.flush()

    def _note_done(self) -> None:
        if self.done:
            done, self.done = self.done, []
            self.notes.add("ZREM", self.unacked_index_key, *done)
            self.notes.add("HDEL", self.unacked_key, *done)

    def settle(self) -> None:
        """Send all notes and wait until they are taken. Raises as :meth:`Notes.settle`."""
        self.flush()
        if self._notes is not None:
            self._notes.settle()

    def recover(self) -> None:
        """After the connection broke: note again, on a new one, what this channel holds.

        Raises:
            redis.exceptions.ConnectionError: there is no broker yet.
        """
        notes, self._notes = self._notes, None
        if notes is not None:
            notes.close()
        held = {t: m for t, m in self.qos._delivered.items() if t not in self.qos._dirty}
        if held:
            self._note_received(
                [kombu_json.dumps(m._raw).encode() for m in held.values()],
                [m._raw for m in held.values()],
            )
            self.noted.difference_update(held)
        self.settle()

    def renew(self, tags: Sequence[str]) -> None:
        """Note that these messages are still held; one that is not any more stays away (XX)."""
        now = time.time()
        scores = [x for tag in tags for x in (now, tag)]
        self.notes.add("ZADD", self.unacked_index_key, "XX", *scores)
        self.flush()

    def tell(self, exchange: str, routing_key: str, body: Any, headers: dict[str, Any]) -> None:
        """Publish to a fan-out exchange without waiting. Raises as :meth:`Notes.flush`."""
        message = {
            "body": self.encode_body(orjson.dumps(body), "base64")[0],
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": headers,
            "properties": {
                "delivery_mode": 1,
                "delivery_info": {"exchange": exchange, "routing_key": routing_key},
                "priority": 0,
                "body_encoding": "base64",
                "delivery_tag": str(uuid4()),
            },
        }
        payload = orjson.dumps(message)
        notes = self.notes  # also fills in the database's number in the topic's name
        for topic in self._get_publish_topics(exchange, routing_key):
            notes.add("PUBLISH", topic, payload)
        notes.flush()

    # -- taking messages -----------------------------------------------------------------------

    def _brpop_start(self, timeout: float | None = None) -> None:
        queues = self._queue_cycle.consume(len(self.active_queues))
        if not queues:
            return
        connection = self.client.connection
        self._in_poll = connection
        self._brpop_sent_at = time.monotonic()
        wait = timeout or self.brpop_timeout or 0
        keys = self._keys(tuple(queues))
        if self._takes_many:
            room = self.qos.can_consume_max_estimate() or SHARE * MOST
            count = max(1, min(MOST, room // SHARE))
            command: Any = ("BLMPOP", wait, len(keys), *keys, "RIGHT", "COUNT", count)
        else:
            command = ("BRPOP", *keys, wait)
        connection.send_packed_command([hiredis.pack_command(command)], check_health=False)

    def _keys(self, queues: tuple[str, ...]) -> list[str]:
        keys = self._keys_of.get(queues)
        if keys is None:
            keys = [self._q_for_pri(q, p) for p in self.priority_steps for q in queues]
            self._keys_of[queues] = keys
        return keys

    def _brpop_read(self, **options: Any) -> bool:
        try:
            answer = self._popped()
        finally:
            self._in_poll = None
            # kombu: the connection is idle now, and may log in anew.
            self._flush_brpop_reauth()
        if not answer:
            raise Empty
        key, items = answer
        queue = key.decode().rsplit(self.sep, 1)[0]
        self._queue_cycle.rotate(queue)
        messages = [_loads(item) for item in (items if isinstance(items, list) else [items])]
        self._note_received(items if isinstance(items, list) else [items], messages)
        for raw in messages:
            if self.start_ahead is not None:
                message = self.Message(raw, channel=self, accept=ACCEPT)
                if self.start_ahead(message):
                    self.ahead.append((message, queue))
                    continue
            self.connection._deliver(raw, queue)
        return True

    def hand_over(self) -> None:
        """Deliver the messages that are being worked on already."""
        ahead, self.ahead = self.ahead, []
        for message, queue in ahead:
            if queue in self.connection._callbacks:
                self.qos.append(message, message.delivery_tag)
                self._callback_of[queue](message)
            else:  # not consumed from any more: it goes back
                self.connection._deliver(message._raw, queue)

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Consume from a queue."""
        self._callback_of[queue] = callback
        return super().basic_consume(queue, no_ack, callback, consumer_tag, *args, **kwargs)

    def basic_cancel(self, consumer_tag: str) -> None:
        """Consume no more; what has been started is delivered before."""
        self.hand_over()
        super().basic_cancel(consumer_tag)

    def _popped(self) -> Any:
        connection = self.client.connection
        try:
            return connection.read_response()
        except self.connection_errors:
            connection.disconnect()
            raise
        except ResponseError as exc:
            if not (self._takes_many and "unknown command" in str(exc)):
                raise
            logger.info("the broker has no BLMPOP: messages are taken one by one")
            self._takes_many = False
            return None

    def _note_received(self, items: list[bytes], messages: list[dict[str, Any]]) -> None:
        now = time.time()
        scores: list[Any] = []
        records: list[Any] = []
        for item, message in zip(items, messages, strict=True):
            properties = message["properties"]
            tag, info = properties["delivery_tag"], properties["delivery_info"]
            where = orjson.dumps([info["exchange"], info["routing_key"]])
            scores += (now, tag)
            records += (tag, b"[" + item + b"," + where[1:])
            self.noted.add(tag)
        self.notes.add("ZADD", self.unacked_index_key, *scores)
        self.notes.add("HSET", self.unacked_key, *records)
        self.flush()

    def close(self) -> None:
        """Note what is still to be noted; then as kombu."""
        if not self.closed:
            try:
                self.settle()
            except self.connection_errors as exc:
                logger.warning("messages that are done with may come again: %s", exc)
                self.done.clear()
        super().close()

    def _disconnect_pools(self) -> None:
        notes, self._notes = self._notes, None
        if notes is not None:
            notes.close()
        super()._disconnect_pools()


class _Hub:
    """kombu's hub, to which a socket is added once, and not again at every turn of its loop."""

    def __init__(self, hub: Any) -> None:
        self._hub = hub

    def add_reader(self, fd: int, callback: Any, *args: Any) -> None:
        if self._hub.readers.get(fd) != (callback, args):
            self._hub.add_reader(fd, callback, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hub, name)


class Transport(kombu_redis.Transport):
    """See the module's text."""

    Channel = Channel

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Called with the hub when the connection is there."""
        super().register_with_event_loop(connection, _Hub(loop))


class StageConnection(Connection):
    """kombu's connection, whose Redis transport is the one of this module."""

    def get_transport_cls(self) -> type[Any]:
        """The transport's class."""
        found: type[Any] = super().get_transport_cls()
        return Transport if found is kombu_redis.Transport else found


def _loads(item: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = (
        kombu_json.loads(item.decode()) if TYPED in item else orjson.loads(item)
    )
    return loaded

"""kombu's Redis transport with fewer round trips: what it puts into Redis is the same.

kombu waits for two transactions a message, one to note that it was received and one to note that
it is done with, each on a client made for it, and a worker that dies before the first loses the
message. Here a script takes messages and notes them in one step (:mod:`omniq_workers.take`),
several at a time when many wait. In a worker with an engine its loop does so
(:mod:`omniq_workers.intake`), and work on a stage's begins before Celery has heard of it. That
messages are done with goes over one connection whose answers are read when the next notes are sent.
Where the server does not allow this, messages are taken and noted as kombu does.

What is no message at all, or none that Celery can take, is set aside in a list of its own: it
neither stops the worker nor comes again.

Everything here runs on the hub's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import hiredis
import orjson
from celery.utils.log import get_logger
from kombu import Connection
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils import json as kombu_json
from redis.exceptions import ConnectionError, OutOfMemoryError

from omniq import keys, signing
from omniq_workers import messages
from omniq_workers.arrivals import Arrivals
from omniq_workers.notes import Notes
from omniq_workers.restore import MOST as MOST_TAGS
from omniq_workers.restore import RENEW, Restorer
from omniq_workers.take import MOST, SET_ASIDE, SHARE, CannotTake, Taken, Taker

if TYPE_CHECKING:
    from omniq_workers.intake import Intake
    from omniq_workers.loop import EngineLoop

logger = get_logger(__name__)

#: A new message's taking is waited for so long; a further turn of the hub would cost more.
PATIENCE = 0.002


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
        return None if room is None else max(0, room - self.channel.arrivals.ahead)

    def ack(self, delivery_tag: str) -> None:
        """Be done with a message, as soon as the notes are flushed."""
        self.channel.done.append(delivery_tag)
        self.channel.arrivals.free(delivery_tag)
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
        self.channel.arrivals.free(tag)
        with self.channel.conn_or_acquire(client) as found:
            self.channel.restorer.give_back(found, tag, last=leftmost)

    def restore_visible(self, start: int = 0, num: int = 10, interval: int = 10) -> None:
        """Deliver again what the dead have left; called now and then."""
        with self.channel.conn_or_acquire() as client:
            self.channel.restorer.restore(client, self.visibility_timeout)


class Channel(kombu_redis.Channel):
    """See the module's text."""

    QoS = QoS
    Message = messages.Message
    _brpop_sent_at: float | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: Tags that are noted as received, and not yet handed to :class:`QoS`.
        self.noted: set[str] = set()
        #: Tags of messages that are done with, and not yet noted so.
        self.done: list[str] = []
        #: What the engine's loop has taken.
        self.arrivals = Arrivals(self)
        self._notes: Notes | None = None
        #: None: not looked at yet, or the connection is another one; False: messages are taken as
        #: kombu does.
        self._taker: Taker | Literal[False] | None = None
        self._callback_of: dict[str, Any] = {}
        self._keys_of: dict[tuple[str, ...], list[str]] = {}
        super().__init__(*args, **kwargs)
        own = (self.unacked_key, self.unacked_index_key)
        self.restorer = Restorer(own, self._lists_of, self._set_aside)

    @property
    def notes(self) -> Notes:
        """The connection for commands nobody waits for; made on first use."""
        if self._notes is None:
            self._notes = Notes(self.pool)
        return self._notes

    def flush(self) -> None:
        """Send all notes. Raises as :meth:`Notes.flush`."""
        self.note_done()
        if self._notes is not None:
            self._notes.flush()

    def note_done(self) -> None:
        """Have it sent with what is sent next which messages are done with."""
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
            now = time.time()
            for tag, message in held.items():
                info = message.delivery_info
                record = kombu_json.dumps([message._raw, info["exchange"], info["routing_key"]])
                self.notes.add("ZADD", self.unacked_index_key, now, tag)
                self.notes.add("HSET", self.unacked_key, tag, record)
            self.renew(list(held))
        self.settle()

    def renew(self, tags: Sequence[str]) -> None:
        """Note that these messages are still held; one that is not any more stays away (XX)."""
        for at in range(0, len(tags), MOST_TAGS):
            some = tags[at : at + MOST_TAGS]
            self.notes.add("EVAL", RENEW, 1, self.unacked_index_key, *some)
        self.flush()

    def _lists_of(self, exchange: str, routing_key: str, message: dict[str, Any]) -> list[str]:
        priority = self._get_message_priority(message, reverse=False)
        return [self._q_for_pri(q, priority) for q in self._lookup(exchange, routing_key)]

    def _restore(self, message: Any, leftmost: bool = False) -> None:
        self.qos.restore_by_tag(message.delivery_tag, leftmost=leftmost)

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
        if self.arrivals.works:
            # Nothing is asked for here; it is read when the connection breaks.
            self._in_poll, self._brpop_sent_at = connection, None
            return
        self._brpop_sent_at = time.monotonic()
        taker = self._taker_of(connection)
        self._in_poll = connection
        if taker is not None:
            self._ask(taker, queues)
            return
        wait = timeout or self.brpop_timeout or 0
        command: Any = ("BRPOP", *self._keys(tuple(queues)), wait)
        command = hiredis.pack_command(command)
        connection.send_packed_command([command], check_health=False)

    def _taker_of(self, connection: Any) -> Taker | None:
        if self._taker is False:
            return None
        if self._taker is None or self._taker.socket is not connection._sock:
            try:
                self._taker = Taker(connection, f"{self.unacked_key}:none")
            except CannotTake as exc:
                logger.warning(
                    "messages are taken one by one, and one is lost if this worker is killed "
                    "before it has noted it: the broker refused %s",
                    exc,
                )
                self._taker = False
                return None
        return self._taker

    def _ask(self, taker: Taker, queues: Sequence[str]) -> None:
        room = self.qos.can_consume_max_estimate() or SHARE * MOST
        own = (self.unacked_key, self.unacked_index_key, self.undecodable_key)
        taker.ask((*own, *self._keys(tuple(queues))), max(1, min(MOST, room // SHARE)))

    def look_again(self) -> None:
        """Ask for messages though the server has not told of any; for a timer, and when the queues
        are others now.
        """
        if isinstance(self._taker, Taker) and not self._taker.asked:
            self._in_poll = None

    def _keys(self, queues: tuple[str, ...]) -> list[str]:
        keys = self._keys_of.get(queues)
        if keys is None:
            keys = [self._q_for_pri(q, p) for p in self.priority_steps for q in queues]
            self._keys_of[queues] = keys
        return keys

    def _brpop_read(self, **options: Any) -> bool:
        try:
            if self.arrivals.works:
                self._nothing_comes()
                raise Empty
            taken = self._taken() if self._taker else self._popped()
        except self.connection_errors:
            self._in_poll = None
            self.client.connection.disconnect()
            raise
        if taken is None:
            raise Empty
        if taken.undecodable:
            self.report(taken.undecodable, taken.queue)
        queue = taken.queue.rsplit(self.sep, 1)[0]
        self._queue_cycle.rotate(queue)
        for item in taken.messages:
            self._take(item, queue)
        return True

    def report(self, count: int, queue: str) -> None:
        """Say that messages were set aside."""
        logger.error(
            "%d messages of queue %s cannot be decoded; they lie in list %s",
            count, queue, self.undecodable_key,
        )  # fmt: skip

    def _nothing_comes(self) -> None:
        if not self.client.connection._sock.recv(1 << 16):
            raise ConnectionError("the broker closed the connection")

    def _taken(self) -> Taken | None:
        taker = self._taker
        assert isinstance(taker, Taker)
        taken = taker.settle() if self._closing else taker.read()
        queues = self._queue_cycle.consume(len(self.active_queues))
        if taken is None and taker.told and not taker.asked and queues and not self._closing:
            self._ask(taker, queues)
            taken = taker.read(PATIENCE)
        if taker.told and not taker.asked:
            self._in_poll = None
        # Until the server tells of something no answer is due.
        self._brpop_sent_at = time.monotonic() if taker.asked else None
        return taken

    def _popped(self) -> Taken | None:
        """kombu's way: note a message that has left its queue already."""
        try:
            answer = self.client.connection.read_response()
        finally:
            self._in_poll = None
            # kombu: the connection is idle now, and may log in anew.
            self._flush_brpop_reauth()
        if not answer:
            return None
        queue, item = answer[0].decode(), answer[1]
        try:
            message = messages.loads(item)
            properties = message["properties"]
            info = properties["delivery_info"]
            record = kombu_json.dumps([message, info["exchange"], info["routing_key"]])
            tag = str(properties["delivery_tag"])
        except (ValueError, LookupError, TypeError):
            self._set_aside(item)
            self.flush()
            return Taken(queue, [], 1)
        self.notes.add("ZADD", self.unacked_index_key, time.time(), tag)
        self.notes.add("HSET", self.unacked_key, tag, record)
        self.renew([tag])  # by the server's clock
        return Taken(queue, [item], 0)

    def _take(self, item: bytes, queue: str) -> None:
        self.deliver(messages.loads(item), queue)

    def deliver(self, raw: dict[str, Any], queue: str) -> None:
        """Deliver a message that is noted as received."""
        self.noted.add(raw["properties"]["delivery_tag"])
        self._guarded(partial(self._deliver_signed, raw, queue), raw, queue)

    def _deliver_signed(self, raw: dict[str, Any], queue: str) -> None:
        signing.check(raw)
        self.connection._deliver(raw, queue)

    def _guarded(self, deliver: Callable[[], object], raw: dict[str, Any], queue: str) -> None:
        """Deliver a message; set it aside if it is not what those expect who get it."""
        try:
            deliver()
        except (*self.connection_errors, *self.connection.channel_errors):
            raise
        except Exception as exc:  # whatever is wrong with this one, the next one may be right
            logger.error(
                "a message of queue %s cannot be taken (%s); it lies in list %s",
                queue, exc, self.undecodable_key,
                exc_info=None if isinstance(exc, signing.BadSignature) else exc,
            )  # fmt: skip
            tag = raw["properties"]["delivery_tag"]
            self._set_aside(kombu_json.dumps(raw).encode())
            self.noted.discard(tag)
            if tag in self.qos._delivered:
                self.qos.ack(tag)
            else:
                self.done.append(tag)
                self.arrivals.free(tag)
            self.flush()

    @property
    def undecodable_key(self) -> str:
        """List of what came by a queue and is no message."""
        return keys.undecodable()

    def set_aside(self, message: Any) -> None:
        """Keep a message that Celery cannot take apart from its queue."""
        self._set_aside(kombu_json.dumps(message._raw).encode())

    def _set_aside(self, item: bytes) -> None:
        self.notes.add("LPUSH", self.undecodable_key, item)
        self.notes.add("LTRIM", self.undecodable_key, 0, SET_ASIDE - 1)

    def deliver_ahead(self, message: messages.Message, queue: str) -> None:
        """Deliver a message that is noted as received, and is being worked on."""
        self.noted.add(message.delivery_tag)
        if queue in self.connection._callbacks:
            self.qos.append(message, message.delivery_tag)
            deliver = partial(self._callback_of[queue], message)
        else:  # not consumed from any more: it goes back
            deliver = partial(self.connection._deliver, message._raw, queue)
        self._guarded(deliver, message._raw, queue)

    def maybe_refresh_binding_expiry(self) -> None:
        """As kombu, which would log a traceback every second while the server's memory is full."""
        try:
            super().maybe_refresh_binding_expiry()
        except OutOfMemoryError as exc:
            logger.debug("bindings are renewed later: %s", exc)

    def take_by(self, intake: Intake, loop: EngineLoop, wake: Callable[[], object]) -> None:
        """As :meth:`Arrivals.take_by`, of the queues that are consumed from."""
        self.arrivals.take_by(intake, loop, wake)
        self._consume()

    def _consume(self) -> None:
        queues = self._queue_cycle.consume(len(self.active_queues))
        self.arrivals.consume(self._keys(tuple(queues)) if queues else ())

    def _receive(self) -> Any:
        # What Celery is asked about tasks, or told to do with them, is of all that run here.
        for channel in self.connection.channels:
            if isinstance(channel, Channel):
                channel.arrivals.hand_over()
        return super()._receive()

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Consume from a queue."""
        self._callback_of[queue] = callback
        self.look_again()
        answer = super().basic_consume(queue, no_ack, callback, consumer_tag, *args, **kwargs)
        self._consume()
        return answer

    def basic_cancel(self, consumer_tag: str) -> None:
        """Consume no more; what has been started is delivered before."""
        self.arrivals.pause()
        super().basic_cancel(consumer_tag)
        self.look_again()
        self._consume()

    def close(self) -> None:
        """Note what is still to be noted; then as kombu."""
        if not self.closed:
            self.arrivals.stop()
            if self.arrivals.works:
                self._in_poll = None  # no answer is due
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
        if self._taker is not False:
            self._taker = None
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

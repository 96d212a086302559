"""Messages that the engine's loop has taken, on their way to Celery on the hub's thread.

What can be worked on at once is, and Celery hears of it a moment later, with others; for the rest
the hub is woken to deliver it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger

from omniq import signing
from omniq_workers.messages import ACCEPT, Message, loads_leniently

if TYPE_CHECKING:
    from omniq.jobs.model import StageGrant
    from omniq_workers.intake import Intake, Slot
    from omniq_workers.loop import EngineLoop
    from omniq_workers.transport import Channel

logger = get_logger(__name__)

#: So long is waited for what is on its way when no more is to be taken.
PAUSE_SECONDS = 1.0


class Arrivals:
    """Of one channel. Its methods are the hub's, except for :meth:`arrive`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        #: Starts to work on a message; False: it has to be delivered first. On the engine's thread.
        self.start_ahead: Callable[[Message, Slot, StageGrant | None], bool] = _not_now
        #: Undoes the begin of a message's run, then calls its last argument. As above.
        self.give_back: Callable[[Message, StageGrant, Callable[[], None]], object] = _nothing
        #: Is told the tags of messages that were ahead, and of which Celery has heard now.
        self.handed: Callable[[list[str]], object] = _nothing
        self._ahead: deque[tuple[Message, str]] = deque()
        self._others: deque[tuple[dict[str, Any], str]] = deque()
        self._slots: dict[str, Slot] = {}
        self._loop: EngineLoop | None = None
        self._intake: Intake | None = None
        self._wake: Callable[[], object] = _nothing

    @property
    def works(self) -> bool:
        """Whether messages are taken this way."""
        return self._intake is not None

    @property
    def ahead(self) -> int:
        """How many messages are worked on that Celery has not heard of."""
        return len(self._ahead)

    # -- taking --------------------------------------------------------------------------------

    def take_by(self, intake: Intake, loop: EngineLoop, wake: Callable[[], object]) -> None:
        """Have messages taken by ``intake``, which has been started on ``loop``.

        Args:
            wake: has :meth:`hand_over` called soon, from any thread.
        """
        self._intake, self._loop, self._wake = intake, loop, wake

    def consume(self, lists: Sequence[str]) -> None:
        """Take messages off these lists."""
        if self._intake is not None and self._loop is not None:
            self._loop.call(self._intake.consume, lists)

    def pause(self) -> None:
        """Take no more; what was on its way has been handed over after this, if the loop turns."""
        if self._intake is not None and self._loop is not None:
            if self._loop.silence > PAUSE_SECONDS:
                self._loop.spawn(self._intake.pause())
            else:
                try:
                    self._loop.run(self._intake.pause(), timeout=PAUSE_SECONDS)
                except TimeoutError:
                    logger.warning("messages on their way to this worker may come again")
        self.hand_over()

    def stop(self) -> None:
        """The connection is gone, or going: what is on its way is delivered again."""
        if self._intake is not None and self._loop is not None:
            self._loop.call(self._intake.close)
        self.pause()

    def arrive(self, intake: Intake, item: bytes, name: str, grant: StageGrant | None) -> None:
        """Start to work on a message that is noted as received, or have it delivered before.

        On the engine's thread.
        """
        raw = loads_leniently(item)
        tag, queue = raw["properties"]["delivery_tag"], name.rsplit(self._channel.sep, 1)[0]
        slot = self._slots[tag] = intake.hold(tag)

        def other() -> None:
            self._others.append((raw, queue))
            self._wake()

        try:
            message = Message(raw, channel=self._channel, accept=ACCEPT)
            if _signed(raw) and self.start_ahead(message, slot, grant):
                self._ahead.append((message, queue))
                return
        except Exception:  # delivering it shows what is wrong, to those who set it aside
            logger.debug("message %s has to be delivered first", tag, exc_info=True)
            other()
        else:
            if grant is None:
                other()
            else:
                self.give_back(message, grant, other)

    # -- delivering ----------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Deliver what has been taken; what a channel that is closed has left comes again."""
        channel, tags = self._channel, []
        while self._ahead and not channel.closed:
            message, queue = self._ahead.popleft()
            tags.append(message.delivery_tag)
            channel.deliver_ahead(message, queue)
        if tags:
            self.handed(tags)
        while self._others and not channel.closed:
            channel.deliver(*self._others.popleft())

    def free(self, tag: str) -> None:
        """A message takes up no room any more."""
        slot = self._slots.pop(tag, None)
        if slot is not None and slot.intake.holds(tag) and self._loop is not None:
            self._loop.call(slot.free)


def _signed(raw: dict[str, Any]) -> bool:
    try:
        signing.check(raw)
    except signing.BadSignature:
        return False  # those who deliver it set it aside
    return True


def _not_now(*_: object) -> bool:
    """Until there is somebody who starts to work on messages."""
    return False


def _nothing(*_: object) -> None:
    """Until there is somebody to be told."""

"""A stage worker's messages, taken on the engine's loop: the shortest way between two stages.

A worker with room for more messages than lie in its queues makes itself known for it: it has a
*place* in a sorted set, whose score is the room that is left. The script that sends a stage's
message looks there first. Instead of pushing it to the queue it may *hand* it to such a worker: it
notes the message as unacknowledged, begins the run in that worker's name, and publishes message and
grant to the worker's channel. Nothing else has to be asked before the engine runs, and whatever
happens to the worker, the message lies where kombu looks for what the dead have left.

What lies in the queues, because nobody had room or others than omniq have sent it, is taken by
``take.lua``, which also says how much room is left. The server tells when a queue that was found
empty changes.

Room is counted twice: here what is *known* of it, there the score. Every step changes both by the
same amount, so that in whatever order the answers come, the difference is what is on its way.

A connection that breaks takes its place with it: the next one has another name. A worker that
stands still is not handed anything once it has not said for ``HEARS`` seconds that it hears.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from celery.utils.log import get_logger
from redis.exceptions import ConnectionError, RedisError

from omniq import keys
from omniq.jobs.frames import unframed
from omniq.jobs.model import StageGrant
from omniq.jobs.stage_runs import read_grant
from omniq.redis_client import UNAVAILABLE, Client, line
from omniq_workers.take import DIGEST, MOST, SHARE, SOURCE

logger = get_logger(__name__)

#: The queues are looked at, and the place is renewed, so often, in seconds.
LOOK_AGAIN = 1.0
#: A worker that has not renewed its place for so many seconds is passed over.
HEARS = 3.0
RECONNECT_SECONDS = 0.3


@dataclass(eq=False, slots=True)
class Slot:
    """The part of a worker's room that one message takes up, until it is given back."""

    intake: Intake
    tag: str
    #: The place of which the message's last script was told.
    told: str = ""

    def place(self) -> tuple[str, str]:
        """What the script that ends the run is told, so that the slot is known to be free again."""
        self.told = self.intake.member_for_more()
        return (self.intake.waiting, self.told) if self.told else ("", "")

    def free(self, *, known: bool = False) -> None:
        """The message takes up room no more; ``known``: those who send know it already."""
        self.intake.free(self.tag, self.told if known else "")

    def forget(self) -> None:
        """It is not certain whether those who send know."""
        if self.told:
            self.intake.renew()


class Intake:
    """All methods are called on the loop, which may be asked from elsewhere to do so.

    Args:
        client: of the broker.
        queue: the stage's; the worker may consume from others as well.
        own: keys of the unacknowledged messages (two), and of what cannot be decoded.
        room: the most messages at once; 0: any number.
        arrive: takes a message as it was sent, the list it was in, and its run if that has begun;
            to call :meth:`hold`.
        undecodable: is told how many of a list's messages were set aside.
    """

    def __init__(
        self,
        client: Client,
        queue: str,
        worker: str,
        *,
        max_deliveries: int,
        own: Sequence[str],
        room: Callable[[], int],
        arrive: Callable[[Intake, bytes, str, StageGrant | None], object],
        undecodable: Callable[[int, str], object],
    ) -> None:
        self.waiting = keys.waiting(queue)
        self._worker, self._max_deliveries, self._own = worker, max_deliveries, own
        self._queue, self._room = queue, room
        self._arrive, self._undecodable = arrive, undecodable
        self._lists: Sequence[str] = ()
        self._held: set[str] = set()
        self._known = 0
        #: Name of the place, while the connection is there.
        self._member = ""
        self._asked = False
        self._answer: asyncio.Future[None] | None = None
        #: Whether a queue has, or may have, messages.
        self._told = True
        self._timer: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None
        self._closed = False
        self._line = line(
            client,
            greeting=[("CLIENT", "TRACKING", "ON", "NOLOOP"), ("SCRIPT", "LOAD", SOURCE)],
            on_push=self._pushed,
            on_lost=self._lost,
        )

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen; messages come from :meth:`consume` on.

        Raises:
            redis.exceptions.RedisError: the server cannot be reached, or refuses to tell.
        """
        member = f"{self._worker}|{uuid4().hex[:12]}"
        await self._clear_places()
        await self._line.subscribe(keys.hand_channel(member))
        if not self._line.connected:
            raise ConnectionError("the connection to the broker has ended")
        self._member = member
        self._known, self._asked, self._told = 0, False, True
        self._look_again()

    async def _clear_places(self) -> None:
        """Remove the places of this worker's earlier connections, and of workers that are gone: one
        without room is nobody else's to find (``who_waits``), and would stay for ever. One that
        only stood still takes another.
        """
        gone = []
        for place in await self._line.ask("ZRANGE", self.waiting, 0, -1):
            member = place.decode()
            own = member.rpartition("|")[0] == self._worker
            if own or not await self._line.ask("EXISTS", keys.hears(member)):
                gone.append(member)
        if gone:
            await self._line.ask("ZREM", self.waiting, *gone)

    def consume(self, lists: Sequence[str]) -> None:
        """Take messages off these lists from now on, the first ones first."""
        self._lists = lists
        self._told = True
        self._look()

    async def pause(self) -> None:
        """Take no more messages; those that were on their way have arrived after this."""
        self._lists = ()
        if self._asked:
            self._answer = asyncio.get_running_loop().create_future()
            await self._answer
        if self._line.connected and self._member:
            try:
                await self._line.ask("ZREM", self.waiting, self._member)
            except UNAVAILABLE as exc:
                logger.warning("messages on their way to this worker come again: %s", exc)
        if not self._lists:  # nothing was asked for meanwhile
            self._known = 0

    def renew(self) -> None:
        """Give up the connection, and with it the place; go on with another one."""
        self._line.close()

    def close(self) -> None:
        """Give up the connection. What was on its way on it is delivered again."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._opening is not None:
            self._opening.cancel()
        self._line.close()

    # -- room ----------------------------------------------------------------------------------

    def _free(self) -> int:
        return (self._room() or SHARE * MOST) - len(self._held)

    def member_for_more(self) -> str:
        """The place to be told that one message less is here; '' if messages wait in the queues."""
        wanted = self._lists and not self._told and self._free() >= self._known
        return self._member if wanted else ""

    def free(self, tag: str, member: str = "") -> None:
        """A message takes up room no more, which the place ``member`` knows already."""
        if tag in self._held:
            self._held.discard(tag)
            if member and member == self._member:
                self._known += 1
            self._look()

    def hold(self, tag: str) -> Slot:
        """A message takes up room."""
        self._held.add(tag)
        return Slot(self, tag)

    def holds(self, tag: str) -> bool:
        """Whether a message takes up room; from any thread."""
        return tag in self._held

    # -- taking --------------------------------------------------------------------------------

    def _look_again(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN, self._look_again)
        self._told = True
        self._look(renew=True)

    def _look(self, *, renew: bool = False) -> None:
        """Ask for messages if there may be some, or if there is room that nobody knows of."""
        if self._asked or not self._lists or not self._member or not self._line.connected:
            return
        free = self._free()
        if not renew and (free <= 0 or not (self._told or free > self._known)):
            return
        self._asked, self._told = True, False
        most = max(0, min(MOST, max(1, free // SHARE), free))
        place = (
            self.waiting, self._member, keys.hears(self._member), int(HEARS * 1000),
            self._max_deliveries, free, self._known,
        )  # fmt: skip
        count = len(self._own) + len(self._lists)
        self._line.send(
            self._answered, "EVALSHA", DIGEST, count, *self._own, *self._lists,
            most, *place,
        )  # fmt: skip

    def _answered(self, answer: Any) -> None:
        self._asked = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)
        if isinstance(answer, UNAVAILABLE):
            return  # the connection is gone
        if isinstance(answer, Exception):
            logger.warning("messages were not taken, trying on another connection: %s", answer)
            asyncio.get_running_loop().call_later(RECONNECT_SECONDS, self.renew)
            return
        empty, undecodable, name, more, *messages = answer
        self._known += more
        if not empty:
            self._told = True
        if undecodable:
            self._undecodable(undecodable, name.decode())
        for item in messages:
            self._arrive(self, item, name.decode(), None)
        self._look()

    def _pushed(self, push: list[Any]) -> None:
        """What the server says unasked."""
        kind = push[0]
        if kind == b"message":
            self._known -= 1
            item, *grant = unframed(push[2])
            self._arrive(self, item, self._queue, read_grant(grant))
        elif kind == b"invalidate":
            self._told = True
            self._look()

    # -- the connection breaks -----------------------------------------------------------------

    def _lost(self, reason: Exception) -> None:
        self._member, self._known, self._asked = "", 0, False
        if not self._closed and (self._opening is None or self._opening.done()):
            self._opening = asyncio.create_task(self._reopen())

    async def _reopen(self) -> None:
        while True:
            try:
                await self.start()
            except RedisError as exc:
                logger.warning("no messages are taken: %s", exc)
                self._line.close()
                await asyncio.sleep(RECONNECT_SECONDS)
            else:
                return

"""Following jobs: every watcher of a process behind one Redis connection.

The server is asked to tell when a stream that has been read here changes (``CLIENT TRACKING``).
Each change costs one short message and one read of what is new, whoever wrote it and however many
streams are watched; nothing blocks on the server, and leaving a stream costs nothing at all. What
was read is decoded once and handed to all watchers of that job.

A watcher first reads its own backlog, then takes what is handed out. The ids of a stream grow, so
whatever comes twice is dropped and nothing can be missed: reading and being told of the next
change is one step on the server. One that does not keep up loses its buffer, not its place: it
reads its backlog again.

Who waits for a job's end only is told of nothing else: it is noted in the record by the name of a
channel, and the script that ends the job sends the final record there. Who knows before the job is
recorded that it will be waited for has it noted by the script that records it, and saves asking.

A server that does not tell (an old one, or one whose access rules refuse ``CLIENT TRACKING`` or
``SUBSCRIBE``) is asked every ``POLL`` seconds instead.

Watchers wait on asyncio futures only; cancelling one leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any
from uuid import uuid4

from redis.exceptions import ResponseError

from omniq import keys
from omniq.errors import JobNotFound
from omniq.jobs.frames import unframed
from omniq.jobs.model import JobEvent, JobState
from omniq.jobs.watcher import Entry, Feed, Fields, Order, Watch, parse_id, read_entry
from omniq.redis_client import Client, broker_errors, line

logger = logging.getLogger(__name__)

PAGE = 200
"""Events read at once."""
LINGER = 0.25
"""Seconds the connection stays open without watchers."""
SILENCE = 15.0
"""Seconds after which a watcher looks whether nothing has really happened."""
EXPECTED = 5.0
"""Seconds within which somebody has to wait for a job that was expected to be waited for."""
POLL = 0.25
"""The same where the server does not tell of changes."""

Look = Callable[[str, str], Awaitable[Fields | float]]
"""Called with a job's id and a channel, or '': the job's hash if it has ended, else the channel is
noted and the answer is in how many seconds to look again (at its deadline; or infinity). Raises
:class:`~omniq.errors.JobNotFound` and :class:`~omniq.errors.BrokerUnavailable`.
"""


class Watching:
    """All watchers of one process (strictly: of one event loop)."""

    def __init__(self, redis: Client, look: Look) -> None:
        self._redis, self._look = redis, look
        self._feeds: dict[bytes, Feed] = {}
        #: Who waits for jobs' ends, by their ids.
        self._ends: dict[str, set[Watch]] = {}
        #: Of those, who has been noted already and does not wait yet.
        self._expected: dict[str, tuple[Watch, asyncio.TimerHandle]] = {}
        self._channel = keys.end_channel(uuid4().hex)
        self._listens = self._deaf = False
        self._due: list[Feed] = []
        self._closing: asyncio.TimerHandle | None = None
        self._stopped = False
        self._line = line(
            redis,
            greeting=[("CLIENT", "TRACKING", "ON")],
            on_push=self._told,
            on_lost=self._lost,
            on_refused=self._refused,
        )
        self._polls = False

    def stop(self) -> None:
        """End every watch as if it had run out of time; for a server that stops."""
        self._stopped = True
        for watches in (*self._ends.values(), *(f.watches for f in self._feeds.values())):
            for watch in watches:
                watch.stopped = True
                watch.wake()

    def close(self) -> None:
        """Close the connection; whoever still watches gets :class:`BrokerUnavailable`."""
        if self._closing is not None:
            self._closing.cancel()
        self._line.close()

    # -- for watchers --------------------------------------------------------------------------

    async def events(
        self, job_id: str, after: str = "0", *, block: float = SILENCE
    ) -> AsyncGenerator[JobEvent | None]:
        """See :meth:`omniq.jobs.store.JobStore.events`."""
        watch = Watch(parse_id(after))
        watch.heard = asyncio.get_running_loop().time()
        feed = self._join(job_id, watch)
        try:
            while not watch.stopped:
                if watch.behind:
                    # Live events are kept from here on, so none falls between them and the backlog.
                    watch.restart()
                    page = await self._backlog(feed, watch.last)
                    watch.behind = watch.behind or len(page) == PAGE
                    for entry in page:
                        watch.last = entry.order
                        watch.heard = asyncio.get_running_loop().time()
                        yield entry.event
                        if entry.event.final:
                            return
                    if not page and await self._ended(job_id):
                        if not await self._backlog(feed, watch.last):
                            return
                        watch.behind = True
                    continue
                while (live := watch.next()) is not None:
                    if live.order > watch.last:
                        watch.last = live.order
                        yield live.event
                    if live.event.final:
                        return
                self._check(watch)
                if not await self._news(watch, block):
                    yield None
                    watch.behind = True  # whatever was said and not heard is read now
        finally:
            self._leave(feed, watch)

    async def expect(self, job_id: str, left: float) -> str:
        """Be ready for the end of a job that is recorded next, for which :meth:`ended` will wait.

        ``left``: seconds until its deadline, or infinity.
        Returns the channel to be noted; '' if the server lets nobody listen.

        Raises:
            BrokerUnavailable: no connection.
        """
        watch = Watch((0, 0))
        self._stay(watch)
        watches = self._ends.setdefault(job_id, set())
        watches.add(watch)
        try:
            await self._listen()
        except BaseException:
            self._leave_end(job_id, watch)
            raise
        if self._deaf:
            self._leave_end(job_id, watch)
            return ""
        watch.restart()
        loop = asyncio.get_running_loop()
        watch.due = loop.time() + left
        timer = loop.call_later(EXPECTED, self.forget, job_id)
        self._expected[job_id] = watch, timer
        return self._channel

    def forget(self, job_id: str) -> None:
        """Nobody will wait for a job that was expected to be waited for."""
        watch = self._claim(job_id)
        if watch is not None:
            self._leave_end(job_id, watch)

    def _claim(self, job_id: str) -> Watch | None:
        watch, timer = self._expected.pop(job_id, (None, None))
        if timer is not None:
            timer.cancel()
        return watch

    def _leave_end(self, job_id: str, watch: Watch) -> None:
        watches = self._ends[job_id]
        watches.discard(watch)
        if not watches:
            del self._ends[job_id]
        self._go_idle()

    async def ended(self, job_id: str, timeout: float | None = None) -> Fields | None:
        """The hash of a job that has ended. None: it has not within ``timeout``, or this stops.

        Raises:
            JobNotFound: unknown job.
            BrokerUnavailable: the broker went away.
        """
        loop = asyncio.get_running_loop()
        end = float("inf") if timeout is None else loop.time() + timeout
        watch = self._claim(job_id)
        noted = watch is not None
        if watch is None:
            watch = Watch((0, 0))
            self._stay(watch)
            self._ends.setdefault(job_id, set()).add(watch)
        try:
            if watch.error is not None:  # the connection broke before anybody waited
                noted, watch.error = False, None
            while not watch.stopped:
                if watch.record is not None:
                    return watch.record
                if not noted:
                    watch.restart()
                    await self._listen()
                    found = await self._look(job_id, "" if self._deaf else self._channel)
                    if not isinstance(found, float):
                        return found
                    # Past it the worker that runs the job sees to its end.
                    watch.due = loop.time() + max(found, POLL)
                noted = False
                if (left := end - loop.time()) <= 0:
                    return None
                due = max(0.0, watch.due - loop.time())
                await watch.news(min(POLL if self._deaf else SILENCE, left, due))
                self._check(watch)
            return None
        finally:
            self._leave_end(job_id, watch)

    async def _listen(self) -> None:
        if self._listens or self._deaf:
            return
        try:
            with broker_errors():
                await self._line.subscribe(self._channel)
        except ResponseError as exc:
            logger.warning("the broker lets nobody listen, jobs are polled: %s", exc)
            self._deaf = True
        else:
            self._listens = True

    async def _news(self, watch: Watch, timeout: float) -> bool:
        """As :meth:`Watch.news`; looks now and then where nobody tells."""
        if not self._polls:
            return await watch.news(timeout)
        if await watch.news(min(POLL, timeout)):
            return True
        watch.behind = True
        now = asyncio.get_running_loop().time()
        if now - watch.heard < timeout:
            return True
        watch.heard = now
        return False

    def _stay(self, watch: Watch) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        watch.stopped = self._stopped

    def _join(self, job_id: str, watch: Watch) -> Feed:
        self._stay(watch)
        key = keys.job_events(job_id).encode()
        feed = self._feeds.get(key)
        if feed is None:
            feed = self._feeds[key] = Feed(key)
        feed.watches.add(watch)
        return feed

    def _leave(self, feed: Feed, watch: Watch) -> None:
        feed.watches.discard(watch)
        if not feed.watches and self._feeds.get(feed.key) is feed:
            del self._feeds[feed.key]
        self._go_idle()

    def _go_idle(self) -> None:
        if not self._feeds and not self._ends and self._closing is None:
            self._closing = asyncio.get_running_loop().call_later(LINGER, self._idle)

    def _idle(self) -> None:
        self._closing = None
        if not self._feeds and not self._ends:
            self._line.close()

    def _check(self, watch: Watch) -> None:
        if watch.error is not None:
            with broker_errors():
                raise watch.error

    async def _ended(self, job_id: str) -> bool:
        """Whether the job has ended.

        Raises:
            JobNotFound: there is none.
        """
        with broker_errors():
            state = await self._redis.hget(keys.job(job_id), "state")
        if state is None:
            raise not_found(job_id)
        return JobState(state.decode()).final

    # -- reading -------------------------------------------------------------------------------

    async def _backlog(self, feed: Feed, last: Order) -> list[Entry]:
        """Up to ``PAGE`` events behind ``last``."""
        with broker_errors():
            await self._connected()
            if feed.last is None:
                self._line.send(partial(self._started, feed), *_tail(feed))
            found = await self._line.ask(
                "XREAD", "COUNT", PAGE, "STREAMS", feed.key, f"{last[0]}-{last[1]}"
            )
        return [read_entry(*row) for row in found[feed.key]] if found else []

    async def _connected(self) -> None:
        if not self._line.connected:
            await self._line.ask("PING")

    def _started(self, feed: Feed, tail: Any) -> None:
        # Called with the answer itself, before any word of a later change is looked at.
        if feed.last is None and not isinstance(tail, Exception):
            feed.last = tail[0][0] if tail else b"0-0"

    def _told(self, message: list[Any]) -> None:
        """The server says which streams have changed; None: it may be any."""
        kind, changed = message[0], message[1] if len(message) > 1 else None
        if kind == b"message":
            self._tell_end(message[2])
        if kind != b"invalidate":
            return
        for key in tuple(self._feeds) if changed is None else changed:
            feed = self._feeds.get(key)
            if feed is not None:
                self._changed(feed)

    def _tell_end(self, data: bytes) -> None:
        job_id, *fields = unframed(data)
        watches = self._ends.get(job_id.decode())
        if watches:
            record = dict(zip(fields[::2], fields[1::2], strict=True))
            for watch in watches:
                watch.record = record
                watch.behind = True
                watch.wake()

    def _changed(self, feed: Feed) -> None:
        feed.changed = True
        if feed.reading or feed.last is None:
            return
        feed.reading = True
        if not self._due:
            asyncio.get_running_loop().call_soon(self._read)
        self._due.append(feed)

    def _read(self) -> None:
        """Read what is new in all streams that have changed, with one command."""
        feeds, self._due = self._due, []
        for feed in feeds:
            feed.changed = False
        streams = [f.key for f in feeds]
        ids = [f.last or b"0-0" for f in feeds]
        self._line.send(
            partial(self._arrived, feeds), "XREAD", "COUNT", PAGE, "STREAMS", *streams, *ids
        )

    def _arrived(self, feeds: list[Feed], found: Any) -> None:
        if isinstance(found, Exception):
            self._end(feeds, found)
            return
        for feed in feeds:
            feed.reading = False
            rows = found.get(feed.key, ()) if found else ()
            for row in rows:
                entry = read_entry(*row)
                for watch in feed.watches:
                    watch.hand(entry)
            if rows:
                feed.last = rows[-1][0]
            if len(rows) == PAGE or feed.changed:
                self._changed(feed)

    def _lost(self, reason: Exception) -> None:
        self._listens = False
        feeds, self._feeds = list(self._feeds.values()), {}
        self._end(feeds, reason)
        for watches in self._ends.values():
            _fail(watches, reason)

    def _refused(self, reason: Exception) -> None:
        if not self._polls:
            logger.warning("the broker does not tell of changes, jobs are polled: %s", reason)
        self._polls = True

    def _end(self, feeds: list[Feed], reason: Exception) -> None:
        for feed in feeds:
            if self._feeds.get(feed.key) is feed:
                del self._feeds[feed.key]
            _fail(feed.watches, reason)


def not_found(job_id: str) -> JobNotFound:
    """The error for a job nobody knows."""
    return JobNotFound(f"no job {job_id!r}: it never existed, or its retention has passed")


def _fail(watches: set[Watch], reason: Exception) -> None:
    for watch in watches:
        watch.error = type(reason)(*reason.args)
        watch.wake()


def _tail(feed: Feed) -> tuple[Any, ...]:
    return "XREVRANGE", feed.key, "+", "-", "COUNT", 1

"""A Celery worker pool with one resident engine and many tasks in flight.

Three threads:

* *hub*, the worker's main thread: ``on_apply`` accepts a task and has its coroutine started; time
  limits fire, and acknowledgements and events are sent, here, where Celery keeps unlocked state;
* *engine*, the asyncio loop that owns the engine and runs every body; stages' messages arrive here,
  and are worked on before Celery has heard of them;
* *finisher*: when a body has ended, Celery's own tracer runs with the outcome already known, so
  that results, continuation of chains, retries and hooks are Celery's code and not a copy of it. It
  may wait for the broker; where it has nothing to send or store it runs on the hub's thread.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from billiard.einfo import ExceptionInfo
from celery import states
from celery.concurrency.base import BasePool
from celery.exceptions import Ignore, Reject, WorkerShutdown
from celery.platforms import EX_FAILURE, EX_OK
from celery.utils.log import get_logger
from celery.worker import state as worker_state
from kombu.exceptions import OperationalError

from omniq.publish import STAGE
from omniq.settings import get_settings
from omniq.tasks import EngineTask, current_flight
from omniq_workers.flight import Delivery, Flight, Stop
from omniq_workers.loop import EngineLoop, Interrupted
from omniq_workers.tracers import Tracers

if TYPE_CHECKING:
    from omniq.jobs.model import StageGrant
    from omniq_workers.intake import Slot

logger = get_logger(__name__)

#: After the drain time, bodies that were told to stop get so long to do it.
RETURN_SECONDS = 0.7
#: In place of an outcome: the tracer has still to run, and waits for nothing, or may wait.
_TRACE_HERE, _TRACE_ASIDE = object(), object()
#: Celery hears of a task that started ahead of it, and of one that ended with nothing left to send,
#: so many seconds later: with others, in one turn of the hub's loop.
LATER = 0.05


class CannotStart(Exception):
    """The service cannot serve; log and registry say why."""


class Service(Protocol):
    """What lives on the pool's loop beside the tasks: the engine and what surrounds it."""

    @property
    def max_in_flight(self) -> int:
        """Most tasks at once."""

    async def start(self) -> None:
        """Called before the first task.

        Raises:
            CannotStart: the worker has to end.
        """

    async def draining(self) -> None:
        """Called when the worker takes no more tasks; those it has get some time to end."""


class EnginePool(BasePool):
    """``worker_pool = "omniq_workers.pool:EnginePool"``; see the module's text.

    ``app.service``, if the application has one, is started on the loop before the worker consumes.
    """

    body_can_be_buffer = True
    signal_safe = False
    task_join_will_block = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flights: set[Flight] = set()
        self.max_in_flight = 0
        self.stopping = False
        #: Called every now and then on the hub's thread while the worker drains.
        self.while_draining: list[Callable[[], object]] = []
        self.loop = EngineLoop()
        self.hub: Any = None
        self._connection = 0
        self._here, self._aside = Tracers(quiet=True), Tracers(quiet=False)
        self._settled: queue.SimpleQueue[tuple[Flight, Any]] = queue.SimpleQueue()
        #: Tasks that run already, by delivery tag, and that Celery has still to hear of. The
        #: delivery need not be the newest: another one may have been adopted before.
        self._ahead: dict[str, tuple[Flight, Delivery]] = {}
        #: A call of :meth:`_wake` is due; used on the engine's thread only.
        self._waking = False
        #: Gives Celery the messages it has still to hear of; on the hub's thread.
        self.hand_over: Callable[[], object] = _nothing
        #: Calls its argument, and sends the acknowledgements and events that came of it.
        self.tell_after: Callable[[Callable[[], object]], object] = _nothing

    @property
    def room(self) -> int:
        """Most tasks in flight."""
        return self._service.max_in_flight if self._service is not None else 1

    # -- life cycle --------------------------------------------------------------------------

    def on_start(self) -> None:
        """Start the threads, then the service; only then the worker goes on to consume."""
        self._finisher = ThreadPoolExecutor(1, thread_name_prefix="finisher")
        self.loop.start()
        self._service: Service | None = getattr(self.app, "service", None)
        try:
            if self._service is not None:
                self.loop.run(self._service.start(), interrupted=_told_to_stop)
        except CannotStart as exc:
            raise WorkerShutdown(EX_FAILURE) from exc
        except Interrupted as exc:
            raise WorkerShutdown(EX_OK) from exc
        # Only now: loading may hold Python's lock for long.
        self.loop.watch(get_settings().hang_timeout)

    def wake_hub(self) -> None:
        """Have the hub look at once whether it shall stop; safe in a signal handler."""
        self.loop.call(lambda: self.hub is not None and self.hub.call_soon(_nothing))

    def register_with_event_loop(self, hub: Any) -> None:
        """The hub's loop starts, at first or again after the broker connection was lost."""
        self.hub = hub

    def connection_lost(self) -> None:
        """What was delivered so far can no longer be acknowledged; it will be delivered again."""
        self._connection += 1

    def on_stop(self) -> None:
        """Let running tasks end, then give back the rest. Runs on the hub's thread, hub stopped."""
        self._drain(get_settings().drain_seconds)

    def on_terminate(self) -> None:
        """Give back everything at once."""
        self._drain(0.0)

    def _drain(self, seconds: float) -> None:
        self.stopping = True
        if self._service is not None:
            self.loop.spawn(self._service.draining())
        if worker_state.should_stop:  # an exit code: the engine is dead
            seconds = 0.0
        if self.flights and seconds:
            logger.info("draining: %d tasks get %.1f s to end", len(self.flights), seconds)
        self._settle_for(seconds)
        if self.flights:
            logger.info("returning %d tasks to their queues", len(self.flights))
            for flight in tuple(self.flights):
                flight.stop(Stop.RETURN)
            self._settle_for(RETURN_SECONDS)
        for flight in tuple(self.flights):
            logger.warning("task %s did not stop in time; its message is returned", flight.id)
        self._finisher.shutdown(wait=False)

    def _settle_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.flights and (left := deadline - time.monotonic()) > 0:
            try:
                settled = self._settled.get(timeout=min(left, 0.5))
            except queue.Empty:
                for tick in self.while_draining:
                    tick()
                continue
            self._settle(*settled)

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """All tasks share this process; :meth:`Flight.terminate` does the work."""

    def flush(self) -> None:
        """Celery's hook on connection loss; running tasks go on."""

    # -- accepting (hub thread) --------------------------------------------------------------

    def on_apply(  # noqa: PLR0917 - Celery's signature
        self,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        callback: Any = None,
        accept_callback: Any = None,
        soft_timeout: float | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> Flight:
        """Take one task; returns at once."""
        name, uuid = args[0], args[1]
        request = callback.__self__  # the callbacks are methods of Celery's request
        ahead = self._ahead.pop(request.message.delivery_tag, None)
        if ahead is not None:
            flight, delivery = ahead
            delivery.accept(args, request)
            accept_callback(os.getpid(), flight.started)
            self._limits(flight, soft_timeout, timeout)
            return flight
        delivery = Delivery.accepted(args, request, self._connection)
        running = self._adopting(uuid, delivery)
        if running is not None:
            logger.info("task %s was delivered again and still runs here: adopted", uuid)
            running.deliveries.append(delivery)
            accept_callback(os.getpid(), running.started)
            return running
        flight = Flight(self, self.app.tasks[name], uuid, [delivery])
        # May find that the task was revoked while it waited, and call the request's terminate().
        accept_callback(os.getpid(), flight.started)
        self._add(flight)
        if not isinstance(flight.task, EngineTask) or self._already_done(flight):
            self._finisher.submit(self._finish, flight)
            return flight
        self._limits(flight, soft_timeout, timeout)
        self.loop.call(self._spawn, flight)
        return flight

    def start_ahead(self, message: Any, slot: Slot, grant: StageGrant | None) -> bool:
        """Start a stage's task before Celery has heard of it, which takes a while.

        Celery hears of it by :attr:`hand_over`. False: it has to decide first. On the engine's
        thread.

        Args:
            grant: the task's run, if it has begun.
        """
        headers = message.headers or {}
        uuid, name = headers.get("id", ""), headers.get("task")
        if (
            name != STAGE
            or self._service is None
            or self.stopping
            or message.content_type not in message.accept
            or headers.get("eta") is not None
            or headers.get("expires") is not None
            or headers.get("stamped_headers")
            or any(headers.get("timelimit") or ())
            or uuid in worker_state.revoked
            or self.limited(name)
            or any(f.id == uuid for f in tuple(self.flights))
        ):
            return False
        delivery = Delivery(message, self._connection)
        flight = Flight(self, self.app.tasks[name], uuid, [delivery], slot=slot, grant=grant)
        self._add(flight)
        self._ahead[message.delivery_tag] = flight, delivery
        self._spawn(flight)
        self._wake_later()
        return True

    def give_back(self, message: Any, grant: StageGrant, then: Callable[[], None]) -> None:
        """Undo the begin of a run that is not to start ahead of Celery. On the engine's thread."""

        async def undo() -> None:
            try:
                _, kwargs, _ = message.payload
                await self.app.stage_runner.give_back(kwargs["job"], kwargs["stage"], grant)
            finally:
                then()

        self.loop.spawn(undo())

    def handed(self, tags: list[str]) -> None:
        """Celery has heard of these messages, whose tasks were ahead of it."""
        for tag in tags:
            ahead = self._ahead.pop(tag, None)
            if ahead is not None:  # it has dropped it: it was revoked before
                ahead[0].stop(Stop.REVOKED)

    def limited(self, name: str) -> bool:
        """Whether Celery limits the rate of these tasks; set by the consumer."""
        return False

    def _add(self, flight: Flight) -> None:
        self.flights.add(flight)
        self.max_in_flight = max(self.max_in_flight, len(self.flights))

    def _adopting(self, uuid: str, delivery: Delivery) -> Flight | None:
        """The running task that this delivery repeats.

        When the broker connection breaks, or this worker's lease lapses, the broker delivers again
        what still runs here. The body is not started twice; it settles its newest delivery.
        """
        if not delivery.redelivered:
            return None
        return next((f for f in tuple(self.flights) if f.id == uuid and not f.dropped), None)

    def _already_done(self, flight: Flight) -> bool:
        """A redelivered task whose result is stored: the tracer only repeats its continuation."""
        if flight.task.ignore_result or not flight.delivery.redelivered:
            return False
        done = flight.task.AsyncResult(flight.id).state == states.SUCCESS
        return done and bool(self.app.conf.worker_deduplicate_successful_tasks)

    def _limits(self, flight: Flight, soft: float | None, hard: float | None) -> None:
        self._limit(flight, soft or self.options.get("soft_timeout"), Stop.SOFT_LIMIT)
        self._limit(flight, hard or self.options.get("timeout"), Stop.HARD_LIMIT)

    def _limit(self, flight: Flight, seconds: float | None, why: Stop) -> None:
        if seconds:
            flight.timers.append(self.hub.call_later(seconds, self._expire, flight, seconds, why))

    def _expire(self, flight: Flight, seconds: float, why: Stop) -> None:
        if flight in self.flights and not flight.dropped and not flight.ended:
            flight.delivery.celery.on_timeout(why is Stop.SOFT_LIMIT, seconds)
            flight.stop(why)

    # -- running (engine thread) -------------------------------------------------------------

    def _spawn(self, flight: Flight) -> None:
        if flight.stopped is not None:
            flight.end(None)
            self._settle_soon(flight, _TRACE_ASIDE)
            return
        flight.future = self.loop.loop.create_task(self._body(flight), name=flight.id)
        flight.future.add_done_callback(lambda future: self._ended(flight, future))

    async def _body(self, flight: Flight) -> Any:
        """A payload or call that does not fit the task fails as the body's own error."""
        current_flight.set(flight)  # of this task's own context
        args, kwargs, _ = flight.delivery.payload
        return await flight.task.run(*args, **kwargs)

    def _ended(self, flight: Flight, future: Any) -> None:
        flight.end(future)
        if not flight.light:
            self._settle_soon(flight, _TRACE_ASIDE)
        elif flight.slot is not None:
            flight.slot.free()
            self._settled.put((flight, _TRACE_HERE))
            self._wake_later()
        else:  # others wait for its place
            self._settle_soon(flight, _TRACE_HERE)

    def _wake_later(self) -> None:
        if not self._waking:
            self._waking = True
            self.loop.loop.call_later(LATER, self._wake)

    def _wake(self) -> None:
        self._waking = False
        if self.hub is not None:
            self.hub.call_soon(self._catch_up)

    # -- finishing (finisher thread, or the hub's) ---------------------------------------------

    def _finish(self, flight: Flight) -> None:
        self._settle_soon(flight, self._outcome(flight, self._aside))

    def _settle_soon(self, flight: Flight, outcome: Any) -> None:
        self._settled.put((flight, outcome))
        if self.hub is not None:
            self.hub.call_soon(self._settle_all)

    def _outcome(self, flight: Flight, tracers: Tracers) -> Any:
        returned = flight.stopped is Stop.RETURN and flight.failed
        if flight.dropped or returned or flight.delivery.celery is None:
            return None
        try:
            return self._trace(flight, tracers)
        except Exception:  # reported to Celery, whatever it is
            return ExceptionInfo()

    def _trace(self, flight: Flight, tracers: Tracers) -> Any:
        uuid, request = flight.delivery.target[1:3]
        tracer = tracers.of(flight.task, request["hostname"])
        args, kwargs, _ = flight.delivery.payload
        request.update({"args": args, "kwargs": kwargs, "is_eager": False}, **flight.continuation)
        tracers.clock.start = flight.started
        token = current_flight.set(flight)
        try:
            traced = tracer(uuid, args, kwargs, request)
        finally:
            current_flight.reset(token)
        if traced.info:
            error = traced.retval.exception
            if not flight.failed and isinstance(error, OperationalError):
                # The body is done, but its continuation could not be sent: failing now would end
                # the chain. Delivered again, the task finds its work done and only sends that.
                return _einfo(Reject(error, requeue=True))
            return 1, traced.retval, traced.runtime
        worker_state.successful_requests.add(uuid)
        return 0, traced.retstr, traced.runtime

    # -- settling (hub thread) ---------------------------------------------------------------

    def _settle_all(self) -> None:
        self.hand_over()
        while True:
            try:
                settled = self._settled.get_nowait()
            except queue.Empty:
                return
            self._settle(*settled)

    def _catch_up(self) -> None:
        """Tell Celery, and those who watch, what has gone on since the last time."""
        self.tell_after(self._settle_all)

    def _settle(self, flight: Flight, outcome: Any) -> None:
        if outcome is _TRACE_ASIDE:
            self._finisher.submit(self._finish, flight)
            return
        if outcome is _TRACE_HERE:
            outcome = self._outcome(flight, self._here)
        for timer in flight.timers:
            self.hub.timer.cancel(timer)
        self.flights.discard(flight)
        if flight.stopped is Stop.RETURN and outcome is None:
            return  # unacknowledged: closing the channel puts it back at the head of its queue
        # Of what Celery has settled it knows one delivery only.
        others = flight.deliveries if flight.dropped else flight.deliveries[:-1]
        for other in others:
            known = other.celery if other.connection == self._connection else None
            if known is not None and not known.acknowledged:
                # Its message is the one that was delivered again; this frees its prefetch slot.
                known.on_failure(_einfo(Ignore()))
        request = flight.delivery.celery
        if flight.dropped or request is None:
            return
        if flight.delivery.connection != self._connection:
            # Lost with its connection: delivered again, it will find its work done.
            request.acknowledged = True
        if isinstance(outcome, ExceptionInfo):
            request.on_failure(outcome)
        else:
            request.on_success(outcome)

    def _get_info(self) -> dict[str, Any]:
        return {
            **super()._get_info(),
            "in-flight": len(self.flights),
            "max-in-flight": self.max_in_flight,
        }


def _einfo(exc: Exception) -> ExceptionInfo:
    try:
        raise exc
    except type(exc):
        return ExceptionInfo()


def _nothing(*_: object) -> None:
    """Wake-up call, and what is done before there is a consumer."""


def _told_to_stop() -> bool:
    return worker_state.should_stop is not None or worker_state.should_terminate is not None

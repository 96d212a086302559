"""The loop that drives denoising: takes requests in, steps them together, lets them go."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from omniq.engines.base import Cancelled
from omniq.engines.diffusion.runner import Lora, OmniDiffusionModelRunner, Work
from omniq.engines.diffusion.scheduler import OmniDiffusionScheduler, Ticket
from omniq.engines.diffusion.session import Ask, DenoiseSession
from omniq.engines.faults import engine_faults
from omniq.errors import DeadlineExceeded, EngineDead, EngineError, OmniqError

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DenoiseJob:
    """One image or video to denoise.

    ``work(ask)`` runs the pipeline and returns the result; ``outcome`` gets that or the error.
    ``cached`` and ``deterministic`` are as in :class:`~omniq.engines.diffusion.runner.Work`.
    ``stopping`` may be set from any thread: the job ends with it before its next step.
    """

    ticket: Ticket
    work: Callable[[Ask], Any]
    lora: Lora = ()
    cached: bool = False
    deterministic: bool = False
    stopping: Exception | None = None
    outcome: Future[Any] = field(default_factory=Future)
    session: DenoiseSession | None = None


class DenoiseLoop:
    """Steps all jobs on one thread; runs while there are any.

    Args:
        thread: executor of exactly one thread, on which everything here runs.
        scheduler: picks who goes next.
        runner: runs their calls, and is told when a job ends.
    """

    def __init__(
        self,
        thread: Executor,
        scheduler: OmniDiffusionScheduler,
        runner: OmniDiffusionModelRunner,
    ) -> None:
        self._thread, self._scheduler, self._runner = thread, scheduler, runner
        self._lock = threading.Lock()
        self._inbox: list[DenoiseJob] = []
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._running = False
        self._jobs: list[DenoiseJob] = []

    def submit(self, jobs: Sequence[DenoiseJob]) -> None:
        """Take jobs in; any thread."""
        with self._lock:
            self._inbox += jobs
        self._wake()

    def between(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` on the model thread between two forwards; any thread.

        The thread's own queue would have it wait until no job is left.
        """
        future: Future[T] = Future()
        with self._lock:
            self._calls.append((function, future))
        self._wake()
        return future

    def _wake(self) -> None:
        with self._lock:
            if self._running:
                return
            self._running = True
        self._thread.submit(self._run)

    @torch.no_grad()
    def _run(self) -> None:
        while self._take_in():
            try:
                self._turn()
            except Exception as exc:
                # Not a request's fault, or it would have been caught: nobody is left waiting.
                logger.exception("denoising failed")
                error = exc if isinstance(exc, OmniqError) else EngineError(f"denoise loop: {exc}")
                for job in list(self._jobs):
                    self._end(job, error)

    def _take_in(self) -> bool:
        """Whether there is anything to do."""
        with self._lock:
            new, self._inbox = self._inbox, []
            calls, self._calls = self._calls, []
            if not new and not calls and not self._jobs:
                self._running = False
                return False
        for function, future in calls:
            _call(function, future)
        for job in new:
            self._jobs.append(job)
            if job.stopping is None:
                job.session = DenoiseSession(job.work)
                job.ticket.since = time.monotonic()
                self._advance(job, job.session.begin)
        return True

    def _turn(self) -> None:
        """One forward; before it, whoever must stop does."""
        now = time.monotonic()
        for job in list(self._jobs):
            deadline = job.ticket.deadline
            if job.stopping is None and deadline is not None and now > deadline:
                job.stopping = _too_late(job.ticket)
            if job.stopping is not None:
                self._stop(job, job.stopping)
        if not self._jobs:
            return
        by_ticket = {job.ticket: job for job in self._jobs}
        picked = self._scheduler.pick(list(by_ticket), now)
        jobs = [by_ticket[ticket] for ticket in picked]
        group = jobs[0].ticket.group
        started = time.perf_counter()
        answers = self._runner.run([_work(job) for job in jobs], group)
        for job, answer in zip(jobs, answers, strict=True):
            if isinstance(answer, Exception):
                self._stop(job, answer)
            else:
                session = _session(job)
                self._advance(job, functools.partial(session.give, answer))
        seconds = time.perf_counter() - started
        self._scheduler.charge(picked, seconds, time.monotonic())

    def _advance(self, job: DenoiseJob, move: Callable[[], None]) -> None:
        """Let a session run to its next call, or to its end."""
        session = _session(job)
        try:
            with engine_faults("denoising"):
                move()
        except EngineDead as exc:
            self._end(job, exc)
            raise
        except (OmniqError, Cancelled) as exc:
            self._end(job, exc)
            return
        if session.done:
            self._end(job, None)
            return
        calls = session.pending
        job.ticket.rows = sum(c.rows for c in calls)
        # Cached and deterministic requests run alone: a group for each.
        alone = job.ticket.request_id if job.cached or job.deterministic else None
        job.ticket.group = (calls[0].key, job.lora, alone)

    def _stop(self, job: DenoiseJob, error: Exception) -> None:
        """End a job where it rests, so that its pipeline can clean up."""
        if job.session is None:
            self._end(job, error)
        else:
            session = job.session
            self._advance(job, functools.partial(session.stop, error))

    def _end(self, job: DenoiseJob, error: Exception | None) -> None:
        self._jobs.remove(job)
        use = self._runner.end(job.ticket.request_id)
        if error is not None:
            job.outcome.set_exception(error)
            return
        result = _session(job).result
        if job.cached:
            result.metrics.update(use.metrics())
        job.outcome.set_result(result)


def _call(function: Callable[[], Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as exc:  # its outcome is the caller's
        future.set_exception(exc)


def _session(job: DenoiseJob) -> DenoiseSession:
    assert job.session is not None, "the job has begun"
    return job.session


def _work(job: DenoiseJob) -> Work:
    return Work(
        job.ticket.request_id, _session(job).pending, job.lora, job.cached, job.deterministic
    )


def _too_late(ticket: Ticket) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the deadline passed after {ticket.steps_done} of {ticket.steps_total} steps"
    )

"""The resident object of a worker: ``load() -> warmup() -> run(...)* -> unload()``.

Engines know nothing of Celery, Redis, jobs or HTTP; the worker knows nothing of models. An engine
lives on one asyncio loop. ``run`` is called once per request, many at a time up to
``max_in_flight``; blocking model work belongs in :meth:`Engine.in_thread`, so that the loop can
always cancel, beat and accept.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from omniq.config import OmniStageConfig

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StageRequest:
    """What one run of a stage is asked to do.

    ``params`` are the stage's complete, validated parameters (:mod:`omniq.config.params`).
    ``deadline`` is in seconds on the monotonic clock; nobody wants the result after it, and the
    worker stops the run then. Without ``stream`` nobody reads pieces of text (:meth:`Emit.delta`)
    before the whole is there; chunks for other stages are not meant.
    """

    request_id: str
    params: Mapping[str, Any]
    priority: int = 5
    deadline: float | None = None
    stream: bool = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of an output that a stage hands on while it still runs.

    ``sequence`` counts from 0. ``last``: the producer knew that none follows; the iterator of
    chunks ends either way.
    """

    sequence: int
    value: Any = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    last: bool = False


@dataclass(frozen=True, slots=True)
class StageInput:
    """One named input: small JSON ``value``, or ``tensors`` (read-only views into a blob).

    Behind an edge with ``trigger: window`` it is ``chunks`` instead: to be iterated once, on the
    engine's loop, while the stage before still makes them. Asking for the next chunk says that the
    ones before are done with. Several such inputs are read side by side, not one after the other:
    the stage before waits for the slowest reader.
    """

    value: Any = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    chunks: AsyncIterator[Chunk] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The only tensor of an input that carries exactly one.

        Raises:
            ValueError: it carries none or several.
        """
        if len(self.tensors) != 1:
            raise ValueError(f"expected one tensor, got {sorted(self.tensors)}")
        return next(iter(self.tensors.values()))


@dataclass(slots=True)
class StageOutput:
    """What one run made: by output name, small JSON in ``values``, tensors in ``tensors``.

    A ``tensors`` entry is itself a mapping of names to tensors (CPU or device), so that one output
    may hold several; ``{"latents": {"latents": t}}`` is the common case. ``metrics`` are numbers
    worth showing (token counts, seconds).
    """

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    metrics: dict[str, float | int] = field(default_factory=dict)


class Emit(Protocol):
    """How a running stage speaks: thread-safe, may be called from any thread."""

    def progress(self, step: int, total: int) -> None:
        """``step`` of ``total`` units (denoise steps, tokens) are done; never blocks."""

    def delta(self, output: str, value: Any) -> None:
        """A piece of ``output`` is there before the whole: small JSON, ``{"text": "..."}``; never
        blocks.
        """

    def preview(self, value: dict[str, Any]) -> None:
        """A cheap look at a picture that is not finished: ``image`` (number from 0), ``step``,
        ``content_type``, ``width``, ``height``, ``url`` (a data URL); never blocks. One that is
        overtaken before it is written is dropped.
        """

    def chunk(
        self,
        output: str,
        value: Any = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Hand on the next chunk of ``output``: small JSON, tensors, or both.

        Stages behind a ``trigger: window`` edge get it at once; if ``output`` is one of the
        pipeline's, the client does too. The tensors must not change afterwards. Returns at once
        until a few chunks wait to be taken over; then it blocks, in a model thread, until there is
        room. Model threads that serve several requests use :meth:`achunk` between their steps.

        Raises:
            EngineError: on the engine's loop, when it would have to block: use :meth:`achunk`;
                or the output was closed by ``last``.
            Cancelled: the request is no longer wanted.
        """

    async def achunk(
        self,
        output: str,
        value: Any = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """:meth:`chunk` for the engine's loop: waits instead of blocking."""


class NullEmit:
    """An :class:`Emit` that drops everything, for warm-up and direct use."""

    def progress(self, step: int, total: int) -> None:
        """Drop."""

    def delta(self, output: str, value: Any) -> None:
        """Drop."""

    def preview(self, value: dict[str, Any]) -> None:
        """Drop."""

    def chunk(
        self,
        output: str,
        value: Any = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Drop."""

    async def achunk(
        self,
        output: str,
        value: Any = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Drop."""


class Cancelled(Exception):
    """Raised inside an engine's calls when their request was cancelled."""


class Engine(abc.ABC):
    """Base class of all engines.

    Args:
        stage: the stage's configuration.
        device: torch device string, ``cpu`` or ``cuda:0``; the worker has already restricted
            ``CUDA_VISIBLE_DEVICES``, so the index counts visible devices.
    """

    #: Name of the implementation, as in ``OmniStageConfig.engine``.
    name: str

    def __init__(self, stage: OmniStageConfig, device: str = "cpu") -> None:
        self.stage = stage
        self.device = device
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"engine-{stage.stage_id}")

    @property
    def max_in_flight(self) -> int:
        """How many requests the worker may hand over at once."""
        return self.stage.max_in_flight

    @abc.abstractmethod
    async def load(self) -> None:
        """Make the model resident.

        Raises:
            ConfigError: the model folder or an engine argument is wrong.
        """

    @abc.abstractmethod
    async def warmup(self) -> None:
        """Run once on made-up input, so that the first request pays no lazy initialisation."""

    @abc.abstractmethod
    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Serve one request.

        Cancelling the awaiting asyncio task stops the work within one step.

        Raises:
            InvalidRequest: this input can never be served.
            EngineError: the run failed; ``retryable`` says whether to try again.
            EngineDead: the engine can serve nothing more.
        """

    async def unload(self) -> None:
        """Free the model; no ``run`` is in flight."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    async def in_thread(
        self, function: Callable[..., T], *args: Any, cancel: threading.Event | None = None
    ) -> T:
        """Run blocking ``function(*args)`` on the engine's only model thread.

        On cancellation ``cancel`` is set, and the call waits until the function has really stopped,
        so that a cancelled request never computes beside the next one.
        """
        work = self._executor.submit(function, *args)
        done = asyncio.wrap_future(work)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if cancel is not None:
                cancel.set()
            if not work.cancel():  # it runs already: `done` must not end before the thread does
                while not done.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([done])
                done.exception()  # retrieved: the outcome of a cancelled request is nobody's
            raise

"""One stage on several devices: a process each, in lockstep with the engine's.

The engine's process is rank 0 and the only one that knows requests. The followers get the arguments
of each forward of their branch and compute the same; what the first rank of a branch computed comes
back. Tensors go by the process group, as one buffer a message; everything else by pipes.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
import torch.distributed as dist

from omniq.config import OmniStageConfig
from omniq.engines.diffusion.cache import DiTCacheManager
from omniq.engines.diffusion.devices import Computed, Share, compute
from omniq.engines.diffusion.parallel import Parallel, join_ranks, parallelize
from omniq.engines.diffusion.rank_messages import Answer, Done, Fault, Message, receive
from omniq.errors import ConfigError, EngineDead

#: Seconds that followers may take to import and load.
LOAD_TIMEOUT = 1800.0
#: Seconds after a failure of rank 0 in which the others must fail too: they are at the same place.
FAULT_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class _Order:
    """A forward for ``ranks``: what goes by pipe, and its tensors' bytes."""

    ranks: list[int]
    payload: bytes
    buffer: torch.Tensor | None


class Group:
    """Rank 0's view of the processes that compute one stage; lives on the model thread.

    Implements :class:`~omniq.engines.diffusion.devices.Devices`.

    Args:
        stage: the stage.
        config: how many, and how.
        device: torch device of rank 0; followers take those behind it.
        models: the transformers, placed on ``device``.
        cache: rank 0's cache; followers have their own.

    Raises:
        ConfigError: a follower could not load.
        EngineDead: a follower did not start.
    """

    def __init__(
        self,
        stage: OmniStageConfig,
        config: Parallel,
        device: str,
        models: Sequence[Any],
        cache: DiTCacheManager,
    ) -> None:
        self._stage, self._config, self._device = stage, config, device
        self._models, self._cache = list(models), cache
        self.branches: int = config.cfg_degree
        self._folder = tempfile.TemporaryDirectory(prefix="omniq-ranks-")
        self._followers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        try:
            store = f"file://{self._folder.name}/store"
            for rank in range(1, config.world):
                own = device if device == "cpu" else f"cuda:{rank}"
                self._start(
                    (stage.model_dump(mode="json"), rank, own, store, torch.get_num_threads())
                )
            for rank in range(1, config.world):
                self._answer(rank, LOAD_TIMEOUT)
            join_ranks(store, 0, config, device)
            parallelize(models, config, device, stage.engine_args.get("attention_backend"))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the followers and leave the process group."""
        for process, pipe in self._followers:
            pipe.close()  # the follower's sign to end
            process.kill()
            process.wait()
        self._followers = []
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()

    def forward(self, shares: Sequence[Share | None]) -> list[Computed | None]:
        """As :meth:`Devices.forward`: every rank of a branch computes that branch's share.

        Raises:
            EngineError: a branch failed, all of its ranks alike; the others computed theirs.
            EngineDead: a rank is dead, silent, or failed alone.
        """
        at_work = [b for b, share in enumerate(shares) if share is not None]
        # All prepared before any is told: a follower that was told waits for its tensors.
        orders = [order for b in at_work if (order := self._order(b, shares[b])) is not None]
        for order in orders:
            self._hand_out(order)
        own: Computed | None = None
        own_fault: Exception | None = None
        if shares[0] is not None:
            try:
                own = compute(shares[0], self._cache)
            except Exception as exc:
                own_fault = exc
        fault = own_fault
        results: list[Computed | None] = [own] + [None] * (len(shares) - 1)
        for branch in at_work:
            first = next(iter(self._answers(branch, own_fault)), None)
            if branch and isinstance(first, Done):
                results[branch] = self._fetch(branch, first)
            elif isinstance(first, Fault) and fault is None:
                fault = first.error(self._ranks(branch)[0])
        if fault is not None:
            raise fault
        return results

    def drop(self, request_id: str) -> None:
        """As :meth:`Devices.drop`."""
        self._cache.drop(request_id)
        if not self._cache.enabled:
            return
        for rank in range(1, self._config.world):
            # The next forward, or its absence, is what a dead follower's end matters to.
            with contextlib.suppress(EngineDead):
                self._send(rank, ("drop", request_id))

    def _ranks(self, branch: int) -> range:
        size = self._config.branch
        return range(branch * size, (branch + 1) * size)

    def _order(self, branch: int, share: Share | None) -> _Order | None:
        """What the followers of a branch are to compute; None: it has none."""
        ranks = [r for r in self._ranks(branch) if r]
        if not ranks or share is None:
            return None
        number = next(i for i, model in enumerate(self._models) if model is share.module)
        message = Message.of(dict(share.kwargs))
        payload = pickle.dumps(("forward", number, share.state, message.plain, message.size))
        buffer = message.buffer(self._device) if message.size else None
        return _Order(ranks, payload, buffer)

    def _hand_out(self, order: _Order) -> None:
        for rank in order.ranks:
            self._send(rank, order.payload)
        if order.buffer is not None:
            for rank in order.ranks:
                with self._exchange(rank):
                    dist.send(order.buffer, rank)

    def _answers(self, branch: int, own: Exception | None) -> list[Answer]:
        """What the followers of a branch say; ``own`` is rank 0's failure.

        Raises:
            EngineDead: some failed and others wait for them in the middle of a forward, or a device
                is lost.
        """
        ranks = [r for r in self._ranks(branch) if r]
        faults: dict[int, Fault] = {}
        limit = self._config.timeout
        if branch == 0 and own is not None:
            faults[0] = Fault.of(own)
            limit = min(limit, FAULT_TIMEOUT)
        answers = [self._answer(rank, limit) for rank in ranks]
        faults |= {r: a for r, a in zip(ranks, answers, strict=True) if isinstance(a, Fault)}
        if 0 < len(faults) < self._config.branch:
            rank, fault = next(iter(faults.items()))
            raise EngineDead(f"rank {rank} failed alone: {fault.message}") from own
        for rank, fault in faults.items():
            if fault.kind == EngineDead.__name__:
                raise fault.error(rank)
        return answers

    def _fetch(self, branch: int, done: Done) -> Computed:
        rank = self._ranks(branch)[0]
        with self._exchange(rank):
            return Computed(receive(done.plain, done.size, rank, self._device), done.hit)

    @contextlib.contextmanager
    def _exchange(self, rank: int) -> Iterator[None]:
        """Around a transfer from or to a rank, whose failure is the end."""
        try:
            yield
        except (RuntimeError, ValueError) as exc:
            dead = self._dead(rank)
            if self._followers[rank - 1][0].returncode is not None:
                raise dead from exc
            raise EngineDead(f"exchange with rank {rank} failed: {exc}") from exc

    def _start(self, setup: tuple[Any, ...]) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "omniq.engines.diffusion.follower", str(theirs.fileno())]
        with theirs:
            # A Ctrl-C is for the worker, which first ends what is in flight.
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self._followers.append((process, ours))
        self._send(len(self._followers), setup)

    def _send(self, rank: int, message: Any) -> None:
        data = message if isinstance(message, bytes) else pickle.dumps(message)
        try:
            self._followers[rank - 1][1].send_bytes(data)
        except OSError as exc:
            raise self._dead(rank) from exc

    def _answer(self, rank: int, seconds: float) -> Answer:
        """How the follower's last work went.

        Raises:
            EngineDead: it is dead, or silent for ``seconds``.
            ConfigError: it could not load.
        """
        pipe = self._followers[rank - 1][1]
        try:
            if not pipe.poll(seconds):
                raise EngineDead(f"rank {rank} did not answer within {seconds:g} s")
            answer = pickle.loads(pipe.recv_bytes())  # nosec B301 # an own process
        except (EOFError, OSError) as exc:
            raise self._dead(rank) from exc
        if isinstance(answer, Fault) and answer.kind == ConfigError.__name__:
            raise answer.error(rank)
        assert isinstance(answer, Done | Fault), "followers answer with nothing else"
        return answer

    def _dead(self, rank: int) -> EngineDead:
        process = self._followers[rank - 1][0]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        return EngineDead(
            f"stage {self._stage.stage_id!r}: rank {rank} of {self._config.world} "
            f"(process {process.pid}) is dead, exit code {process.returncode}"
        )

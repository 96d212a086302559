"""One transformer on several devices: every forward is computed by as many processes in lockstep.

Sequence parallelism of diffusers (Ulysses): each process holds all weights and computes its part of
the sequence; attention exchanges heads. The engine's process is rank 0 and the only one that knows
requests; the followers get each forward's arguments and compute the same.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field, ValidationError

from omniq.config import OmniStageConfig
from omniq.config.stage import ConfigModel
from omniq.engines.diffusion.acceleration import ACCELERATION_ARGS
from omniq.errors import ConfigError, EngineDead

logger = logging.getLogger(__name__)
#: Seconds that a process waits for the others in one exchange, and for the end of their forwards.
TIMEOUT = 120.0
#: Seconds that followers may take to import and load.
LOAD_TIMEOUT = 1800.0
#: Seconds after a failure of rank 0 in which the others must fail too: they are at the same place.
FAULT_TIMEOUT = 30.0
ARGUMENT = "context_parallel"


class ContextParallel(ConfigModel):
    """Engine argument ``context_parallel``: names and meaning of ``ContextParallelConfig``.

    ``ulysses_anything`` takes sequences and numbers of heads that ``ulysses_degree`` does not
    divide; on by default, because prompts have any length.
    """

    ulysses_degree: int = Field(ge=2)
    ulysses_anything: bool = True

    @classmethod
    def of(cls, stage: OmniStageConfig) -> ContextParallel | None:
        """From the stage's engine arguments; None: one device.

        Raises:
            ConfigError: it is wrong, or the stage asks for something that does not go with it.
        """
        if (given := stage.engine_args.get(ARGUMENT)) is None:
            return None
        where = f"stage {stage.stage_id!r}: engine_args {ARGUMENT}"
        try:
            made = cls.model_validate(given)
        except ValidationError as exc:
            fault = exc.errors()[0]
            place = "".join(f"{part}: " for part in fault["loc"])
            raise ConfigError(f"{where}: {place}{fault['msg']}") from exc
        # The followers would be without what ACCELERATION_ARGS ask for.
        names = ["enable_group_offload", "enable_model_cpu_offload", "sleep_after"]
        names += sorted(ACCELERATION_ARGS)
        others = [n for n in names if stage.engine_args.get(n)]
        if stage.dit is not None:
            others += ["dit.loras"] if stage.dit.loras else []
            others += ["dit.cache"] if stage.dit.cache.method != "none" else []
        if others:
            raise ConfigError(f"{where} does not go with {', '.join(others)}")
        return made


class Group:
    """Rank 0's view of the processes that compute one stage; lives on the model thread.

    Args:
        stage: the stage.
        config: how many, and how.
        device: torch device of rank 0; followers take those behind it.
        models: the transformers, placed on ``device``; from now on their forwards run everywhere.

    Raises:
        ConfigError: too few devices, or the model has no plan for it.
        EngineDead: a follower did not start.
    """

    def __init__(
        self,
        stage: OmniStageConfig,
        config: ContextParallel,
        device: str,
        models: Sequence[Any],
    ) -> None:
        self._stage = stage
        self._world = config.ulysses_degree
        self._folder = tempfile.TemporaryDirectory(prefix="omniq-ranks-")
        self._followers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        _check(stage, config, device, models)
        try:
            store = f"file://{self._folder.name}/store"
            for rank in range(1, self._world):
                own = device if device == "cpu" else f"cuda:{rank}"
                self._start(
                    (stage.model_dump(mode="json"), rank, own, store, torch.get_num_threads())
                )
            for rank in range(1, self._world):
                self._answer(rank, LOAD_TIMEOUT)
            join_ranks(store, 0, self._world, device)
            for model in models:
                parallelize(model, config, device)
        except BaseException:
            self.close()
            raise
        for i, model in enumerate(models):
            model.forward = self._lockstep(i, model.forward)

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

    def _start(self, setup: tuple[Any, ...]) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "omniq.engines.diffusion.follower", str(theirs.fileno())]
        with theirs:
            # A Ctrl-C is for the worker, which first ends what is in flight.
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        self._followers.append((process, ours))
        self._send(len(self._followers), setup)

    def _lockstep(self, number: int, forward: Any) -> Any:
        def everywhere(*args: Any, **kwargs: Any) -> Any:
            payload = pickle.dumps((number, on_device((args, kwargs), "cpu")))
            for rank in range(1, self._world):
                self._send(rank, payload)
            try:
                output = forward(*args, **kwargs)
            except Exception as exc:
                # Either all of them failed alike, and are ready for the next one, or it is over.
                if all(self._answer(rank, FAULT_TIMEOUT) for rank in range(1, self._world)):
                    raise
                raise EngineDead(f"rank 0 failed alone: {type(exc).__name__}: {exc}") from exc
            for rank in range(1, self._world):
                if (fault := self._answer(rank, TIMEOUT)) is not None:
                    raise EngineDead(f"rank {rank} failed alone: {fault}")
            return output

        return everywhere

    def _send(self, rank: int, message: Any) -> None:
        data = message if isinstance(message, bytes) else pickle.dumps(message)
        try:
            self._followers[rank - 1][1].send_bytes(data)
        except OSError as exc:
            raise self._dead(rank) from exc

    def _answer(self, rank: int, seconds: float) -> str | None:
        """What went wrong with the follower's last work, if something did.

        Raises:
            EngineDead: it is dead, or silent for ``seconds``.
            ConfigError: it could not load.
        """
        pipe = self._followers[rank - 1][1]
        try:
            if not pipe.poll(seconds):
                raise EngineDead(f"rank {rank} did not answer within {seconds:g} s")
            kind, fault = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError) as exc:
            raise self._dead(rank) from exc
        if kind == "config":
            raise ConfigError(f"rank {rank}: {fault}")
        return fault if fault is None else str(fault)

    def _dead(self, rank: int) -> EngineDead:
        process = self._followers[rank - 1][0]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        return EngineDead(
            f"stage {self._stage.stage_id!r}: rank {rank} of {self._world} (process {process.pid}) "
            f"is dead, exit code {process.returncode}"
        )


def _check(
    stage: OmniStageConfig, config: ContextParallel, device: str, models: Sequence[Any]
) -> None:
    where = f"stage {stage.stage_id!r}: engine_args {ARGUMENT}"
    for model in models:
        if getattr(model, "_cp_plan", None) is None:
            raise ConfigError(f"{where}: diffusers has no plan to split {type(model).__name__}")
        heads = model.config.get("num_attention_heads")
        if heads and heads % config.ulysses_degree and not config.ulysses_anything:
            raise ConfigError(
                f"{where}: ulysses_degree {config.ulysses_degree} does not divide the model's "
                f"{heads} attention heads",
                hint="choose one that does, or ulysses_anything: true",
            )
    there = torch.cuda.device_count()
    if device != "cpu" and there < config.ulysses_degree:
        raise ConfigError(
            f"{where}: needs {config.ulysses_degree} devices, this worker has {there}",
            hint="list as many in the stage's devices, or in --devices",
        )
    if dist.is_initialized():
        raise ConfigError(f"{where}: this process is in a process group of torch already")


def join_ranks(store: str, rank: int, world: int, device: str) -> None:
    """Enter the process group; blocks until all ranks have."""
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=store,
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )


def parallelize(model: Any, config: ContextParallel, device: str) -> None:
    """What ``enable_parallelism`` does, which itself asks for an accelerator."""
    from diffusers import ContextParallelConfig, ParallelConfig  # noqa: PLC0415 - slow import
    from diffusers.hooks import apply_context_parallel  # noqa: PLC0415

    kind = torch.device(device).type
    mesh = dist.device_mesh.init_device_mesh(
        kind, (1, config.ulysses_degree), mesh_dim_names=("ring", "ulysses")
    )
    own = ContextParallelConfig(mesh=mesh, **config.model_dump())
    whole = ParallelConfig(context_parallel_config=own)
    whole.setup(dist.get_rank(), dist.get_world_size(), torch.device(device), mesh=mesh)
    model._parallel_config = whole
    for module in model.modules():
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "_parallel_config"):
            processor._parallel_config = whole
    apply_context_parallel(model, own, model._cp_plan)


def on_device(value: Any, device: str) -> Any:
    """``value`` with all tensors in it on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device)
    if isinstance(value, dict):
        return {n: on_device(v, device) for n, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(on_device(v, device) for v in value)
    return value

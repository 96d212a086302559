"""A process that computes a stage's transformer forwards in lockstep with the engine's.

Started by :class:`~omniq.engines.diffusion.ranks.Group`; ends when its pipe does.
"""

from __future__ import annotations

import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from omniq.config import DiTConfig, OmniStageConfig
from omniq.engines.diffusion.acceleration import accelerate
from omniq.engines.diffusion.cache import DiTCacheManager
from omniq.engines.diffusion.devices import Share, compute
from omniq.engines.diffusion.loading import load_pipeline, pipeline_folder, read_index
from omniq.engines.diffusion.parallel import Parallel, join_ranks, parallelize
from omniq.engines.diffusion.rank_messages import Answer, Done, Fault, Message, receive
from omniq.engines.diffusion.session import TRANSFORMERS
from omniq.engines.faults import engine_faults
from omniq.errors import OmniqError


def main() -> None:
    """Load, then follow."""
    pipe = Connection(int(sys.argv[1]))
    try:
        _follow(pipe)
    except (EOFError, ConnectionError):
        return  # the engine's process has closed the pipe, or is gone


@torch.no_grad()
def _follow(pipe: Connection) -> None:
    settings, rank, device, store, threads = pickle.loads(pipe.recv_bytes())  # nosec B301 # leader
    stage = OmniStageConfig.model_validate(settings)
    config = Parallel.of(stage)
    assert config is not None, "only parallel stages have followers"
    try:
        index = read_index(pipeline_folder(stage, (*TRANSFORMERS, "vae")))
        pipeline = load_pipeline(stage, index, TRANSFORMERS.__contains__, device)
        models = [m for n in TRANSFORMERS if (m := getattr(pipeline, n, None)) is not None]
        accelerate(stage, models)
        cache = DiTCacheManager((stage.dit or DiTConfig()).cache, index.family)
        cache.install(models)
    except OmniqError as exc:
        _say(pipe, Fault(type(exc).__name__, exc.message))
        return
    torch.set_num_threads(threads)
    _say(pipe, Done())
    join_ranks(store, rank, config, device)
    parallelize(models, config, device, stage.engine_args.get("attention_backend"))
    leads = rank % config.branch == 0
    while True:
        kind, *given = pickle.loads(pipe.recv_bytes())  # nosec B301 # leader
        if kind == "drop":
            cache.drop(*given)
            continue
        number, state, plain, size = given
        # A failure of an exchange ends the process: tensors that nobody took would be taken for the
        # next message's.
        kwargs: dict[str, Any] = receive(plain, size, 0, device)
        try:
            with engine_faults("denoise step"):
                made = compute(Share(models[number], kwargs, state), cache)
                # The others of a branch have the same output, which nobody needs twice.
                message = Message.of(made.output if leads else None)
                buffer = message.buffer(device)
        except OmniqError as exc:  # rank 0 decides whether it failed likewise
            _say(pipe, Fault.of(exc))
            continue
        _say(pipe, Done(message.plain, message.size, made.hit))
        if message.size:
            dist.send(buffer, 0)


def _say(pipe: Connection, answer: Answer) -> None:
    pipe.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main()

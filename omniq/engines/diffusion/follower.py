"""A process that computes a stage's transformer forwards in lockstep with the engine's.

Started by :class:`~omniq.engines.diffusion.context_parallel.Group`; ends when its pipe does.
"""

from __future__ import annotations

import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from omniq.config import OmniStageConfig
from omniq.engines.diffusion.context_parallel import (
    ContextParallel,
    join_ranks,
    on_device,
    parallelize,
)
from omniq.engines.diffusion.loading import load_pipeline, pipeline_folder, read_index
from omniq.engines.diffusion.session import TRANSFORMERS
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
    settings, rank, device, store, threads = pickle.loads(pipe.recv_bytes())
    stage = OmniStageConfig.model_validate(settings)
    config = ContextParallel.of(stage)
    assert config is not None, "only parallel stages have followers"
    try:
        index = read_index(pipeline_folder(stage, (*TRANSFORMERS, "vae")))
        pipeline = load_pipeline(stage, index, TRANSFORMERS.__contains__, device)
    except OmniqError as exc:
        _say(pipe, "config", exc.message)
        return
    torch.set_num_threads(threads)
    models = [m for n in TRANSFORMERS if (m := getattr(pipeline, n, None)) is not None]
    _say(pipe, "ready", None)
    join_ranks(store, rank, config.ulysses_degree, device)
    for model in models:
        parallelize(model, config, device)
    while True:
        number, (args, kwargs) = pickle.loads(pipe.recv_bytes())
        fault = None
        try:
            models[number](*on_device(args, device), **on_device(kwargs, device))
        except Exception as exc:  # rank 0 decides whether it failed likewise
            fault = f"{type(exc).__name__}: {exc}"
        _say(pipe, "done", fault)


def _say(pipe: Connection, kind: str, fault: Any) -> None:
    pipe.send_bytes(pickle.dumps((kind, fault)))


if __name__ == "__main__":
    main()

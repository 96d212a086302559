"""vLLM's scheduler, which hands the hidden states of a step on as one tensor instead of one each.

Between the engine core and the front end every tensor is encoded, framed and decoded by itself:
with 64 requests in flight more than a millisecond a step. :func:`pack` puts the rows of the
requests that go on decoding into one tensor; :class:`Unpacker` takes it apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from omniq.engines.vllm import contract

#: Classes by name, as vLLM's ``scheduler_cls`` takes them.
SCHEDULER = "omniq.engines.vllm.scheduler.OmniScheduler"
ASYNC_SCHEDULER = "omniq.engines.vllm.scheduler.OmniAsyncScheduler"


def use(config: Any) -> None:
    """Have the engine of this ``VllmConfig`` use it, unless it has a scheduler of its own."""
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER


def pack(outputs: Sequence[Any]) -> None:
    """Move the single rows of a step's ``EngineCoreOutput`` into the first of them that has one.

    Rows [1, layers, hidden] become [1, requests, layers, hidden], in the order of the outputs with
    new tokens that have no tensor of their own; prompts stay where they are.
    """
    single = [
        o
        for o in outputs
        if o.new_token_ids and o.pooling_output is not None and len(o.pooling_output) == 1
    ]
    if len(single) > 1:
        rows = torch.cat([o.pooling_output for o in single])
        for output in single:
            output.pooling_output = None
        single[0].pooling_output = rows.unsqueeze(0)


class Unpacker:
    """Undoes :func:`pack` in the front end, which takes a large step in slices, one by one."""

    def __init__(self) -> None:
        #: Rows of the step for requests that have not come yet.
        self._left: deque[torch.Tensor] = deque()

    def unpack(self, outputs: Sequence[Any]) -> None:
        """Give a slice of a step's ``EngineCoreOutput`` their rows.

        Raises:
            RuntimeError: there are more or fewer rows than requests for them.
        """
        carried = False
        for output in outputs:
            packed = output.pooling_output
            if packed is not None and packed.ndim == 4:
                if self._left:
                    raise RuntimeError(f"vLLM gave {len(self._left)} hidden states too many")
                self._left.extend(packed[0].split(1))
                output.pooling_output, carried = None, True
            if output.new_token_ids and output.pooling_output is None:
                if self._left:
                    output.pooling_output = self._left.popleft()
                elif carried:
                    raise RuntimeError("vLLM gave fewer hidden states than requests for them")


def __getattr__(name: str) -> Any:
    """The classes, made when vLLM asks for them: importing this module must not start vLLM."""
    if name not in ("OmniScheduler", "OmniAsyncScheduler"):
        raise AttributeError(name)
    v = contract.names()
    base = v.Scheduler if name == "OmniScheduler" else v.AsyncScheduler

    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; see :func:`pack`."""
        found = base.update_from_output(self, *args, **kwargs)
        for outputs in found.values():
            pack(outputs.outputs)
        return found

    made = type(name, (base,), {"update_from_output": update_from_output, "__module__": __name__})
    globals()[name] = made
    return made

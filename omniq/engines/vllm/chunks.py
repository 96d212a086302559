"""A vLLM answer handed on by chunks, for the stages behind."""

from __future__ import annotations

import torch

from omniq.engines.base import Emit
from omniq.engines.vllm.hidden_states import StateCollector, StateOptions
from omniq.engines.vllm.outputs import Generation


class Chunks:
    """Tokens and states of the only answer, handed on while it grows.

    Args:
        collector: has the request's states; None if they are off.
        options: which ones.
        request_id: vLLM's.
        generation: the answer.
        emit: where chunks go.
    """

    def __init__(
        self,
        collector: StateCollector | None,
        options: StateOptions | None,
        request_id: str,
        generation: Generation,
        emit: Emit,
    ) -> None:
        self._collector, self._options = collector, options
        self._id, self._generation, self._emit = request_id, generation, emit
        self._sent = 0

    async def send(self, least: int, *, last: bool = False) -> None:
        """Hand on what is new if it is ``least`` tokens or more; waits for slow readers."""
        tokens = self._generation.sequences[0].tokens
        start, stop = self._sent, len(tokens)
        if stop - start >= least:
            self._sent = stop
            await self._hand_on(start, stop, last)

    async def _hand_on(self, start: int, stop: int, last: bool) -> None:
        """Tokens ``start`` up to ``stop``."""
        if len(self._generation.sequences) != 1:
            return
        ids = torch.tensor(self._generation.sequences[0].tokens[start:stop], dtype=torch.int64)
        await self._emit.achunk("token_ids", tensors={"token_ids": ids}, last=last)
        if self._collector is not None and self._options is not None:
            rows = self._collector.states(self._id).rows[start:stop]
            states = self._options.shaped(torch.cat(rows))
            await self._emit.achunk("hidden_states", tensors={"hidden_states": states}, last=last)

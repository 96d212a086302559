"""Hidden states of sampled positions out of vLLM, riding its own step outputs.

vLLM gives hidden states to nobody when it generates. The worker side (:class:`HiddenStateTap`,
mixed into vLLM's worker by ``worker_extension_cls``) puts, for every request that sampled in a
step, its one row into ``ModelRunnerOutput.pooler_output``; the scheduler passes that on as
``EngineCoreOutput.pooling_output`` next to the new token. :class:`RowCollector` takes the rows off
in the front-end process before vLLM's output processor sees them, which would take a request with
pooling output for an embedding request.

Only sampled positions are read, so prefix caching, chunked prefill and preemption do not matter: a
cached position is never sampled from again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TAP = "omniq.engines.vllm_hidden_states.HiddenStateTap"


class HiddenStateTap:
    """Extension of vLLM's worker; in its process ``self`` is the worker."""

    model_runner: Any

    def install_tap(self) -> bool:
        """Wrap the model runner's ``sample_tokens``; called once through ``collective_rpc``."""
        runner = self.model_runner
        sample = runner.sample_tokens

        def sample_tokens(grammar_output: Any) -> Any:
            # Read before sampling: that clears the state, and the next step reuses its buffers.
            rows = _sampled_rows(runner)
            output = sample(grammar_output)
            if rows is None or output is None:
                return output
            if hasattr(output, "get_output"):  # async scheduling: the tokens are not there yet
                finish = output.get_output
                output.get_output = lambda: rows.attach(finish())
                return output
            return rows.attach(output)

        runner.sample_tokens = sample_tokens
        return True


class _Rows:
    """One step's rows on their way to the host. ``rows``: [requests, hidden]."""

    def __init__(self, request_ids: list[str], rows: torch.Tensor) -> None:
        self._ids = list(request_ids)
        self._copied: torch.cuda.Event | None = None
        if rows.device.type == "cuda":
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            self._rows.copy_(rows, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._rows = rows.detach().to("cpu", copy=True)

    def attach(self, output: Any) -> Any:
        """Give each request that sampled its row [1, hidden]; a prefill chunk gets None."""
        if self._copied is not None:
            self._copied.synchronize()
        by_id = {name: self._rows[i : i + 1] for i, name in enumerate(self._ids)}
        tokens = output.sampled_token_ids
        output.pooler_output = [
            by_id[name] if name in by_id and len(tokens[i]) else None
            for i, name in enumerate(output.req_ids)
        ]
        return output


def _sampled_rows(runner: Any) -> _Rows | None:
    """Rows whose logits are about to be sampled; None on ranks that do not sample."""
    state = runner.execute_model_state
    if state is None or not isinstance(state.hidden_states, torch.Tensor):
        return None
    if hasattr(state, "sample_hidden_states"):  # vLLM's V1 model runner
        return _Rows(runner.input_batch.req_ids, state.sample_hidden_states)
    batch = state.input_batch  # its V2 model runner
    return _Rows(batch.req_ids, state.hidden_states[batch.logits_indices])


class RowCollector:
    """Front-end side: rows per request id, kept until taken.

    Args:
        output_processor: vLLM's ``OutputProcessor`` of the engine; wrapped in place.
    """

    def __init__(self, output_processor: Any) -> None:
        self._rows: dict[str, list[torch.Tensor]] = {}
        self._states = output_processor.request_states
        self._process: Callable[..., Any] = output_processor.process_outputs
        output_processor.process_outputs = self._process_outputs

    def _process_outputs(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            row, output.pooling_output = output.pooling_output, None
            state = self._states.get(output.request_id)
            if row is not None and state is not None and output.new_token_ids:
                self._rows.setdefault(state.external_req_id, []).append(row)
        return self._process(outputs, *args, **kwargs)

    def take(self, request_id: str) -> list[torch.Tensor]:
        """Rows [1, hidden] of a request in token order; forgets them."""
        return self._rows.pop(request_id, [])

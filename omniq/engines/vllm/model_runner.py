"""Hidden states leave vLLM here, in the processes that run the model.

:class:`OmniWorker` is vLLM's own worker of the platform whose model runner is made an
:class:`OmniARModelRunner`. With hidden states off and on a GPU neither is used at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from omniq.engines.vllm import contract
from omniq.engines.vllm.hidden_states import CONFIG_KEY, DTYPES, StateOptions, with_places

#: Class by name, as vLLM's ``worker_cls`` takes it.
WORKER = "omniq.engines.vllm.model_runner.OmniWorker"


@dataclass(slots=True)
class _Part:
    """What one request contributes to a step."""

    request_id: str
    first_row: int
    """Of the step's hidden states."""
    start: int
    """Position of that row in the request."""
    count: int
    prompt_tokens: int
    sampled: bool
    """Whether its last row's logits give a token (not in the midst of a prompt)."""

    @property
    def prompt_rows(self) -> int:
        """How many of its rows are the prompt's."""
        return max(0, min(self.count, self.prompt_tokens - self.start))


class _Prompt:
    """The prompt's states of one request, as far as its chunks were computed."""

    def __init__(self, like: torch.Tensor, tokens: int) -> None:
        self.rows = like.new_empty((tokens, *like.shape[1:]))
        self.filled = 0

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Add ``rows`` at ``start``; a preempted request starts over at 0."""
        if start <= self.filled:
            self.rows[start : start + len(rows)] = rows
            self.filled = start + len(rows)

    @property
    def whole(self) -> bool:
        """Whether no position is missing."""
        return self.filled == len(self.rows)


class _Step:
    """One step's states on their way to the host: one copy, waited for when they are needed."""

    def __init__(self, parts: list[_Part], rows: torch.Tensor, prompts: dict[str, _Prompt]) -> None:
        self._parts, self._prompts = parts, prompts
        self._copied: torch.cuda.Event | None = None
        if rows.device.type == "cuda":
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            self._rows.copy_(rows, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._rows = rows.detach().to("cpu", copy=True)

    def attach(self, output: Any, *, with_prompts: bool, finished: set[str]) -> Any:
        """Give each request that sampled its states, the prompt's before the sampled row."""
        if self._copied is not None:
            self._copied.synchronize()
        for request_id in finished:
            self._prompts.pop(request_id, None)
        packed: dict[str, torch.Tensor] = {}
        at = 0
        for part in self._parts:
            if with_prompts and part.prompt_rows:
                rows = self._rows[at : at + part.prompt_rows]
                at += part.prompt_rows
                if part.start == 0 or part.request_id not in self._prompts:
                    self._prompts[part.request_id] = _Prompt(rows, part.prompt_tokens)
                self._prompts[part.request_id].write(part.start, rows)
            if part.sampled:
                row = self._rows[at : at + 1]
                at += 1
                prompt = self._prompts.pop(part.request_id, None)
                if prompt is not None and prompt.whole:
                    row = torch.cat([prompt.rows, row])
                packed[part.request_id] = row
        output.pooler_output = _Rows(
            packed.get(name) if len(output.sampled_token_ids[i]) else None
            for i, name in enumerate(output.req_ids)
        )
        return output


class _Rows(list["torch.Tensor | None"]):
    """States by request; pickled, for the way from another process, as one tensor."""

    def __reduce__(self) -> Any:
        there = [t for t in self if t is not None]
        whole = torch.cat(there) if there else None
        return _split, (whole, [0 if t is None else len(t) for t in self])


def _split(whole: torch.Tensor | None, counts: list[int]) -> list[torch.Tensor | None]:
    if whole is None:
        return [None] * len(counts)
    parts = iter(whole.split([n for n in counts if n]))
    return [next(parts) if n else None for n in counts]


class OmniARModelRunner:
    """Mixed into vLLM's model runner: hands out hidden states with the tokens they gave.

    Each request that samples in a step gets the states ``[rows, layers, hidden]`` of its sampled
    position; when the prompt's positions are wanted, the first one has all of them before it, and
    the request does not read the prefix cache (``skip_reading_prefix_cache``). Prompts in chunks
    are gathered by position, so that preemption, which computes positions anew, changes nothing.
    One device-to-host copy a step.
    """

    # What vLLM's runner has.
    execute_model_state: Any
    input_batch: Any
    model: Any
    vllm_config: Any
    use_aux_hidden_state_outputs: bool

    _options: StateOptions | None = None
    _layers: tuple[int, ...] = ()
    _prompts: dict[str, _Prompt]

    @classmethod
    def adopt(cls, runner: Any, options: StateOptions | None) -> Any:
        """Make vLLM's ``runner`` one of this class as well; its model is not loaded yet."""
        runner.__class__ = type(cls.__name__, (cls, type(runner)), {})
        runner._options, runner._prompts = options, {}
        return runner

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, and have the model give out the layers that are wanted, before it is compiled."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self._options is None:
            return
        count = int(self.vllm_config.model_config.hf_text_config.num_hidden_layers)
        self._layers = self._options.resolved(count)
        if self._options.places and self._places() is None:
            raise ValueError(
                f"hidden_states.places: {type(self.model).__name__} has no M-RoPE, or this vLLM "
                "keeps its positions elsewhere"
            )
        if inner := tuple(sorted({i for i in self._layers if i < count})):
            self._give_out(inner)
        #: Index into [inner layers..., last] of each wanted one.
        self._order = [inner.index(i) if i < count else len(inner) for i in self._layers]

    def _give_out(self, layers: tuple[int, ...]) -> None:
        if not hasattr(self.model, "set_aux_hidden_state_layers"):
            raise ValueError(
                f"{type(self.model).__name__} gives out no intermediate layers in vLLM; "
                "hidden_states.layers can only be -1"
            )
        self.model.set_aux_hidden_state_layers(layers)
        self.use_aux_hidden_state_outputs = True

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, with the states attached to the output."""
        state = self.execute_model_state
        # Read before sampling: that clears the state, and the next step reuses its buffers.
        step = self._gather(state)
        with self._kept_generators(state):
            output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if step is None or output is None:
            return output
        assert self._options is not None, "states were gathered"
        attach = partial(step.attach, with_prompts=self._options.prompt, finished=_finished(state))
        if hasattr(output, "get_output"):  # async scheduling: the tokens are not there yet
            finish = output.get_output
            output.get_output = lambda: attach(finish())
            return output
        return attach(output)

    def _gather(self, state: Any) -> _Step | None:
        """States wanted of this step; None on ranks that have none, or when they are off."""
        if self._options is None or state is None:
            return None
        if not isinstance(state.hidden_states, torch.Tensor):
            return None
        parts = self._parts(state)
        if not self._options.prompt and all(p.count == 1 and p.sampled for p in parts):
            index = None  # decoding only: the first rows, as they are
        else:
            index = torch.tensor(
                [row for part in parts for row in self._wanted(part)], dtype=torch.int64
            ).to(state.hidden_states.device, non_blocking=True)

        def picked(states: torch.Tensor) -> torch.Tensor:
            return states[: len(parts)] if index is None else states.index_select(0, index)

        if self._order == [0] and not state.aux_hidden_states:
            rows = picked(state.hidden_states).unsqueeze(1)
        else:
            sources = [*(state.aux_hidden_states or ()), state.hidden_states]
            rows = torch.stack([picked(sources[i]) for i in self._order], dim=1)
        rows = rows.to(DTYPES[self._options.dtype] or rows.dtype)
        if self._options.places:
            places = self._places()
            assert places is not None, "load_model has looked"
            places = places[:, : len(rows)] if index is None else places.index_select(1, index)
            rows = with_places(rows, places)
        return _Step(parts, rows, self._prompts)

    def _places(self) -> torch.Tensor | None:
        """Where the step's rows stand for M-RoPE: int64 [3, rows or more]."""
        found: torch.Tensor | None
        if (buffer := getattr(self, "mrope_positions", None)) is not None:
            found = buffer.gpu  # of vLLM's V1 model runner
        else:  # of its V2 model runner
            rope = getattr(getattr(self, "model_state", None), "rope_state", None)
            found = getattr(rope, "positions", None)
        return found

    def _wanted(self, part: _Part) -> Iterator[int]:
        assert self._options is not None
        if self._options.prompt:
            yield from range(part.first_row, part.first_row + part.prompt_rows)
        if part.sampled:
            yield part.first_row + part.count - 1

    def _parts(self, state: Any) -> list[_Part]:
        """The step's requests, in the order of their rows."""
        if hasattr(state, "scheduler_output"):  # vLLM's V1 model runner
            batch: Any = self.input_batch
            scheduled = state.scheduler_output.num_scheduled_tokens
            counts = [scheduled[name] for name in batch.req_ids]
            starts = batch.num_computed_tokens_cpu.tolist()
            prompts = batch.num_prompt_tokens.tolist()
            sampled = [not d for d in self._discarded()]
        else:  # its V2 model runner
            batch = state.input_batch
            counts = batch.num_scheduled_tokens.tolist()
            starts = batch.num_computed_tokens_np.tolist()
            prompts = self.req_states.prompt_len.np[batch.idx_mapping_np].tolist()  # type: ignore[attr-defined]
            ends = batch.prefill_len_np.tolist()
            sampled = [s + c >= e for s, c, e in zip(starts, counts, ends, strict=False)]
        parts, row = [], 0
        for i, name in enumerate(batch.req_ids):
            parts.append(_Part(name, row, starts[i], counts[i], prompts[i], sampled[i]))
            row += counts[i]
        return parts

    def _discarded(self) -> list[bool]:
        """Of each request whether its token is thrown away, because its prompt goes on."""
        count = len(self.input_batch.req_ids)
        found: list[bool] = self.discard_request_mask.np[:count].tolist()  # type: ignore[attr-defined]
        return found

    @contextlib.contextmanager
    def _kept_generators(self, state: Any) -> Iterator[None]:
        """Inside, requests in the midst of their prompt have no generator, on the CPU.

        vLLM's V1 model runner samples for them too, and rewinds the generator of a seeded one
        afterwards, which CPU generators refuse: such a request would end the engine process.
        """
        batch = getattr(self, "input_batch", None)
        generators = getattr(batch, "generators", None)
        if state is None or not generators or not hasattr(state, "scheduler_output"):
            yield
            return
        discarded = self._discarded()
        kept = {
            i: generators.pop(i)
            for i in list(generators)
            if generators[i].device.type == "cpu" and i < len(discarded) and discarded[i]
        }
        try:
            yield
        finally:
            generators.update(kept)


def _finished(state: Any) -> set[str]:
    source = getattr(state, "scheduler_output", state)
    return set(source.finished_req_ids)


def _worker_class() -> Any:
    v = contract.names()
    return contract.cpu_worker() if v.current_platform.is_cpu() else v.GPUWorker


def __getattr__(name: str) -> Any:
    """``OmniWorker``, made when vLLM asks for it: importing this module must not start vLLM."""
    if name != "OmniWorker":
        raise AttributeError(name)
    base = _worker_class()

    class OmniWorker(base):  # type: ignore[misc,valid-type]
        """vLLM's worker of this platform, with an :class:`OmniARModelRunner`."""

        def init_device(self) -> None:
            super().init_device()
            given = self.vllm_config.additional_config.get(CONFIG_KEY)
            options = None if given is None else StateOptions.model_validate(given)
            OmniARModelRunner.adopt(self.model_runner, options)

    globals()[name] = OmniWorker
    return OmniWorker

"""What comes out of vLLM, as a stage's output: text, tokens, usage, log probabilities, states."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omniq.engines.base import Emit, StageOutput
from omniq.engines.vllm.hidden_states import StateOptions, States
from omniq.engines.vllm.parsers import Parsed, RequestParser, SequenceParser
from omniq.errors import EngineError

#: Least time between two pieces of text of one request, in seconds. The first token
#: goes at once; at hundreds of steps a second a call per token would cost more than the reading.
PACE = 0.02
#: The same between two numbers of tokens: text shows by itself that it goes on.
PROGRESS_PACE = 0.5
#: JSON has no -inf; vLLM's server writes the same.
LEAST_LOGPROB = -9999.0


@dataclass(slots=True)
class Answer:
    """One answer."""

    parser: SequenceParser | None = None
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """Whole text so far."""
        return "".join(self.pieces)


@dataclass(slots=True)
class _Pending(Parsed):
    """What is new of one answer."""

    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Generation:
    """One request's answers while they grow.

    Args:
        budget: new tokens of an answer at most.
        count: answers (``n``).
        emit: where pieces go.
        parser: reads reasoning and tool calls.
        stream: whether pieces of text are wanted before the whole.
    """

    def __init__(
        self,
        budget: int,
        count: int,
        emit: Emit,
        parser: RequestParser | None = None,
        *,
        stream: bool = True,
    ) -> None:
        self._budget, self._emit, self._stream = budget, emit, stream
        self.sequences = [Answer(parser.sequence() if parser else None) for _ in range(count)]
        self.prompt_ids: list[int] = []
        self.cached_tokens = 0
        self.prompt_logprobs: list[Any] | None = None
        self._started = time.perf_counter()
        self.first_token = 0.0
        self._pending: dict[int, _Pending] = {}
        self._spoke = -PACE
        self._told = -PROGRESS_PACE
        self._timer: asyncio.TimerHandle | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(len(s.tokens) for s in self.sequences)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, with its media; 0 of embeddings."""
        return len(self.prompt_ids)

    @property
    def seconds(self) -> float:
        """Since the request began."""
        return time.perf_counter() - self._started

    def add(self, output: Any) -> None:
        """Take what is new in vLLM's ``output`` (kind ``DELTA``); on the loop."""
        if not self.first_token:
            self.first_token = self.seconds
            self.prompt_ids = output.prompt_token_ids or []
            self.cached_tokens = output.num_cached_tokens or 0
        if output.prompt_logprobs and self.prompt_logprobs is None:
            self.prompt_logprobs = [_candidates(p) for p in output.prompt_logprobs]
        for delta in output.outputs:
            self._add(delta, output.prompt_token_ids or ())
        since = time.monotonic() - self._spoke
        if since >= PACE:
            self.speak()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PACE - since, self.speak)

    def _add(self, delta: Any, prompt_ids: Sequence[int]) -> None:
        sequence = self.sequences[delta.index]
        ids = delta.token_ids
        sequence.tokens += ids
        logprobs = []
        if delta.logprobs:
            logprobs = [_logprob(i, at) for i, at in zip(ids, delta.logprobs, strict=False)]
            sequence.logprobs += logprobs
        sequence.finish_reason, sequence.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.text:
            sequence.pieces.append(delta.text)
        if not self._stream:
            return
        if sequence.parser is not None:
            finished = delta.finish_reason is not None
            piece = sequence.parser.push(delta.text, ids, prompt_ids, finished=finished)
        elif delta.text or logprobs:
            piece = Parsed(text=delta.text)
        else:
            return
        pending = self._pending.setdefault(delta.index, _Pending())
        pending.text += piece.text
        pending.reasoning += piece.reasoning
        pending.tool_calls += piece.tool_calls
        pending.logprobs += logprobs

    def speak(self, *, last: bool = False) -> None:
        """Emit what has come since the last time; ``last``: nothing comes any more."""
        self.quiet()
        now = self._spoke = time.monotonic()
        pending, self._pending = self._pending, {}
        for index, piece in pending.items():
            which = {} if len(self.sequences) == 1 else {"index": index}
            # Of all tokens since the last time, whatever has become of them.
            more: dict[str, Any] = {"logprobs": piece.logprobs} if piece.logprobs else {}
            if piece.reasoning:
                self._emit.delta("reasoning", {"text": piece.reasoning, **more, **which})
                more = {}
            if piece.text or more:
                self._emit.delta("text", {"text": piece.text, **more, **which})
            if piece.tool_calls:
                self._emit.delta("tool_calls", {"tool_calls": piece.tool_calls, **which})
        if last or now - self._told >= PROGRESS_PACE:
            self._told = now
            self._emit.progress(self.tokens, self._budget * len(self.sequences))

    def quiet(self) -> None:
        """Emit nothing more by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def output(
        self, states: Mapping[int, States] | None, options: StateOptions | None
    ) -> StageOutput:
        """The stage's output.

        Args:
            states: hidden states by answer; None if they are off.
            options: which ones.

        Raises:
            EngineError: states are missing.
        """
        answers = [self._answer(s) for s in self.sequences]
        completion = self.tokens
        values = {
            **answers[0],
            "choices": [{"index": i, **a} for i, a in enumerate(answers)],
            "usage": self._usage(completion),
        }
        if self.prompt_logprobs is not None:
            values["prompt_logprobs"] = self.prompt_logprobs
        tensors = {
            "token_ids": self._named(
                "token_ids", [torch.tensor(s.tokens, dtype=torch.int64) for s in self.sequences]
            )
        }
        if states is not None and options is not None:
            tensors.update(self._states(states, options))
        return StageOutput(
            values=values,
            tensors=tensors,
            metrics={
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": completion,
                "cached_tokens": self.cached_tokens,
                "first_token_seconds": self.first_token,
                "generation_seconds": self.seconds,
            },
        )

    def _answer(self, sequence: Answer) -> dict[str, Any]:
        text = sequence.text
        made: dict[str, Any] = {}
        if sequence.parser is not None:
            parts = sequence.parser.whole(text, sequence.tokens)
            text = parts.text
            if parts.reasoning:
                made["reasoning"] = parts.reasoning
            if parts.tool_calls:
                made["tool_calls"] = parts.tool_calls
        made |= {"text": text, "finish_reason": sequence.finish_reason}
        if sequence.stop_reason is not None:
            made["stop_reason"] = sequence.stop_reason
        if sequence.logprobs:
            made["logprobs"] = sequence.logprobs
        return made

    def _usage(self, completion: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "cached_tokens": self.cached_tokens,
        }

    def _named(self, name: str, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """One answer's tensor by the output's name, several by their numbers."""
        if len(tensors) == 1:
            return {name: tensors[0]}
        return {str(i): tensor for i, tensor in enumerate(tensors)}

    def _states(
        self, states: Mapping[int, States], options: StateOptions
    ) -> dict[str, dict[str, torch.Tensor]]:
        made: dict[str, dict[str, torch.Tensor]] = {}
        if options.positions != "prompt":
            rows = []
            for i, sequence in enumerate(self.sequences):
                count = len(sequence.tokens)
                kept = states.get(i, States()).rows
                if len(kept) < count:
                    raise EngineError(
                        f"vLLM gave {len(kept)} hidden states for {count} tokens of answer {i}"
                    )
                rows.append(options.shaped(torch.cat(kept[:count])))
            made["hidden_states"] = self._named("hidden_states", rows)
        if options.prompt:
            prompt = states.get(0, States()).prompt
            if prompt is None or len(prompt) != self.prompt_tokens:
                got = "none" if prompt is None else len(prompt)
                raise EngineError(
                    f"vLLM gave {got} hidden states for {self.prompt_tokens} prompt tokens"
                )
            made["prompt_hidden_states"] = {"prompt_hidden_states": options.shaped(prompt)}
            if options.places:
                made["prompt_positions"] = {"prompt_positions": options.placed(prompt)}
        return made


def _logprob(token: int, at: Mapping[int, Any]) -> dict[str, Any]:
    top = _candidates(at)
    assert top is not None
    chosen = next(c for c in top if c["token_id"] == token)
    return {**chosen, "top_logprobs": top}


def _candidates(at: Mapping[int, Any] | None) -> list[dict[str, Any]] | None:
    """One position's tokens, likeliest first; None for the first of a prompt."""
    if at is None:
        return None
    found = [
        {
            "token_id": token,
            "token": p.decoded_token,
            "logprob": max(p.logprob, LEAST_LOGPROB),
            "rank": p.rank,
        }
        for token, p in at.items()
    ]
    return sorted(found, key=lambda c: -c["logprob"])

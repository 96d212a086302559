"""Hidden states out of vLLM: what is asked for, and the front end's side of it.

vLLM gives hidden states to nobody when it generates. :mod:`omniq.engines.vllm.model_runner` puts
them into ``ModelRunnerOutput.pooler_output``; the scheduler passes that on as
``EngineCoreOutput.pooling_output`` next to the new token. :class:`StateCollector` takes them off in
the front-end process before vLLM's output processor sees them, which would take a request with
pooling output for an embedding request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from omniq.engines.vllm.scheduler import Unpacker

#: Where :class:`StateOptions` travel in vLLM's ``additional_config``.
CONFIG_KEY = "omniq_hidden_states"

#: Of M-RoPE: time, height, width.
AXES = 3
DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class StateOptions(BaseModel):
    """Which hidden states a stage hands out: engine argument ``hidden_states``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    positions: Literal["generated", "prompt", "all"] = Field(
        "generated",
        description="'generated': those whose logits gave the tokens; 'prompt': those of the "
        "prompt's tokens; 'all': both.",
    )
    layers: tuple[int, ...] | int = Field(
        -1,
        description="As transformers counts hidden_states: 0 the embeddings, i behind layer i, the "
        "last one behind the final norm; negative from the end. Several are stacked.",
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="'auto' is the model's."
    )
    places: bool = Field(
        False,
        description="Of models with M-RoPE also where the prompt's tokens stand: output "
        "`prompt_positions` [3, tokens], along time, height and width.",
    )

    @model_validator(mode="after")
    def _places_of_the_prompt(self) -> StateOptions:
        if self.places and not self.prompt:
            raise ValueError("places are of the prompt: positions must be prompt or all")
        return self

    @property
    def prompt(self) -> bool:
        """Whether the prompt's positions are wanted."""
        return self.positions != "generated"

    def resolved(self, count: int) -> tuple[int, ...]:
        """Indices 0 to ``count`` of the layers, for a model of ``count`` layers.

        Raises:
            ValueError: the model has fewer.
        """
        asked = (self.layers,) if isinstance(self.layers, int) else self.layers
        if not asked or any(not -count - 1 <= i <= count for i in asked):
            raise ValueError(
                f"hidden_states.layers must be within {-count - 1} and {count} for this model of "
                f"{count} layers, got {self.layers!r}"
            )
        return tuple(i % (count + 1) for i in asked)

    def shaped(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` [n, layers, hidden] as handed out: [n, hidden] if ``layers`` is one number."""
        if self.places:
            rows = rows[..., : -_width(rows)].contiguous()
        return rows[:, 0] if isinstance(self.layers, int) else rows

    def placed(self, rows: torch.Tensor) -> torch.Tensor:
        """Where ``rows`` of :func:`with_places` stand: int64 [3, n]."""
        bits = rows[:, 0, -_width(rows) :].contiguous().view(torch.int32)
        return bits.T.contiguous().to(torch.int64)


def with_places(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``rows`` with their places behind them, bit by bit, so that they take all ways together.

    Args:
        rows: [n, layers, hidden].
        places: whole numbers [3, n].
    """
    bits = places.T.to(rows.device, torch.int32).contiguous().view(rows.dtype)
    return torch.cat([rows, bits.unsqueeze(1).expand(-1, rows.shape[1], -1)], dim=-1)


def _width(rows: torch.Tensor) -> int:
    """Columns that three places take."""
    return AXES * torch.int32.itemsize // rows.element_size()


@dataclass(slots=True)
class States:
    """Hidden states of one sequence, on the CPU."""

    prompt: torch.Tensor | None = None
    """[prompt tokens, layers, hidden]."""
    rows: list[torch.Tensor] = field(default_factory=list)
    """One [1, layers, hidden] a generated token."""


class StateCollector:
    """Front-end side: states per request id and sequence, kept until taken.

    Args:
        output_processor: vLLM's ``OutputProcessor`` of the engine; wrapped in place.
    """

    def __init__(self, output_processor: Any) -> None:
        self._found: dict[str, dict[int, States]] = {}
        self._unpacker = Unpacker()
        self._states = output_processor.request_states
        self._process: Callable[..., Any] = output_processor.process_outputs
        output_processor.process_outputs = self._process_outputs

    def __len__(self) -> int:
        """Requests of which states are kept."""
        return len(self._found)

    def _process_outputs(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._unpacker.unpack(outputs)
        for output in outputs:
            packed, output.pooling_output = output.pooling_output, None
            state = self._states.get(output.request_id)
            if packed is not None and state is not None and output.new_token_ids:
                sequences = self._found.setdefault(state.external_req_id, {})
                kept = sequences.setdefault(state.request_index, States())
                # A prompt comes whole; again if its request was preempted meanwhile.
                if len(packed) > 1:
                    kept.prompt = packed[:-1]
                kept.rows.append(packed[-1:])
        return self._process(outputs, *args, **kwargs)

    def states(self, request_id: str) -> States:
        """What there is by now of a request's first answer; keeps it."""
        return self._found.get(request_id, {}).get(0) or States()

    def take(self, request_id: str) -> dict[int, States]:
        """States of each sequence of a request, in token order; forgets them."""
        return self._found.pop(request_id, {})

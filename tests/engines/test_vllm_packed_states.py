"""Hidden states of a step travel as one tensor, and arrive as each request's own."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from omniq.engines.vllm.hidden_states import StateOptions, with_places
from omniq.engines.vllm.model_runner import _Rows
from omniq.engines.vllm.scheduler import Unpacker, pack


@dataclass
class Output:
    """As far as vLLM's ``EngineCoreOutput`` matters here."""

    pooling_output: torch.Tensor | None
    new_token_ids: list[int] = field(default_factory=lambda: [1])


def rows(count: int, number: int) -> torch.Tensor:
    return torch.full((count, 2, 3), float(number))


def test_a_step_is_one_tensor_and_comes_apart_again() -> None:
    """Prompts keep their own; a request whose token was thrown away has none."""
    states = [rows(1, 0), rows(5, 1), rows(1, 2), None, rows(1, 4)]
    outputs = [Output(s, [] if s is None else [1]) for s in states]
    pack(outputs)
    sent = [o.pooling_output for o in outputs if o.pooling_output is not None]
    assert [tuple(s.shape) for s in sent] == [(1, 3, 2, 3), (5, 2, 3)]
    Unpacker().unpack(outputs)
    for output, state in zip(outputs, states, strict=True):
        if state is None:
            assert output.pooling_output is None
        else:
            assert torch.equal(output.pooling_output, state)


def test_one_request_and_steps_without_states_stay_as_they_are() -> None:
    alone, without = [Output(rows(1, 7))], [Output(None), Output(None)]
    for outputs in (alone, without):
        pack(outputs)
        Unpacker().unpack(outputs)
    assert torch.equal(alone[0].pooling_output, rows(1, 7))
    assert [o.pooling_output for o in without] == [None, None]


def test_states_that_do_not_fit_the_requests_are_an_error() -> None:
    outputs: list[Any] = [Output(rows(1, i)) for i in range(3)]
    pack(outputs)
    with pytest.raises(RuntimeError, match="fewer hidden states than requests"):
        Unpacker().unpack([*outputs, Output(None)])
    outputs = [Output(rows(1, i)) for i in range(3)]
    pack(outputs)
    unpacker = Unpacker()
    unpacker.unpack(outputs[:2])
    again: list[Any] = [Output(rows(1, i)) for i in range(2)]
    pack(again)
    with pytest.raises(RuntimeError, match="1 hidden states too many"):
        unpacker.unpack(again)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_a_large_step_comes_in_slices(size: int) -> None:
    """vLLM's front end takes 128 outputs at a time; the first carries what others get later."""
    unpacker = Unpacker()
    for step in range(2):
        states = [rows(5, 9) if i == 3 else rows(1, 10 * step + i) for i in range(7)]
        outputs = [Output(s) for s in states]
        pack(outputs)
        for start in range(0, len(outputs), size):
            unpacker.unpack(outputs[start : start + size])
        for output, state in zip(outputs, states, strict=True):
            assert torch.equal(output.pooling_output, state)


def test_between_processes_states_are_one_tensor() -> None:
    whole = torch.arange(24.0).reshape(4, 2, 3)
    sent = _Rows([whole[:1], None, whole[1:3], whole[3:]])
    got = pickle.loads(pickle.dumps(sent))
    assert [None if t is None else t.tolist() for t in got] == [
        None if t is None else t.tolist() for t in sent
    ]
    assert pickle.loads(pickle.dumps(_Rows([None, None]))) == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layers", [-1, (0, 1)])
def test_places_travel_with_their_rows_bit_by_bit(dtype: torch.dtype, layers: Any) -> None:
    """Through packing and pickling, in types that cannot hold such numbers."""
    options = StateOptions(positions="all", layers=layers, places=True)
    count = 1 if layers == -1 else len(layers)
    states = torch.randn(5, count, 8).to(dtype)
    places = torch.tensor([[0, 1, 70_001, 2**31 - 1, 4], [0, 1, 7, 8, 9], [0, 2, 0, 2, 0x7F800001]])
    whole = with_places(states, places)
    sent = pickle.loads(pickle.dumps(_Rows([whole[:1], None, whole[1:]])))
    outputs: list[Any] = [Output(row) for row in (*sent[0].split(1), *sent[2].split(1))]
    pack(outputs)
    Unpacker().unpack(outputs)
    rows = torch.cat([o.pooling_output for o in outputs])
    assert options.placed(rows).tolist() == places.tolist()
    shaped = options.shaped(rows)
    assert shaped.is_contiguous()
    assert torch.equal(shaped, states[:, 0] if layers == -1 else states)

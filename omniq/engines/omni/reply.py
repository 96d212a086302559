"""What leaves a thinker for its talker: the output ``reply``, whole or by chunks.

The first chunk holds ``prompt_token_ids`` (int64 [P], media expanded), ``prompt_positions``
([3, P], the thinker's own, of any dtype) and ``prompt_hidden_states`` ([P, hidden]);
every chunk holds ``token_ids`` (int64 [n]) and ``hidden_states`` ([n, hidden]): row i is the state
at the position whose logits gave token i, as of every AR engine here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import torch

from omniq.engines.base import StageInput
from omniq.engines.inputs import given_input, refuse_input

NAME = "reply"
PROMPT = ("prompt_token_ids", "prompt_positions", "prompt_hidden_states")
TOKENS = ("token_ids", "hidden_states")


@dataclass(frozen=True, slots=True)
class ThinkerPrompt:
    """The thinker's prompt as its talker needs it."""

    ids: torch.Tensor
    """int64 [P]."""
    positions: torch.Tensor
    """[3, P]."""
    states: torch.Tensor
    """[P, hidden]."""


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """Some tokens of the answer; ``prompt`` comes with the first."""

    ids: torch.Tensor
    """int64 [n]."""
    states: torch.Tensor
    """[n, hidden]."""
    prompt: ThinkerPrompt | None = None


def tensors_of(
    ids: torch.Tensor, states: torch.Tensor, prompt: ThinkerPrompt | None
) -> dict[str, torch.Tensor]:
    """Some tokens of the answer as a chunk, or all of them.

    Args:
        ids: int64 [n].
        states: [n, hidden].
        prompt: where they are the first.
    """
    tensors = dict(zip(TOKENS, (ids, states), strict=True))
    if prompt is not None:
        given = (prompt.ids, prompt.positions, prompt.states)
        tensors |= zip(PROMPT, given, strict=True)
    return tensors


def part_of(tensors: Mapping[str, torch.Tensor]) -> ReplyPart:
    """One chunk, or the whole.

    Raises:
        InvalidRequest: a tensor is missing.
    """
    needed = (*PROMPT, *TOKENS) if PROMPT[0] in tensors else TOKENS
    if missing := [name for name in needed if name not in tensors]:
        refuse_input(NAME, f"needs {', '.join(needed)}; {missing[0]} is missing")
    prompt = None
    if PROMPT[0] in tensors:
        prompt = ThinkerPrompt(*(tensors[name] for name in PROMPT))
    return ReplyPart(tensors[TOKENS[0]], tensors[TOKENS[1]], prompt)


async def parts_of(inputs: Mapping[str, StageInput], size: int) -> AsyncIterator[ReplyPart]:
    """The input ``reply`` as it comes, of a thinker whose states are ``size`` wide.

    Raises:
        InvalidRequest: there is none, it does not begin with the prompt, or has other shapes.
    """
    given, first = given_input(inputs, NAME), True
    if given.chunks is None:
        yield _checked(part_of(given.tensors), first, size)
        return
    async for chunk in given.chunks:
        yield _checked(part_of(chunk.tensors), first, size)
        first = False


def _checked(part: ReplyPart, first: bool, size: int) -> ReplyPart:
    if first and part.prompt is None:
        refuse_input(NAME, f"must begin with {', '.join(PROMPT)}")
    _check_rows(TOKENS, part.ids, part.states, size)
    if part.prompt is not None:
        _check_rows((PROMPT[0], PROMPT[2]), part.prompt.ids, part.prompt.states, size)
        shape = [*part.prompt.positions.shape]
        if shape != [3, len(part.prompt.ids)]:
            refuse_input(NAME, f"{PROMPT[1]} must be [3, {len(part.prompt.ids)}], are {shape}")
    return part


def _check_rows(names: tuple[str, str], ids: torch.Tensor, states: torch.Tensor, size: int) -> None:
    if ids.ndim != 1 or ids.is_floating_point():
        refuse_input(NAME, f"{names[0]} must be integers [n], are {ids.dtype} {[*ids.shape]}")
    if [*states.shape] != [len(ids), size]:
        refuse_input(NAME, f"{names[1]} must be [{len(ids)}, {size}], are {[*states.shape]}")

"""Reading a stage's named inputs, with errors that say which one is wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import NoReturn

import torch

from omniq.engines.base import StageInput
from omniq.errors import InvalidRequest


def given_input(inputs: Mapping[str, StageInput], name: str) -> StageInput:
    """Input ``name``.

    Raises:
        InvalidRequest: missing.
    """
    if name not in inputs:
        raise _bad(name, f"missing; the stage got: {', '.join(inputs) or 'nothing'}")
    return inputs[name]


def text_input(inputs: Mapping[str, StageInput], name: str) -> str:
    """The text of input ``name``.

    Raises:
        InvalidRequest: missing, or no string.
    """
    value = given_input(inputs, name).value
    if not isinstance(value, str):
        raise _bad(name, f"must be text, not {type(value).__name__}")
    return value


def tensor_input(inputs: Mapping[str, StageInput], name: str) -> torch.Tensor:
    """The one floating-point tensor of input ``name``.

    Raises:
        InvalidRequest: missing, none or several tensors, or integers.
    """
    given = given_input(inputs, name)
    try:
        tensor = given.tensor
    except ValueError as exc:
        raise _bad(name, str(exc)) from exc
    if not tensor.is_floating_point():
        raise _bad(name, f"must be floating point, is {tensor.dtype}")
    return tensor


async def codes_input(inputs: Mapping[str, StageInput]) -> AsyncIterator[torch.Tensor]:
    """The tensors of input ``codes`` as they come: by chunks, or all at once.

    Raises:
        InvalidRequest: missing, or something else than one tensor at once.
    """
    given = given_input(inputs, "codes")
    if given.chunks is None:
        try:
            codes = given.tensor
        except ValueError as exc:
            raise _bad("codes", str(exc)) from exc
        yield codes
        return
    async for chunk in given.chunks:
        if chunk.tensors:  # the end may come without
            yield chunk.tensors["codes"]


def refuse_input(name: str, message: str) -> NoReturn:
    """Raise for input ``name``.

    Raises:
        InvalidRequest: always.
    """
    raise _bad(name, message)


def _bad(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(
        f"stage input {name!r}: {message}", fields=[{"field": f"input.{name}", "message": message}]
    )

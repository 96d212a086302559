"""A diffusion stage's inputs: conditions, pictures, latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from omniq.engines.base import StageInput
from omniq.engines.families.base import NEGATIVE, Family
from omniq.engines.inputs import refuse_input, tensor_input
from omniq.errors import InvalidRequest

CONDITION = "condition"


def condition_input(
    inputs: Mapping[str, StageInput], family: Family, dim: int | None
) -> dict[str, torch.Tensor]:
    """Condition tensors by name, without batch axis, on the CPU.

    The input ``condition`` holds several; inputs of a tensor's own name replace its.

    Args:
        inputs: the stage's.
        family: knows the names.
        dim: width of the prompt embeds; None if any.

    Raises:
        InvalidRequest: ``prompt_embeds`` is missing, or a tensor has the wrong shape.
    """
    twins = (NEGATIVE + name for name in family.condition if name not in family.integers)
    names = [*family.condition, *twins, *family.beside, *family.optional]
    found: dict[str, torch.Tensor] = {}
    for source in family.condition_inputs:
        if source in inputs:
            found |= {n: t for n, t in inputs[source].tensors.items() if n in names}
    for name in names:
        if name in inputs:
            any_type = name.endswith("mask") or name in family.integers
            found[name] = inputs[name].tensor if any_type else tensor_input(inputs, name)
    if "prompt_embeds" not in found:
        tensor_input(inputs, "prompt_embeds")  # says what is missing
    for name in family.integers:
        if name in found and (found[name].is_floating_point() or found[name].is_complex()):
            refuse_input(name, f"must be integers, is {found[name].dtype}")
    return {name: _without_batch(name, tensor, dim, family) for name, tensor in found.items()}


def _without_batch(name: str, given: torch.Tensor, dim: int | None, family: Family) -> torch.Tensor:
    embeds = name.removeprefix(NEGATIVE) == "prompt_embeds"
    axes = family.integers.get(name, 2 if embeds or name in family.beside else 1)
    batched = given.ndim == axes + 1 and given.shape[0] == 1
    tensor = given[0] if batched else given
    width = dim if embeds else None
    if tensor.ndim != axes or 0 in tensor.shape or (width or tensor.shape[-1]) != tensor.shape[-1]:
        form = f"tokens, {width or 'dim'}" if axes == 2 else "n"
        raise InvalidRequest(
            f"stage input {name!r}: must be [{form}] or [1, {form}], is {list(given.shape)}"
        )
    return tensor


def image_input(inputs: Mapping[str, StageInput], name: str = "image") -> list[Any]:
    """Pictures (PIL, RGB) of input ``name``: tensors uint8 [H, W, 3], one or several.

    Raises:
        InvalidRequest: they are something else.
    """
    from PIL import Image  # noqa: PLC0415 - text-only stages need none

    if name not in inputs:
        return []
    pictures = []
    for tensor in inputs[name].tensors.values():
        if tensor.dtype != torch.uint8 or tensor.ndim != 3 or tensor.shape[2] != 3:
            raise InvalidRequest(
                f"stage input {name!r}: pictures are uint8 [H, W, 3], not "
                f"{tensor.dtype} {list(tensor.shape)}",
                fields=[{"field": f"input.{name}", "message": "must be uint8 [H, W, 3]"}],
            )
        pictures.append(Image.fromarray(tensor.cpu().numpy()))
    return pictures


def black_picture(height: int, width: int) -> StageInput:
    """A picture input for warming up."""
    return StageInput(tensors={"image": torch.zeros(height, width, 3, dtype=torch.uint8)})

"""CSM: what its AR model makes, and what of it is sound (transformers ``generation_csm.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

Frame = Sequence[int]


def ends(frame: Frame, end: int) -> bool:
    """Whether generation stops behind ``frame``, one code a codebook: all but the last are
    ``end``.
    """
    return all(code == end for code in frame[:-1])


def is_sound(frame: Frame, end: int) -> bool:
    """Whether ``frame`` is decoded; the one that is all ``end`` is not."""
    return any(code != end for code in frame)


def codes_of(frames: Sequence[Frame], codebooks: int) -> torch.Tensor:
    """int64 [frames, codebooks]."""
    return torch.tensor(list(frames), dtype=torch.int64).reshape(len(frames), codebooks)


def portions(ready: int, sent: int, size: int, *, final: bool) -> Iterator[tuple[int, int]]:
    """Ranges of frames to hand on: whole portions of ``size``, at the end also the rest.

    Args:
        ready: frames that are there.
        sent: frames that were handed on.
        size: frames of a portion.
        final: no more will come.
    """
    while ready - sent >= size:
        yield sent, sent + size
        sent += size
    if final and ready > sent:
        yield sent, ready


def conversation(text: str, voice: str, reference: tuple[str, Any] | None) -> list[dict[str, Any]]:
    """Messages for the processor: ``text`` said by speaker ``voice``.

    Args:
        text: what is to be said.
        voice: the speaker: in CSM a number, ``"0"`` and up.
        reference: words, and samples of the same speaker saying them (float32 [samples]).
    """
    messages = []
    if reference is not None:
        words, samples = reference
        content = [{"type": "text", "text": words}, {"type": "audio", "path": samples}]
        messages.append({"role": voice, "content": content})
    messages.append({"role": voice, "content": [{"type": "text", "text": text}]})
    return messages

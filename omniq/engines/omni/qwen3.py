"""Qwen3-Omni's glue: what the talker is fed of the thinker's prompt and answer.

As ``Qwen3OmniMoeForConditionalGeneration.generate`` of transformers does it with everything at
hand, here for an answer that grows. All of it is arithmetic on tensors; no model is in here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from omniq.engines.omni.reply import ReplyPart, ThinkerPrompt

#: Of the thinker's vocabulary to the talker's space: int64 [n] to [n, hidden of the talker].
Text = Callable[[torch.Tensor], torch.Tensor]
#: Text rows before the speech begins, for the codec's words about it.
PADS = 4
#: Tokens of the answer's head, ``<|im_start|>assistant`` and a line's end.
HEAD = 3


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids that the glue needs: of the thinker's vocabulary, and of the talker's codec."""

    media: tuple[int, ...]
    im_start: int
    user: int
    assistant: int
    tts_bos: int
    tts_eos: int
    tts_pad: int
    codec: tuple[int, ...]
    """Codes that begin the speech; the speaker's stands before the last two."""


def user_mask(ids: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """bool [P]: tokens of the user's turns, their heads included."""
    places = torch.arange(len(ids))
    starts = torch.where(ids == tokens.im_start, places, -1).cummax(0).values.clamp_min(0)
    roles = ids[(starts + 1).clamp_max(len(ids) - 1)]
    return roles == tokens.user


def assistant_start(ids: torch.Tensor, tokens: Tokens) -> int | None:
    """Where the answer's head begins; None: the prompt has none."""
    found = ((ids[:-1] == tokens.im_start) & (ids[1:] == tokens.assistant)).nonzero()
    return int(found[-1]) if len(found) else None


def user_rows(
    prompt: ThinkerPrompt,
    text: Text,
    hidden: Callable[[torch.Tensor], torch.Tensor],
    tokens: Tokens,
) -> torch.Tensor:
    """[n, hidden of the talker]: the user's turns; of media the thinker's states.

    Args:
        hidden: of the thinker's states to the talker's space.
    """
    kept = user_mask(prompt.ids, tokens)
    ids, states = prompt.ids[kept], prompt.states[kept]
    rows = text(ids)
    media = torch.isin(ids, torch.tensor(tokens.media, dtype=torch.int64))
    if media.any():
        rows[media.to(rows.device)] = hidden(states[media]).to(rows.dtype)
    return rows


def positions(prompt: ThinkerPrompt, behind: int, tokens: Tokens) -> torch.Tensor:
    """[3, n + behind]: of the user's turns, as if nothing else had been before them, and of the
    text that follows them. What is left out is text. Those of videos, and behind them, may lie
    between whole numbers.
    """
    kept = user_mask(prompt.ids, tokens)
    left_out = (~kept).long().cumsum(0)
    users = prompt.positions[:, kept] - left_out[kept]
    begin = users.max() + 1 if users.numel() else 0
    return torch.cat([users, (torch.arange(behind) + begin).expand(3, behind)], 1)


def assistant_rows(
    head: torch.Tensor, text: Text, codec: torch.Tensor, first: torch.Tensor, tokens: Tokens
) -> torch.Tensor:
    """[9, hidden]: the head of the answer, the codec's words, the answer's first row.

    Args:
        head: [3, hidden], of the talker's space.
        codec: [6, hidden]: embeddings of ``tokens.codec`` with the speaker.
        first: [1, hidden].
    """
    pad, bos = text(torch.tensor([tokens.tts_pad])), text(torch.tensor([tokens.tts_bos]))
    texts = torch.cat([head, pad.expand(PADS, -1), bos, first])
    codes = torch.cat([codec.new_zeros(len(head), codec.shape[1]), codec])
    return texts + codes


class ReplyRows:
    """The answer as rows for the talker, which takes one a frame: its text in the talker's space.

    The last token is never fed and has none; the end of text and padding, which never ends, stand
    in its place.
    What the prompt has behind the answer's head is said too.
    """

    def __init__(self, text: Text, tokens: Tokens) -> None:
        self._text, self._tokens = text, tokens
        self._waiting: torch.Tensor | None = None

    def push(self, part: ReplyPart) -> torch.Tensor:
        """The rows that ``part`` completes: [n, hidden]."""
        ids = part.ids
        if part.prompt is not None:
            start = assistant_start(part.prompt.ids, self._tokens)
            if start is not None:
                ids = torch.cat([part.prompt.ids[start + HEAD :], ids])
        if self._waiting is not None:
            ids = torch.cat([self._waiting, ids])
        self._waiting = ids[-1:]
        return self._text(ids[:-1])

    def end(self) -> torch.Tensor:
        """The rows behind the last token: [2, hidden], of which the second repeats."""
        return self._text(torch.tensor([self._tokens.tts_eos, self._tokens.tts_pad]))

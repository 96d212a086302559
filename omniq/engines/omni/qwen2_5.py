"""Qwen2.5-Omni's glue: what the talker is fed of the thinker's prompt and answer.

As ``Qwen2_5OmniForConditionalGeneration.generate`` of transformers does it with everything at hand,
here for an answer that grows. All of it is arithmetic on tensors; no model is in here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from omniq.engines.omni.reply import ReplyPart, ThinkerPrompt

#: Rows of the thinker's embeddings by token id: int64 [n] to [n, hidden].
Embed = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids that the glue needs: of the thinker's vocabulary, and of the talker's codec."""

    media: tuple[int, ...]
    """Placeholders of audio, images and video: the talker hears their states only."""
    text_eos: int
    text_pad: int
    codec_pad: int
    codec_bos: int
    codec_eos: int
    codec_mask: int

    @property
    def ends(self) -> tuple[int, int]:
        """Codes that end the speech."""
        return self.codec_pad, self.codec_eos

    @property
    def seen(self) -> tuple[int, int, int]:
        """What stands before the first code, as the repetition penalty sees it."""
        return self.codec_mask, self.codec_pad, self.codec_bos


def prompt_rows(prompt: ThinkerPrompt, embed: Embed, tokens: Tokens) -> torch.Tensor:
    """[P, hidden]: state plus embedding of each prompt token; of media the state alone."""
    embeds = embed(prompt.ids)
    media = torch.isin(prompt.ids, torch.tensor(tokens.media, dtype=torch.int64))
    embeds = embeds.masked_fill(media.to(embeds.device)[:, None], 0)
    return prompt.states.to(embeds.device, embeds.dtype) + embeds


def prompt_embeds(
    rows: torch.Tensor, text_bos: torch.Tensor, first: torch.Tensor, codec: torch.Tensor
) -> torch.Tensor:
    """[P + 2, hidden]: what the talker's first forward pass gets.

    Args:
        rows: of :func:`prompt_rows`.
        text_bos: [1, hidden], embedding of the speaker's first text token.
        first: [1, hidden], the answer's first row.
        codec: [2, hidden], the talker's embeddings of ``codec_pad`` and ``codec_bos``.
    """
    return torch.cat([rows, text_bos + codec[:1], first + codec[1:]])


def positions_behind(positions: torch.Tensor, count: int) -> torch.Tensor:
    """[3, count]: the positions that follow ``positions`` [3, P] in text."""
    return (positions.max() + 1 + torch.arange(count)).expand(3, count)


class ReplyRows:
    """The answer as rows for the talker, which takes one a code.

    Row i is the embedding of token i plus the state that its own position came to, which the
    thinker has when it has computed token i + 1. The last token is never fed and so has none; the
    end of text and padding, which never ends, stand in its place.
    """

    def __init__(self, embed: Embed, tokens: Tokens) -> None:
        self._embed, self._tokens = embed, tokens
        self._waiting: torch.Tensor | None = None

    def push(self, part: ReplyPart) -> torch.Tensor:
        """The rows that ``part`` completes: [n, hidden]."""
        ids = part.ids
        states = part.states
        if self._waiting is None:
            # The first state is the prompt's last.
            states = states[1:]
        else:
            ids = torch.cat([self._waiting, ids])
        if len(part.ids):
            self._waiting = part.ids[-1:]
        embeds = self._embed(ids[:-1])
        return embeds + states.to(embeds.device, embeds.dtype)

    def end(self) -> torch.Tensor:
        """The rows behind the last token: [2, hidden], of which the second repeats."""
        return self._embed(torch.tensor([self._tokens.text_eos, self._tokens.text_pad]))

"""Qwen2.5-Omni's talker: its model, and what each of its forward passes gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omniq.engines.omni import qwen2_5
from omniq.engines.omni.reply import ThinkerPrompt
from omniq.engines.omni.speakers import Speakers
from omniq.engines.omni.talker import Talker, TalkerPrompt, TalkerReply, TalkerStep
from omniq.engines.omni.weights import Rows, load_part


class Qwen25Talker(Talker):
    """``Qwen2_5OmniTalkerForConditionalGeneration``; one code a step."""

    def __init__(self, folder: Path, device: str, **options: Any) -> None:
        from transformers import (  # noqa: PLC0415 - slow import
            Qwen2_5OmniConfig,
            Qwen2_5OmniTalkerForConditionalGeneration,
        )

        model = load_part(Qwen2_5OmniTalkerForConditionalGeneration, folder, "talker", **options)
        self._talker = model.to(device).eval()
        self.model = self._talker.model
        self.config = self._talker.config
        thinker = Qwen2_5OmniConfig.from_pretrained(folder).thinker_config
        self.thinker_size = int(self.config.embedding_size)
        self._tokens = tokens_of(thinker, self.config)
        self.ends, self.seen = self._tokens.ends, self._tokens.seen
        self._embed = Rows(folder, "thinker.model.embed_tokens.weight", model.dtype, device)
        self.speakers = Speakers.of_qwen2_5(folder)

    def prompt(self, prompt: ThinkerPrompt, first: torch.Tensor, speaker: str) -> TalkerPrompt:
        """See :class:`Talker`."""
        rows = qwen2_5.prompt_rows(prompt, self._embed, self._tokens)
        bos = self._embed([self.speakers.text_bos(speaker)])
        codec = self._codec([self._tokens.codec_pad, self._tokens.codec_bos])
        embeds = qwen2_5.prompt_embeds(rows, bos, first, codec)
        behind = qwen2_5.positions_behind(prompt.positions, 2)
        positions = torch.cat([prompt.positions, behind], 1)
        return TalkerPrompt(self._talker.thinker_to_talker_proj(embeds), positions)

    def reply(self) -> TalkerReply:
        """See :class:`Talker`."""
        return qwen2_5.ReplyRows(self._embed, self._tokens)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """See :class:`Talker`; the beginning of speech is never drawn."""
        logits = self._talker.codec_head(states).float()
        logits[..., self._tokens.codec_bos] = -torch.inf
        return logits

    def step(self, steps: list[TalkerStep]) -> tuple[torch.Tensor, list[list[int]]]:
        """See :class:`Talker`."""
        rows = torch.cat([s.row for s in steps])
        embeds = self._codec([s.code for s in steps]) + rows
        return self._talker.thinker_to_talker_proj(embeds), [[s.code] for s in steps]

    def _codec(self, codes: list[int]) -> torch.Tensor:
        table = self._talker.get_input_embeddings()
        return table(torch.tensor(codes, device=table.weight.device))


def tokens_of(thinker: Any, talker: Any) -> qwen2_5.Tokens:
    """The ids that the glue needs, of the configurations of both."""
    return qwen2_5.Tokens(
        media=(thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id),
        text_eos=talker.tts_text_end_token_id,
        text_pad=talker.tts_text_pad_token_id,
        codec_pad=talker.tts_codec_pad_token_id,
        codec_bos=talker.tts_codec_start_token_id,
        codec_eos=talker.tts_codec_end_token_id,
        codec_mask=talker.tts_codec_mask_token_id,
    )

"""Qwen3-Omni by transformers' own ``generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from qwen_omni_reference import SEED

from omniq.engines.base import StageInput
from omniq.engines.omni.families import QWEN3
from omniq.engines.omni.prompts import MediaPrompts
from omniq.engines.text import PromptEncoder


class Reference:
    """The whole model in transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen3OmniMoeForConditionalGeneration

        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self._prompts = MediaPrompts(
            folder, PromptEncoder(folder, chat_template=True), QWEN3.processor
        )
        self.codes = torch.zeros(0)
        decode, talk = self.model.code2wav.chunked_decode, self.model.talker.generate
        self._more: dict[str, Any] = {}

        def kept(codes: torch.Tensor, **more: Any) -> torch.Tensor:
            self.codes = codes[0].T
            return decode(codes, **more)

        def seeded(**more: Any) -> Any:
            torch.manual_seed(SEED)
            return talk(**more, **self._more)

        self.model.code2wav.chunked_decode = kept
        self.model.talker.generate = seeded

    def mend(self, sound_in_video: bool) -> None:
        """Give the talker what transformers 5.19 leaves out: the audio encoder's configuration,
        without which it fails where there are sounds beside pictures or videos, and whether the
        sounds are those of the videos.
        """
        self.model.talker.config.audio_config = self.model.thinker.config.audio_config
        self._more = {"use_audio_in_video": sound_in_video}

    def answer(
        self, messages: list[dict[str, Any]], tokens: int, codes: int, **more: Any
    ) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Tokens, frames of codes and waveform."""
        ids, media = self._prompts.read({"messages": StageInput(messages)}, {}, 1024)
        return self.answer_to({"input_ids": torch.tensor([ids]), **media}, tokens, codes, **more)

    def answer_to(
        self, inputs: dict[str, Any], tokens: int, codes: int, **more: Any
    ) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """The same of what a processor makes."""
        ids = inputs["input_ids"]
        made, waveform = self.model.generate(
            **{**inputs, "attention_mask": torch.ones_like(ids)},
            thinker_max_new_tokens=tokens,
            thinker_eos_token_id=self.model.config.im_end_token_id,
            talker_max_new_tokens=codes,
            **more,
        )
        sequences = made.sequences if hasattr(made, "sequences") else made
        return sequences[0, ids.shape[1] :].tolist(), self.codes, waveform.reshape(-1)

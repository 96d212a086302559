"""Qwen2.5-Omni by transformers' own ``generate``, and conversations for it."""

from __future__ import annotations

import base64
import io
import wave
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tiny_qwen_omni import CODEC, INPUT_RATE, picture, sound
from tiny_vision import data_url

from omniq.engines.base import StageInput
from omniq.engines.omni.families import QWEN2_5
from omniq.engines.omni.prompts import MediaPrompts
from omniq.engines.text import PromptEncoder

ENDS = [CODEC["pad"], CODEC["end"]]
SEED = 11
STAGES = ("thinker", "talker", "token2wav")
WORDS = "a red circle above a blue square"
#: Parts of a user's turn, by what they are of.
PROMPTS = {
    "text": [WORDS],
    "audio": ["What is it? ", sound(1)],
    "image": [picture(1), "What is it?"],
    "several": [sound(2, 0.5), picture(2, 112, 56), "and", sound(3, 2.0), picture(3)],
}


def params(tokens: int = 24, codes: int = 50, **talker: Any) -> dict[str, dict[str, Any]]:
    """As ``generate`` has them by default, but for the lengths: greedy text, sampled speech."""
    sampling = {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05}
    return {
        "thinker": {"temperature": 0.0, "max_tokens": tokens},
        "talker": {**sampling, "seed": SEED, "max_tokens": codes, **talker},
        "token2wav": {"seed": SEED},
    }


def wav(samples: np.ndarray) -> str:
    """Base64 of a WAV file, as messages hold it; 16 bits lose what the reference loses, too."""
    file = io.BytesIO()
    with wave.open(file, "wb") as w:
        w.setparams((1, 2, INPUT_RATE, 0, "NONE", ""))
        w.writeframes((samples * 32_767).astype("<i2").tobytes())
    return base64.b64encode(file.getvalue()).decode()


def turn(*parts: Any) -> list[dict[str, Any]]:
    """A user's message of texts, pictures and sounds."""
    content = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif isinstance(part, np.ndarray):
            data = {"data": wav(part), "format": "wav"}
            content.append({"type": "input_audio", "input_audio": data})
        else:
            content.append({"type": "image_url", "image_url": {"url": data_url(part)}})
    return [{"role": "user", "content": content}]


_randn = torch.randn


def _drawn_on_cpu(*size: Any, device: Any = None, **more: Any) -> torch.Tensor:
    """``torch.randn``, the same for a seed on every device, as omniq's noise is."""
    return _randn(*size, **more).to(device)


class Reference:
    """The whole model in transformers, on ``device``; token2wav in float32 in any case."""

    def __init__(
        self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        from transformers import Qwen2_5OmniForConditionalGeneration

        self.model = Qwen2_5OmniForConditionalGeneration.from_pretrained(
            folder, dtype=dtype, device_map=device
        ).eval()
        self.codes: list[int] = []
        token2wav = self.model.token2wav.forward

        def seeded(code: torch.Tensor, **more: Any) -> torch.Tensor:
            self.codes = code[0].tolist()
            torch.manual_seed(SEED)  # of the noise alone
            with patch.object(torch, "randn", _drawn_on_cpu):
                return token2wav(code, **more)

        self.model.token2wav.forward = seeded
        talk = self.model.talker.generate

        def talk_seeded(**more: Any) -> Any:
            torch.manual_seed(SEED)
            return talk(**more)

        self.model.talker.generate = talk_seeded

        encoder = PromptEncoder(folder, chat_template=True)
        self._prompts = MediaPrompts(folder, encoder, QWEN2_5.processor)

    def inputs(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """What the model's processor makes of a conversation, with a token of padding before it.

        Of a prompt without padding, ``generate`` (transformers 5.19) drops the mask before its
        talker sees it, which then leaves out the codec's tokens and the positions of media.
        """
        ids, more = self._prompts.read({"messages": StageInput(messages)}, {}, 1024)
        tensor = torch.tensor([[0, *ids]])
        mask = torch.ones_like(tensor)
        mask[:, 0] = 0
        if "pixel_values" in more:  # the talker's `generate` refuses them
            more["thinker_pixel_values"] = more.pop("pixel_values")
        return {"input_ids": tensor, "attention_mask": mask, **more}

    def answer(
        self, inputs: dict[str, Any], tokens: int, codes: int, **more: Any
    ) -> tuple[list[int], list[int], torch.Tensor]:
        """Tokens, codes and waveform."""
        device = self.model.device
        made, waveform = self.model.generate(
            **{n: v.to(device) if torch.is_tensor(v) else v for n, v in inputs.items()},
            thinker_max_new_tokens=tokens,
            talker_max_new_tokens=codes,
            talker_eos_token_id=ENDS,
            **more,
        )
        return made[0, inputs["input_ids"].shape[1] :].tolist(), self.codes, waveform

    def text(self, tokens: list[int]) -> str:
        """As a client reads it."""
        return str(self._prompts._encoder.tokenizer.decode(tokens, skip_special_tokens=True))

"""`vllm serve FOLDER --omni` of Qwen3-Omni: text and speech to the OpenAI client."""

from __future__ import annotations

import base64
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from omni_chat import RATE, most_apart, samples_of, streamed
from qwen3_omni_reference import Reference
from qwen_omni_reference import SEED, turn, wav
from served import run_example, serve_omni, served
from tiny_qwen3_omni import make_qwen3_omni
from tiny_qwen_omni import picture, sound
from transformers import AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
#: Of one window of code2wav each, and of two.
TOKENS, CODES, MORE_CODES = 20, 20, 46


def test_text_and_speech_equal_generate_whole_and_streamed(tmp_path: Path) -> None:
    """A picture, then a sound in; the tokens and the sound of transformers out."""
    folder = make_qwen3_omni(tmp_path / "tiny-omni-3")
    reference = Reference(folder)
    text_of = partial(AutoTokenizer.from_pretrained(folder).decode, skip_special_tokens=True)
    seen: Any = turn(picture(1, 64, 96), "What is it?")
    heard: Any = turn("What is it? ", sound(1))
    asked: dict[str, Any] = {
        "model": folder.name,
        "max_completion_tokens": TOKENS,
        "seed": SEED,
    }
    with served(tmp_path, *serve_omni(folder, "--dtype", "float32"), timeout=240) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        whole = client.chat.completions.create(
            **asked,
            messages=seen,
            modalities=["text", "audio"],
            audio={"voice": "Ethan", "format": "wav"},
            extra_body={"talker": {"max_tokens": MORE_CODES, "min_tokens": MORE_CODES}},
        )
        pieces = {
            codes: streamed(
                client,
                "Chelsie",
                **asked,
                messages=heard,
                extra_body={"talker": {"max_tokens": codes, "min_tokens": codes}},
            )
            for codes in (CODES, MORE_CODES)
        }
        modalities: Any = ["text", "audio"]
        with pytest.raises(openai.BadRequestError, match="no speaker 'Bob'"):
            client.chat.completions.create(
                **asked, messages=heard, modalities=modalities,
                audio={"voice": "Bob", "format": "wav"},
            )  # fmt: skip
        (tmp_path / "heard.wav").write_bytes(base64.b64decode(wav(sound(4))))
        asked_by_example = ["What is it?", "--url", running.url, "--sound", tmp_path / "heard.wav"]
        printed = run_example("qwen_omni.py", *asked_by_example, "--out", tmp_path / "answer.wav")
        assert running.stop() == []
    assert "s of speech" in printed
    assert (tmp_path / "answer.wav").stat().st_size > 2 * RATE // 25
    least = {"talker_min_new_tokens": MORE_CODES}
    tokens, _, waveform = reference.answer(seen, TOKENS, MORE_CODES, **least)
    said = whole.choices[0].message
    assert said.audio is not None
    assert said.content is not None
    assert said.content == said.audio.transcript
    # vLLM leaves out a character that the answer's end cuts.
    assert said.content.rstrip("\ufffd") == text_of(tokens).rstrip("\ufffd")
    assert most_apart(samples_of(said.audio.data), waveform) < 10
    for codes, made in pieces.items():
        least = {"talker_min_new_tokens": codes}
        tokens, _, waveform = reference.answer(heard, TOKENS, codes, speaker="Chelsie", **least)
        assert made.text == made.audios[-1].transcript
        assert made.text.rstrip("\ufffd") == text_of(tokens).rstrip("\ufffd")
        assert most_apart(made.samples, waveform) < 10
    assert len(pieces[MORE_CODES].audios) > 2

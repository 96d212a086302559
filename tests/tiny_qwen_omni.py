"""A tiny Qwen2.5-Omni with random weights: the real classes, in the real one's folder layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_models import make_tokenizer

#: As the real model's chat template writes turns, without its system prompt.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif part['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: The names that the processor asks the tokenizer for.
MEDIA_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
TTS_TOKENS = ["<tts_pad>", "<tts_text_bos>", "<tts_text_bos_single>", "<tts_text_eos>"]
SPEAKERS = {"Chelsie": "<tts_text_bos>", "Ethan": "<tts_text_bos_single>"}
HIDDEN = 64
MEL = 16
#: Of the talker: codes, then the codec's own tokens.
CODES = 64
CODEC = {"pad": 66, "start": 67, "end": 68, "mask": 70}
SAMPLE_RATE = 24_000
#: Of a code: two frames of the mel spectrogram.
SAMPLES_A_CODE = 480
INPUT_RATE = 16_000


def make_omni_tokenizer() -> Any:
    """The usual tiny tokenizer with the model's media and speech tokens."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*MEDIA_TOKENS.values(), *TTS_TOKENS]}
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_qwen_omni(
    folder: Path,
    shape: Mapping[str, Any] | None = None,
    scale: tuple[float, float] = (6, 4),
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write the whole model to ``folder``: weights, speakers, tokenizer, preprocessors.

    Args:
        folder: is made.
        shape: settings of ``config.json`` to use in place of the tiny ones. Tokens that the
            tokenizer lacks, and codes that the codebook lacks, are never the most likely ones.
        scale: factors for the weights of DiT and vocoder.
        device: where the weights are made.
        dtype: of thinker and talker; token2wav has float32.
    """
    from transformers import Qwen2_5OmniForConditionalGeneration

    tokenizer = make_omni_tokenizer()
    torch.manual_seed(0)
    config = _config(tokenizer, shape or {})
    with torch.device(device):
        model = Qwen2_5OmniForConditionalGeneration._from_config(config, dtype=dtype).eval()
    dit = config.token2wav_config.dit_config
    with torch.no_grad():
        # What the classes leave at 0.02 makes silence, whatever the codes are.
        for part, factor in zip(("dit", "bigvgan"), scale, strict=True):
            for weight in getattr(model.token2wav, f"code2wav_{part}_model").parameters():
                if weight.ndim > 1:
                    weight.mul_(factor)
        model.token2wav.code2wav_bigvgan_model.conv_post.weight.mul_(12)
        model.thinker.lm_head.weight[len(tokenizer) :] = 0
        model.talker.codec_head.weight[dit.num_embeds :] = 0
    model.save_pretrained(folder)
    torch.save(
        {
            name: {
                "bos_token": tokenizer.convert_tokens_to_ids(bos),
                "cond": torch.randn(1, dit.enc_emb_dim),
                "ref_mel": torch.randn(1, 30, dit.mel_dim),
            }
            for name, bos in SPEAKERS.items()
        },
        folder / "spk_dict.pt",
    )
    save_processor(folder, tokenizer, "Qwen2_5OmniProcessor")
    return folder


def save_processor(folder: Path, tokenizer: Any, name: str, **pixels: Any) -> None:
    """As the real model's folder has it: one file for pictures and sound."""
    from transformers import Qwen2VLImageProcessorPil, WhisperFeatureExtractor

    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **MEDIA_TOKENS, "extra_special_tokens": MEDIA_TOKENS}))
    pictures = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112}, **pixels
    )
    sound = WhisperFeatureExtractor(feature_size=MEL, chunk_length=4, return_attention_mask=True)
    both = {**sound.to_dict(), **pictures.to_dict()}
    both["image_processor_type"] = "Qwen2VLImageProcessor"
    both["processor_class"] = name
    (folder / "preprocessor_config.json").write_text(json.dumps(both, default=str))


def _config(tokenizer: Any, shape: Mapping[str, Any]) -> Any:
    from transformers import Qwen2_5OmniConfig

    ids = {name: tokenizer.convert_tokens_to_ids(t) for name, t in MEDIA_TOKENS.items()}
    shared = {
        "audio_token_index": ids["audio_token"],
        "image_token_index": ids["image_token"],
        "video_token_index": ids["video_token"],
        "audio_start_token_id": ids["audio_bos_token"],
        "audio_end_token_id": ids["audio_eos_token"],
    }
    vision = {"vision_start_token_id": ids["vision_bos_token"]}
    thinker = {
        **shared,
        **vision,
        "text_config": {
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "initializer_range": 0.3,
            "rope_parameters": _rope([4, 6, 6]),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": False,
        },
        "audio_config": {
            "num_mel_bins": MEL,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "n_window": 20,
            "output_dim": HIDDEN,
            "initializer_range": 0.3,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "window_size": 56,
            "out_hidden_size": HIDDEN,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.3,
        },
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.3,
    }
    text = {name: tokenizer.convert_tokens_to_ids(name) for name in TTS_TOKENS}
    talker = {
        **shared,
        **vision,
        "vision_end_token_id": ids["vision_eos_token"],
        "vocab_size": 80,
        "tts_text_start_token_id": text["<tts_text_bos>"],
        "tts_text_end_token_id": text["<tts_text_eos>"],
        "tts_text_pad_token_id": text["<tts_pad>"],
        **{f"tts_codec_{name}_token_id": i for name, i in CODEC.items()},
        "embedding_size": HIDDEN,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "rope_parameters": _rope([2, 3, 3]),
    }
    token2wav = {
        "dit_config": {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "head_dim": 16,
            "emb_dim": 16,
            "look_ahead_layers": [1],
            "look_backward_layers": [0, 2],
            "num_embeds": 80,
            "mel_dim": MEL,
            "enc_emb_dim": 12,
            "enc_dim": 8,
            "enc_channels": [16, 16, 16, 16, 48],
            "enc_attention_channels": 8,
            "enc_se_channels": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "bigvgan_config": {"mel_dim": MEL, "upsample_initial_channel": 64},
    }
    parts = {"thinker_config": thinker, "talker_config": talker, "token2wav_config": token2wav}
    return Qwen2_5OmniConfig(**merged(parts, shape))


def merged(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with those of ``more`` in their places, at any depth."""
    return {
        **settings,
        **{
            name: merged(settings.get(name, {}), value) if isinstance(value, Mapping) else value
            for name, value in more.items()
        },
    }


def _rope(section: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": section}


def picture(seed: int, width: int = 56, height: int = 84) -> Image.Image:
    """Coloured noise, another one for each seed."""
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def sound(seed: int, seconds: float = 1.3) -> np.ndarray:
    """A chord with noise, float32 [samples] at 16 kHz."""
    random = np.random.default_rng(seed)
    t = np.arange(int(seconds * INPUT_RATE)) / INPUT_RATE
    tones = sum(np.sin(2 * np.pi * f * t) for f in random.uniform(100, 2000, 3))
    return (0.2 * tones + 0.02 * random.standard_normal(len(t))).astype(np.float32)

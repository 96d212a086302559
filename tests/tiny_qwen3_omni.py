"""A tiny Qwen3-Omni with random weights: the real classes, in the real one's folder layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_qwen_omni import (
    MEDIA_TOKENS,
    MEL,
    TTS_TOKENS,
    make_omni_tokenizer,
    merged,
    save_processor,
)

HIDDEN = 64
#: Codes of a group, and groups of a frame.
CODES, GROUPS = 64, 4
#: Ids behind the codes.
CODEC = {"eos": 70, "pad": 71, "bos": 72, "nothink": 73, "think_bos": 74, "think_eos": 75}
SPEAKERS = {"ethan": 80, "chelsie": 81}
SAMPLES_A_FRAME = 1920
LAYER = 2


def make_qwen3_omni(folder: Path, shape: Mapping[str, Any] | None = None, scale: float = 6) -> Path:
    """Write the whole model to ``folder``: weights, tokenizer, preprocessors.

    Args:
        folder: is made.
        shape: settings of ``config.json`` to use in place of the tiny ones.
        scale: factor for the weights of code2wav.
    """
    from transformers import Qwen3OmniMoeForConditionalGeneration

    tokenizer = make_omni_tokenizer()
    # One token each, as in the real model, whose talker tells turns apart by them.
    tokenizer.add_tokens(["user", "assistant", "system"])
    torch.manual_seed(0)
    model = Qwen3OmniMoeForConditionalGeneration(_config(tokenizer, shape or {})).eval()
    with torch.no_grad():
        for weight in model.code2wav.parameters():
            if weight.ndim > 1:  # at 0.02 whatever is said is silence
                weight.mul_(scale)
        for name, weight in model.talker.named_parameters():
            if ".experts." in name:  # transformers leaves them as the memory was
                weight.normal_(0, 0.3)
    model.save_pretrained(folder)
    save_processor(folder, tokenizer, "Qwen3OmniMoeProcessor", patch_size=16)
    return folder


def _config(tokenizer: Any, shape: Mapping[str, Any]) -> Any:
    from transformers import Qwen3OmniMoeConfig

    ids = {name: tokenizer.convert_tokens_to_ids(t) for name, t in MEDIA_TOKENS.items()}
    shared = {
        "audio_token_id": ids["audio_token"],
        "image_token_id": ids["image_token"],
        "video_token_id": ids["video_token"],
        "audio_start_token_id": ids["audio_bos_token"],
        "vision_start_token_id": ids["vision_bos_token"],
    }
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    thinker = {
        **shared,
        "text_config": {
            **moe,
            **heads,
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": 4,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,  # vLLM reads it here
            "rope_parameters": _rope([6, 5, 5]),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        "audio_config": {
            "num_mel_bins": MEL,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "downsample_hidden_size": 16,
            "output_dim": HIDDEN,
            "initializer_range": 0.3,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": 16,
            # As published ones have them; vLLM needs both, transformers neither.
            "image_size": 64,
            "apply_vit_abs_pos_embed": True,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.3,
        },
        "initializer_range": 0.3,
    }
    talker = {
        **shared,
        "text_config": {
            **moe,
            **heads,
            "vocab_size": CODES + 1024,
            "hidden_size": 32,
            "intermediate_size": 64,
            "shared_expert_intermediate_size": 32,
            "num_hidden_layers": 2,
            "initializer_range": 0.2,
            "rope_parameters": _rope([3, 3, 2]),
        },
        "code_predictor_config": {
            **heads,
            "vocab_size": CODES,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "num_code_groups": GROUPS,
            "initializer_range": 0.2,
        },
        "num_code_groups": GROUPS,
        "thinker_hidden_size": HIDDEN,
        "spatial_merge_size": 2,
        "accept_hidden_layer": LAYER,
        **{f"codec_{name}_{'token_' if name == 'eos' else ''}id": i for name, i in CODEC.items()},
        "speaker_id": SPEAKERS,
        "initializer_range": 0.2,
    }
    code2wav = {
        "codebook_size": CODES,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_quantizers": GROUPS,
        "decoder_dim": 64,
    }
    text = {name: tokenizer.convert_tokens_to_ids(name) for name in TTS_TOKENS}
    of = tokenizer.convert_tokens_to_ids
    parts = {"thinker_config": thinker, "talker_config": talker, "code2wav_config": code2wav}
    return Qwen3OmniMoeConfig(
        **merged(parts, shape),
        im_start_token_id=of("<|im_start|>"),
        im_end_token_id=of("<|im_end|>"),
        tts_pad_token_id=text["<tts_pad>"],
        tts_bos_token_id=text["<tts_text_bos>"],
        tts_eos_token_id=text["<tts_text_eos>"],
        system_token_id=of("system"),
        user_token_id=of("user"),
        assistant_token_id=of("assistant"),
    )


def _rope(section: list[int]) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": section,
        "mrope_interleaved": True,
    }

"""A tiny GLM-Image pipeline with random weights: AR model, glyph encoder, DiT, VAE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_families import tiny_t5
from tiny_models import make_tokenizer

#: Tokens that the AR model's head knows: only those of pictures, so that none ends one early.
CODEBOOK = 64
WIDTH = 32
CHAT_TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|dit_token_start|><|image|><|dit_token_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
#: Marks of pictures and sizes in a prompt, as the real tokenizer has them.
MARKS = {
    "image_token": "<|image|>",
    "grid_bos_token": "<sop>",
    "grid_eos_token": "<eop>",
    "bos_token": "<|dit_token_start|>",
    "image_end_token": "<|dit_token_end|>",
}


def make_glm_image(folder: Path) -> Path:
    """Write the model to ``folder``."""
    torch.manual_seed(0)
    _pipeline().save_pretrained(folder)
    return folder


def whole_glm_image(folder: Path) -> Any:
    """The whole pipeline of diffusers.

    Version 0.42 joins the features of all pictures along their first axis before it asks for their
    tokens, as fits transformers 5.0; since then features are [channels, h, w] for each picture,
    and the model wants them apart.
    """
    from diffusers import DiffusionPipeline

    made = DiffusionPipeline.from_pretrained(str(folder), dtype=torch.float32)
    made.set_progress_bar_config(disable=True)
    own = made.vision_language_encoder.get_image_tokens
    made.vision_language_encoder.get_image_tokens = lambda states, grids: own(
        list(states.split(WIDTH)), grids
    )
    return made


def _pipeline() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, GlmImagePipeline
    from transformers import ByT5Tokenizer, GlmImageForConditionalGeneration

    processor = _processor()
    config = _ar_config(processor.tokenizer)
    ar = GlmImageForConditionalGeneration(config).eval()
    with torch.no_grad():  # larger than the initialisation, so that tokens depend on the prompt
        for parameter in ar.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    ar.generation_config.update(do_sample=True, temperature=0.9, top_p=0.75)
    glyphs = ByT5Tokenizer()
    return GlmImagePipeline(
        tokenizer=glyphs,
        processor=processor,
        text_encoder=tiny_t5(glyphs, WIDTH),
        vision_language_encoder=ar,
        vae=_vae(),
        transformer=_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(
            base_image_seq_len=256, base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True,
            time_shift_type="linear",
        ),
    )  # fmt: skip


def _processor() -> Any:
    from transformers import GlmImageProcessor
    from transformers.models.glm_image.image_processing_pil_glm_image import (
        GlmImageImageProcessorPil,
    )

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": list(MARKS.values())})
    for name, mark in MARKS.items():
        setattr(tokenizer, name, mark)
        tokenizer.init_kwargs[name] = mark
    images = GlmImageImageProcessorPil(
        patch_size=16,
        merge_size=1,
        temporal_patch_size=1,
        size={"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
    )
    return GlmImageProcessor(images, tokenizer, chat_template=CHAT_TEMPLATE)


def _ar_config(tokenizer: Any) -> Any:
    from transformers import GlmImageConfig

    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()}
    return GlmImageConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "vision_vocab_size": CODEBOOK,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3],
            },
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": ids["image_end_token"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_heads": 2,
            "patch_size": 16,
            "image_size": 128,
        },
        vq_config={"embed_dim": 16, "num_embeddings": CODEBOOK, "latent_channels": WIDTH},
        image_token_id=ids["image_token"],
        image_start_token_id=ids["bos_token"],
        image_end_token_id=ids["image_end_token"],
    )  # fmt: skip


def _transformer() -> Any:
    from diffusers import GlmImageTransformer2DModel

    return GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=WIDTH,
        time_embed_dim=32,
        condition_dim=16,
        prior_vq_quantizer_codebook_size=CODEBOOK,
    )


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        sample_size=64,
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[1.0, 2.0, 0.5, 1.5],
    )

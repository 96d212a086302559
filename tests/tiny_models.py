"""A tiny Z-Image model with random weights, in the folder layout that stock libraries load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

HIDDEN = 64
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "a red circle above a blue square on a white background",
    "a green triangle left of a yellow star on a black background",
]


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer of the Qwen2 kind that can write any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS * 50, trainer)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(m) for m in model["merges"]],
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_language_model(tokenizer: Any, *, context: int = 256, heads: int = 1) -> Any:
    """A Qwen3 LM whose random weights are large enough that it does not repeat one token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=2 * heads,
        num_key_value_heads=heads,
        head_dim=64,
        vocab_size=len(tokenizer),
        max_position_embeddings=context,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).eval()


def make_z_image(folder: Path) -> Path:
    """Write the model to ``folder``: text_encoder, tokenizer, transformer, vae, scheduler."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        ZImagePipeline,
        ZImageTransformer2DModel,
    )

    tokenizer = make_tokenizer()
    language_model = make_language_model(tokenizer)
    torch.manual_seed(1)
    transformer = ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        qk_norm=True,
        cap_feat_dim=HIDDEN,
        axes_dims=[16, 8, 8],
        axes_lens=[512, 64, 64],
    )
    with torch.no_grad():  # torch.empty in the class: whatever was in memory
        transformer.x_pad_token.fill_(1.0)
        transformer.cap_pad_token.fill_(1.0)
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=[16, 32],
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=8,
        sample_size=32,
        scaling_factor=0.3611,
        shift_factor=0.1159,
    )
    pipeline = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=language_model,
        tokenizer=tokenizer,
        transformer=transformer,
    )
    pipeline.save_pretrained(folder)
    return folder

"""The tokenizer: a byte-level BPE over captions and prompts, saved as Qwen2 tokenizer files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tiny_omni.shapes import caption, sample_prompt

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = "<|im_end|>"
VOCAB_SIZE = 512
"""A multiple of 64, which vLLM pads vocabularies to; three of them are special tokens."""


def build_tokenizer(seed: int = 0, scenes: int = 8000) -> Any:
    """Train the tokenizer on the training split of the shape world."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    rng = random.Random(seed)
    corpus = ["user\n", "assistant\n", "system\n"] * 2000
    for _ in range(scenes):
        prompt, scene = sample_prompt(rng)
        corpus += [prompt, caption(scene)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 3,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(corpus, trainer)
    model = json.loads(trained.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token=EOS,
        extra_special_tokens=["<|im_start|>"],
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder (`folder/tokenizer`)."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "tokenizer")


def chat_text(tokenizer: Any, prompt: str) -> str:
    """`prompt` as the language model sees it, up to where the caption starts."""
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

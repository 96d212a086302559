"""Qwen2 models with random weights for the benchmarks: what a step costs does not depend on them.

    python benchmarks/llm_model.py tiny build/tiny-qwen2
    python benchmarks/llm_model.py qwen2-7b build/qwen2-7b   # no weights: load_format dummy

A real small one is made by ``tools/smollm2.py``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    # Qwen2-7B's, with a small vocabulary of its own.
    "qwen2-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
    },
}


def make_random(out: Path, shape: str) -> None:
    """A Qwen2 of that shape; the large one without weights."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    text = [str(p) for p in Path(transformers.__file__).parent.joinpath("generation").glob("*.py")]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train(
        text,
        trainers.BpeTrainer(
            vocab_size=4096, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    config = Qwen2Config(
        **{"vocab_size": len(tokenizer), **SHAPES[shape]},
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
    )
    if shape != "tiny":
        config.save_pretrained(out)
        return
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=list(SHAPES))
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    make_random(given.out, given.model)
    print(f"{given.model} in {given.out}")


if __name__ == "__main__":
    main()

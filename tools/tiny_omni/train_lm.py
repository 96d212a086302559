"""Trains the AR stage: a Qwen3 causal LM that expands a short prompt into a full caption.

Besides the next token, a throw-away head learns to read the *current* token from the final
hidden state. The serving path hands those states to the DiT, and a state that only predicts what
comes next would not say which colour or size was just sampled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_omni.captioner import write_caption
from tiny_omni.dataset import TextTable
from tiny_omni.shapes import held_out_cases, mentions_agree, parse, parse_caption
from tiny_omni.tokenizer import VOCAB_SIZE, load_tokenizer
from tiny_omni.training import Average, Budget, Progress, Trainer

CURRENT_TOKEN_WEIGHT = 0.3


def new_model(tokenizer: Any) -> Any:
    """An untrained model of about 0.85 M parameters that vLLM can load (head size 64)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def load_model(folder: Path) -> Any:
    """The trained model of a model folder, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "text_encoder", dtype=torch.float32).eval()


class _Loss:
    """Draws a batch and computes the two cross-entropies over the caption."""

    def __init__(self, model: Any, head: nn.Module, texts: TextTable, device: str, batch: int):
        self._model, self._head, self._batch = model, head, batch
        longest = int((texts.start + texts.length).max()) + 1
        self._tokens = torch.from_numpy(texts.tokens[:, :longest]).to(device).long()
        self._start = torch.from_numpy(texts.start).to(device).long()
        self._length = torch.from_numpy(texts.length).to(device).long()
        self._at = torch.arange(longest, device=device)[None]

    def __call__(self) -> tuple[Tensor, Tensor]:
        pick = torch.randint(len(self._tokens), (self._batch,), device=self._tokens.device)
        tokens, start = self._tokens[pick], self._start[pick][:, None]
        end = start + self._length[pick][:, None]  # position of the end token
        # No padding mask: attention is causal and the padding is on the right.
        hidden = self._model.model(input_ids=tokens).last_hidden_state
        in_caption = (self._at > start) & (self._at <= end)
        target = tokens.masked_fill(~in_caption, -100)
        logits = self._model.lm_head(hidden[:, :-1]).float()
        following = F.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=-100
        )
        current = F.cross_entropy(
            self._head(hidden).float().flatten(0, 1), target.flatten(), ignore_index=-100
        )
        return following + CURRENT_TOKEN_WEIGHT * current, following


def train_lm(
    folder: Path, texts: TextTable, device: str, budget: Budget, batch: int = 1024
) -> None:
    """Train and save `folder/text_encoder` (float16, with the tokenizer files)."""
    torch.manual_seed(0)
    progress = Progress("lm")
    tokenizer = load_tokenizer(folder)
    model = new_model(tokenizer).to(device).train()
    head = nn.Linear(model.config.hidden_size, VOCAB_SIZE).to(device)
    average = Average(model)
    loss = _Loss(model, head, texts, device, batch)
    trainer = Trainer([model, head], loss, device=device, lr=3e-3, graph=False)
    step = 0
    for step, share in budget.run(device):
        trainer.step(step, share)
        average.update(step)
        progress.tick(step, share, trainer)
    average.apply()
    model = model.cpu().half().eval()
    model.save_pretrained(folder / "text_encoder")
    tokenizer.save_pretrained(folder / "text_encoder")
    progress.say(f"{step + 1} steps of {batch}, {model.num_parameters()} parameters")


def consistency(folder: Path, count: int, temperature: float) -> float:
    """Share of held-out prompts whose caption is well formed and keeps what was asked for."""
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    good = 0
    for i, (prompt, _) in enumerate(held_out_cases(count)):
        text = write_caption(model, tokenizer, prompt, temperature=temperature, seed=i).text
        wanted, got = parse(prompt), parse_caption(text)
        good += int(wanted is not None and got is not None and mentions_agree(wanted, got))
    return good / count

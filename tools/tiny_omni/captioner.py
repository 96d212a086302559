"""The AR stage on its own: prompt -> caption and the hidden rows that the DiT is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiny_omni.tokenizer import chat_text

MAX_NEW_TOKENS = 48


@dataclass(frozen=True)
class Caption:
    """A generated caption.

    `rows` [n, hidden] float32: row i is the final-norm hidden state that predicted generated
    token i; row 0 is the last prompt position, the last row predicted the end token.
    """

    text: str
    rows: Tensor


@torch.no_grad()
def write_caption(
    model: Any, tokenizer: Any, prompt: str, *, temperature: float = 0.0, seed: int = 0
) -> Caption:
    """Generate a caption for `prompt`; greedy at temperature 0."""
    generator = torch.Generator().manual_seed(seed)
    feed = tokenizer(chat_text(tokenizer, prompt), return_tensors="pt")["input_ids"]
    cache = None
    rows: list[Tensor] = []
    tokens: list[int] = []
    while len(tokens) < MAX_NEW_TOKENS:
        out = model.model(input_ids=feed, past_key_values=cache, use_cache=True)
        cache, row = out.past_key_values, out.last_hidden_state[0, -1]
        rows.append(row)
        logits = model.lm_head(row).float()
        if temperature > 0:
            weights = torch.softmax(logits / temperature, dim=-1)
            token = int(torch.multinomial(weights, 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == tokenizer.eos_token_id:
            break
        tokens.append(token)
        feed = torch.tensor([[token]])
    return Caption(tokenizer.decode(tokens), torch.stack(rows).float())

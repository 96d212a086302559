"""The language half of Qwen2.5-VL, which encodes the prompts of Qwen-Image."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from omniq.engines.vllm import contract

_Base: Any = contract.names().Qwen2ForCausalLM
#: Where checkpoints have the language model: those of transformers since 4.52, and older ones.
PREFIXES = ("model.language_model.", "model.")
#: The other half, by the same two.
VISION = ("model.visual.", "visual.")


class QwenVLTextEncoder(_Base):
    """Qwen2.5-VL without eyes.

    vLLM's own class for it needs the files of an image processor, which the ``text_encoder`` folder
    of a diffusion pipeline does not have, and loads the vision tower. For text alone the three
    axes of its rotary embedding have the same positions.
    """

    supports_mrope = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        whole = vllm_config.model_config.hf_config
        # It belongs to both halves, so the language half's own configuration does not have it.
        whole.get_text_config().tie_word_embeddings = whole.tie_word_embeddings
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        """Positions int64 [3, tokens], and 0: the next token's follows the last."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Names of the loaded parameters; the vision tower's are left out."""
        loaded: set[str] = super().load_weights(_language(weights))
        return loaded


def _language(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if name.startswith(VISION):
            continue
        prefix = next((p for p in PREFIXES if name.startswith(p)), None)
        yield name if prefix is None else f"model.{name.removeprefix(prefix)}", tensor

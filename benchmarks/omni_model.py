"""A Qwen2.5-Omni with random weights for the benchmarks: the real classes, as the tests make them,
but large enough that forward passes cost more than what is around them.

    python benchmarks/omni_model.py build/omni
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

THINKER = 512


def _rope(section: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": section}


#: Thinker of 37, talker of 18 million weights without their vocabularies, DiT of 2 million.
SHAPE: dict[str, Any] = {
    "thinker_config": {
        "text_config": {
            "hidden_size": THINKER,
            "intermediate_size": 3 * THINKER,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "rope_parameters": _rope([8, 12, 12]),
            "initializer_range": 0.05,
        },
        "audio_config": {"output_dim": THINKER},
        "vision_config": {"out_hidden_size": THINKER},
    },
    "talker_config": {
        "embedding_size": THINKER,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 10,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": _rope([8, 12, 12]),
        "initializer_range": 0.05,
    },
    "token2wav_config": {
        "dit_config": {
            "hidden_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 2,
            "head_dim": 64,
            "look_ahead_layers": [3],
            "look_backward_layers": [0, 5],
        },
        "bigvgan_config": {"upsample_initial_channel": 128},
    },
}


def make_omni(folder: Path) -> Path:
    """Write the model, its tokenizer and its voices to ``folder``."""
    from tiny_qwen_omni import make_qwen_omni

    return make_qwen_omni(folder, SHAPE, scale=(3.0, 3.0))


if __name__ == "__main__":
    print(make_omni(Path(sys.argv[1])))

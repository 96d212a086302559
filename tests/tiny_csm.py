"""A tiny CSM with random weights: backbone, depth decoder and a Mimi codec of the real rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import make_tokenizer

CODEBOOKS, CODES = 4, 16
SAMPLE_RATE = 24_000
#: Samples of a frame: 12.5 frames a second.
FRAME = 1920
WIDTH = 32
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>[{{ m['role'] }}]{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}<|im_end|>"
    "{% else %}<|AUDIO|><|audio_eos|>{% endif %}{% endfor %}{% endfor %}"
)


def make_csm(folder: Path, *, sample: bool = True, codebooks: int = CODEBOOKS) -> Path:
    """Write the model to ``folder``; ``sample``: what its generation config asks for."""
    from transformers import CsmForConditionalGeneration

    torch.manual_seed(0)
    processor = _processor()
    model = CsmForConditionalGeneration(_config(processor.tokenizer, codebooks)).eval()
    with torch.no_grad():  # larger than the initialisation, so that codes depend on the text
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not name.startswith("codec_model."):
                parameter.mul_(12.0)
        for parameter in model.codec_model.decoder.layers[-1].parameters():
            parameter.mul_(0.02)  # within -1..1, as sound is
        for name, buffer in model.codec_model.named_buffers():
            if name.endswith("embed_sum"):  # zeros until trained
                buffer.normal_()
            if name.endswith("cluster_usage"):
                buffer.fill_(1.0)
    own = {"do_sample": True, "temperature": 0.9, "top_k": 10} if sample else {}
    others = {"do_sample": True, "temperature": 0.8, "top_p": 0.9} if sample else {}
    for config, settings in (
        (model.generation_config, {"max_new_tokens": 12, **own}),
        (model.depth_decoder.generation_config, others),
    ):
        config._from_model_config = False  # else what is the depth decoder's own is lost
        config.update(**settings)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _processor() -> Any:
    from transformers import CsmProcessor, EncodecFeatureExtractor

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|AUDIO|>", "<|audio_eos|>"]})
    extractor = EncodecFeatureExtractor(feature_size=1, sampling_rate=SAMPLE_RATE)
    return CsmProcessor(extractor, tokenizer, chat_template=CHAT_TEMPLATE)


def _config(tokenizer: Any, codebooks: int) -> Any:
    from transformers import CsmConfig

    decoder = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_codebooks": codebooks,
        "vocab_size": CODES,
    }
    audio, end = tokenizer.convert_tokens_to_ids(["<|AUDIO|>", "<|audio_eos|>"])
    return CsmConfig(
        **decoder,
        text_vocab_size=len(tokenizer),
        max_position_embeddings=256,
        codebook_pad_token_id=CODES - 1,
        codebook_eos_token_id=0,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        audio_token_id=audio,
        audio_eos_token_id=end,
        depth_decoder_config={
            **decoder, "backbone_hidden_size": WIDTH, "max_position_embeddings": codebooks + 1,
        },
        codec_config={
            "model_type": "mimi",
            "sampling_rate": SAMPLE_RATE,
            "hidden_size": WIDTH,
            "num_filters": 4,
            "codebook_size": CODES,
            "codebook_dim": 16,
            "num_quantizers": codebooks,
            "vector_quantization_hidden_dimension": 16,
            "upsample_groups": WIDTH,
            "num_hidden_layers": 2,
            "intermediate_size": 2 * WIDTH,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            # Shorter than what the tests say, so that it matters.
            "sliding_window": 12,
        },
    )  # fmt: skip

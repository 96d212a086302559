"""Weights of the models in docs/models, from their published shapes: no file is downloaded.

    python tools/model_sizes.py

Classes are instantiated without memory (meta device). Where diffusers' default arguments are
the published model's, those are used; the text encoders' shapes stand below.
"""

from __future__ import annotations

from typing import Any

import torch

QWEN_VL_7B = {
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    | {"out_hidden_size": 3584},
    "tie_word_embeddings": False,
}
QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
MISTRAL_SMALL = {
    "model_type": "mistral",
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
}
XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64} | {
    "feed_forward_proj": "gated-gelu"
}
CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12} | {
    "num_attention_heads": 12,
    "projection_dim": 768,
}
CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32} | {
    "num_attention_heads": 20,
    "projection_dim": 1280,
}
CLIP_H_VISION = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32} | {
    "num_attention_heads": 16,
    "patch_size": 14,
}
WAN_1_3B = {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}
WAN_5B = {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336} | {
    "in_channels": 48,
    "out_channels": 48,
}
WAN_I2V_21 = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}
SD35_LARGE = {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432} | {
    "qk_norm": "rms_norm",
    "pos_embed_max_size": 192,
    "in_channels": 16,
    "out_channels": 16,
}


def count(made: Any) -> float:
    """Parameters, in thousand millions; tied ones once."""
    return sum(p.numel() for p in made.parameters()) / 1e9


def main() -> None:
    """Print a line a stage."""
    import diffusers as d
    import transformers as t

    def encoder(kind: Any, config: Any, settings: dict[str, Any]) -> Any:
        return kind(config(**settings))

    with torch.device("meta"):
        t5 = encoder(t.T5EncoderModel, t.T5Config, {**XXL, "vocab_size": 32128})
        umt5 = encoder(t.UMT5EncoderModel, t.UMT5Config, {**XXL, "vocab_size": 256384})
        clip_l = encoder(t.CLIPTextModelWithProjection, t.CLIPTextConfig, CLIP_L)
        clip_g = encoder(t.CLIPTextModelWithProjection, t.CLIPTextConfig, CLIP_G)
        qwen3 = encoder(t.Qwen3ForCausalLM, t.Qwen3Config, QWEN3_4B)
        qwen_vl = t.Qwen2_5_VLForConditionalGeneration(t.Qwen2_5_VLConfig(**QWEN_VL_7B))
        mistral = t.Mistral3ForConditionalGeneration(t.Mistral3Config(text_config=MISTRAL_SMALL))
        vision = encoder(t.CLIPVisionModel, t.CLIPVisionConfig, CLIP_H_VISION)
        vae = d.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[128, 256, 512, 512],
            layers_per_block=2,
            latent_channels=16,
        )
        video_vae = d.AutoencoderKLWan()
        wan = d.WanTransformer3DModel
        rows: list[tuple[str, list[Any], list[Any], list[Any]]] = [
            (
                "Qwen-Image",
                [qwen_vl],
                [d.QwenImageTransformer2DModel()],
                [d.AutoencoderKLQwenImage()],
            ),
            ("Z-Image", [qwen3], [d.ZImageTransformer2DModel()], [vae]),
            ("FLUX.1", [clip_l, t5], [d.FluxTransformer2DModel(guidance_embeds=True)], [vae]),
            ("FLUX.2 dev", [mistral], [d.Flux2Transformer2DModel()], [d.AutoencoderKLFlux2()]),
            (
                "SD 3.5 large",
                [clip_l, clip_g, t5],
                [d.SD3Transformer2DModel(**SD35_LARGE)],
                [vae],
            ),
            ("Wan 2.1 T2V 1.3B", [umt5], [wan(**WAN_1_3B)], [video_vae]),
            ("Wan 2.1 T2V 14B", [umt5], [wan()], [video_vae]),
            ("Wan 2.1 I2V 14B", [umt5, vision], [wan(**WAN_I2V_21)], [video_vae]),
            ("Wan 2.2 A14B", [umt5], [wan(), wan()], [video_vae]),
            ("Wan 2.2 5B", [umt5], [wan(**WAN_5B)], []),
        ]
        csm = t.CsmForConditionalGeneration(t.CsmConfig())
        # Shared when loaded; on the meta device the library leaves them apart.
        own = csm.backbone_model.embed_tokens.embed_audio_tokens
        own.weight = csm.depth_decoder.model.embed_tokens.weight
        own_engines: list[tuple[str, list[Any], list[Any]]] = [
            ("GLM-Image", [t.GlmImageForConditionalGeneration(t.GlmImageConfig())], []),
            ("CSM 1B", [csm], [csm.codec_model]),
        ]
    print("model | encode | DiT | decode: thousand millions of parameters (GiB in bfloat16)")
    for name, *parts in (*rows, *own_engines):
        shown = []
        for part in parts:
            billions = sum(map(count, part))
            shown.append(f"{billions:.2f} ({billions * 2e9 / 2**30:.1f})" if part else "?")
        print(name, *shown, sep=" | ")


if __name__ == "__main__":
    main()

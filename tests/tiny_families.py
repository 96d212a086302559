"""Tiny pipelines with random weights of several families, complete with text encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import make_tokenizer, make_z_image

WIDTH = 32
#: Size of pictures in most tests.
SIDE = 32


def make(name: str, folder: Path) -> Path:
    """Write the tiny model ``name`` to ``folder``."""
    if name == "z_image":
        return make_z_image(folder)
    torch.manual_seed(0)
    _BUILDERS[name]().save_pretrained(folder)
    return folder


def _autoencoder(channels: int = 4, shift: float = 0.06) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=shift,
        scaling_factor=1.5,
    )


def _euler(**more: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**more)


def _clip(tokenizer: Any, *, projection: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=WIDTH,
        max_position_embeddings=77,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=0,
        pad_token_id=tokenizer.pad_token_id,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config).eval()


def tiny_t5(tokenizer: Any, width: int = WIDTH, *, umt5: bool = False) -> Any:
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    config = (UMT5Config if umt5 else T5Config)(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return (UMT5EncoderModel if umt5 else T5EncoderModel)(config).eval()


def _short(length: int) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = length
    return tokenizer


def _flux() -> Any:
    from diffusers import FluxPipeline, FluxTransformer2DModel

    clip, t5 = _short(77), _short(512)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=[4, 6, 6],
        guidance_embeds=True,
    )
    return FluxPipeline(
        scheduler=_euler(use_dynamic_shifting=True),
        vae=_autoencoder(),
        text_encoder=_clip(clip, projection=False),
        tokenizer=clip,
        text_encoder_2=tiny_t5(t5),
        tokenizer_2=t5,
        transformer=transformer,
    )


def _sd3(channels: int = 4) -> Any:
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    clip, clip_2, t5 = _short(77), _short(77), _short(256)
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=channels,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_projection_dim=32,
        joint_attention_dim=2 * WIDTH,
        pooled_projection_dim=2 * WIDTH,
        out_channels=channels,
        pos_embed_max_size=96,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=_euler(shift=3.0),
        vae=_autoencoder(channels),
        text_encoder=_clip(clip, projection=True),
        tokenizer=clip,
        text_encoder_2=_clip(clip_2, projection=True),
        tokenizer_2=clip_2,
        text_encoder_3=tiny_t5(t5, 2 * WIDTH),
        tokenizer_3=t5,
    )


def _qwen_parts() -> dict[str, Any]:
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]}
    )
    ids = {n: tokenizer.convert_tokens_to_ids(f"<|{n}|>") for n in ("vision_start", "image_pad")}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            # Heads of 32: vLLM's attention on the CPU has no smaller ones.
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
            "max_position_embeddings": 4096,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["image_pad"],
        vision_start_token_id=ids["vision_start"],
    )
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[1.0, 2.0, 0.5, 1.5],
    )
    return {
        "scheduler": _euler(use_dynamic_shifting=True),
        "vae": vae,
        "text_encoder": Qwen2_5_VLForConditionalGeneration(config).eval(),
        "tokenizer": tokenizer,
        "transformer": transformer,
    }


def _qwen_image() -> Any:
    from diffusers import QwenImagePipeline

    return QwenImagePipeline(**_qwen_parts())


def _qwen_image_edit(*, plus: bool = False) -> Any:
    from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    parts = _qwen_parts()
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(), parts["tokenizer"], Qwen2VLVideoProcessor()
    )
    pipeline = QwenImageEditPlusPipeline if plus else QwenImageEditPipeline
    return pipeline(**parts, processor=processor)


def _wan_transformer(**more: Any) -> Any:
    from diffusers import WanTransformer3DModel

    settings: dict[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": WIDTH,
        "freq_dim": 32,
        "ffn_dim": 64,
        "num_layers": 3,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 32,
    }
    return WanTransformer3DModel(**{**settings, **more})


def _wan_parts() -> dict[str, Any]:
    from diffusers import AutoencoderKLWan

    tokenizer = _short(512)
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": tiny_t5(tokenizer, umt5=True),
        "vae": vae,
        "scheduler": _euler(shift=3.0),
    }


def _wan() -> Any:
    from diffusers import WanPipeline

    return WanPipeline(**_wan_parts(), transformer=_wan_transformer())


def _wan_5b() -> Any:
    """As Wan 2.2's 5B model: each latent position has its own timestep."""
    from diffusers import WanPipeline

    return WanPipeline(**_wan_parts(), transformer=_wan_transformer(), expand_timesteps=True)


def _wan_i2v() -> Any:
    """As Wan 2.1's: with CLIP's view of the first frame."""
    from diffusers import WanImageToVideoPipeline
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    parts = _wan_parts()
    config = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=224,
        patch_size=14,
    )
    return WanImageToVideoPipeline(
        **parts,
        transformer=_wan_transformer(in_channels=36, image_dim=WIDTH, added_kv_proj_dim=48),
        image_encoder=CLIPVisionModel(config).eval(),
        image_processor=CLIPImageProcessor(),
    )


def _wan22_i2v() -> Any:
    """As Wan 2.2's: two transformers, no image encoder."""
    from diffusers import WanImageToVideoPipeline

    return WanImageToVideoPipeline(
        **_wan_parts(),
        transformer=_wan_transformer(in_channels=36),
        transformer_2=_wan_transformer(in_channels=36),
        boundary_ratio=0.9,
    )


def _cogview4() -> Any:
    """A pipeline that omniq has no file for."""
    from diffusers import CogView4Pipeline, CogView4Transformer2DModel
    from transformers import GlmConfig, GlmModel

    tokenizer = make_tokenizer()
    transformer = CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=WIDTH,
        time_embed_dim=16,
        condition_dim=4,
        rope_axes_dim=(64, 64),
    )
    return CogView4Pipeline(
        tokenizer=tokenizer,
        text_encoder=GlmModel(GlmConfig(**_text_config(tokenizer, 3))).eval(),
        vae=_autoencoder(shift=0.0),
        transformer=transformer,
        scheduler=_euler(use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75),
    )


def _flux2_parts(layers: int) -> dict[str, Any]:
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel

    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=layers * WIDTH,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
    )
    vae = AutoencoderKLFlux2(
        sample_size=32,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
    )
    with torch.no_grad():  # as after training: no two channels alike
        vae.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 16))
        vae.bn.running_var.copy_(torch.linspace(0.5, 3.0, 16))
    return {
        "scheduler": _euler(use_dynamic_shifting=True),
        "vae": vae,
        "transformer": transformer,
    }


def _text_config(tokenizer: Any, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _flux2_klein() -> Any:
    from diffusers import Flux2KleinPipeline
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    # The pipeline's condition is what is behind layers 9, 18 and 27.
    encoder = Qwen3ForCausalLM(Qwen3Config(**_text_config(tokenizer, 28))).eval()
    return Flux2KleinPipeline(**_flux2_parts(3), text_encoder=encoder, tokenizer=tokenizer)


def _flux2() -> Any:
    from diffusers import Flux2Pipeline
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    # The real model's PixtralProcessor needs torchvision; of it, only its tokenizer has work here.
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[IMG]"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
        "{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Mistral3Config(
        # The pipeline's condition is what is behind layers 10, 20 and 30.
        text_config={"model_type": "mistral", **_text_config(tokenizer, 31)},
        vision_config={"model_type": "pixtral", **vision},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )
    encoder = Mistral3ForConditionalGeneration(config).eval()
    return Flux2Pipeline(**_flux2_parts(3), text_encoder=encoder, tokenizer=tokenizer)


_BUILDERS = {
    "flux": _flux,
    "sd3": _sd3,
    # Its inpainting pipeline takes no other number of channels.
    "sd3_16": lambda: _sd3(16),
    "qwen_image": _qwen_image,
    "qwen_image_edit": _qwen_image_edit,
    "qwen_image_edit_plus": lambda: _qwen_image_edit(plus=True),
    "wan": _wan,
    "wan_5b": _wan_5b,
    "wan_i2v": _wan_i2v,
    "wan22_i2v": _wan22_i2v,
    "cogview4": _cogview4,
    "flux2": _flux2,
    "flux2_klein": _flux2_klein,
}
NAMES = ("z_image", *_BUILDERS)

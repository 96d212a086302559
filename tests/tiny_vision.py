"""A tiny chat model that sees (Idefics3, which needs no torchvision), with random weights."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_models import HIDDEN, make_tokenizer

#: Pixels a side that the model sees of a picture, and the tokens it makes of them.
SIDE, IMAGE_TOKENS = 28, 4
TOKENS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
#: Of reasoning and tool calls: in the text, as Qwen3 and others have them.
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
#: Content is text, or parts as OpenAI's API has them; thinking can be switched off, as in Qwen3.
CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}<think>\n{% if not enable_thinking %}\n</think>\n\n"
    "{% endif %}{% endif %}{% endif %}"
)


def make_vision_model(folder: Path) -> Path:
    """Write model, tokenizer and processor to ``folder``."""
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        LlamaConfig,
    )
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    tokenizer.add_tokens(MARKS)
    tokenizer.chat_template = CHAT_TEMPLATE
    # Large enough that pictures differ in what is said of them.
    shared = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.3,
    }
    text = LlamaConfig(
        **shared,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = Idefics3VisionConfig(**shared, image_size=SIDE, patch_size=7)
    config = Idefics3Config(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).eval().save_pretrained(folder)
    seen = {"longest_edge": SIDE}
    pictures = Idefics3ImageProcessorPil(size=seen, max_image_size=seen, do_image_splitting=False)
    Idefics3Processor(
        image_processor=pictures,
        tokenizer=tokenizer,
        image_seq_len=IMAGE_TOKENS,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 56, height: int = 40) -> Image.Image:
    """Coloured noise, another one for each seed."""
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def data_url(image: Image.Image, form: str = "PNG") -> str:
    """As a chat message holds it."""
    buffer = io.BytesIO()
    image.save(buffer, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def turn(*parts: str | Image.Image) -> list[dict[str, Any]]:
    """A user's message of texts and pictures, in OpenAI's form."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


class Reference:
    """The same model in transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import Idefics3ForConditionalGeneration, Idefics3Processor

        self.processor = Idefics3Processor.from_pretrained(folder)
        self.model = Idefics3ForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def inputs(self, *parts: str | Image.Image, **variables: Any) -> dict[str, torch.Tensor]:
        """What the processor makes of a user's turn; ``variables`` are the chat template's."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in parts
        ]
        messages = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, **variables)
        images = [part for part in parts if not isinstance(part, str)]
        return dict(self.processor(text=text, images=images or None, return_tensors="pt"))

    @torch.no_grad()
    def greedy(self, *parts: str | Image.Image, count: int, **variables: Any) -> list[int]:
        """``count`` new tokens by ``generate``."""
        inputs = self.inputs(*parts, **variables)
        made = self.model.generate(
            **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        return [int(i) for i in made[0, inputs["input_ids"].shape[1] :]]

    def text(self, tokens: list[int]) -> str:
        """As a client reads it: vLLM gives no beginnings of characters at the end."""
        text = str(self.processor.tokenizer.decode(tokens, skip_special_tokens=True))
        return text.rstrip("\ufffd")

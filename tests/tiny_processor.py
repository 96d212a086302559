"""Qwen2-VL's processor without its video half, which needs torchvision."""

from __future__ import annotations

from typing import Any

# diffusers finds out how to load a component of this module by the base classes in it.
from transformers import ProcessorMixin, Qwen2VLProcessor


class PictureProcessor(Qwen2VLProcessor):
    """Pictures and text only."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = None
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

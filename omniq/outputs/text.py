"""Text, alone or with a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omniq.outputs.base import OutputContext, OutputError, OutputHandler, ProcessedOutput
from omniq.outputs.image import ImageHandler


class TextHandler(OutputHandler):
    """A string, or ``{"text": string}``, becomes the string as an inline value."""

    def encode(self, name: str, form: str, data: Any, context: OutputContext) -> ProcessedOutput:
        """The string as value."""
        return ProcessedOutput(value=_text(name, data))


class TextImageHandler(ImageHandler):
    """``{"text": string, "image": pixels}``: the text inline, the picture as a file."""

    def encode(self, name: str, form: str, data: Any, context: OutputContext) -> ProcessedOutput:
        """Both parts, under one output name."""
        if not isinstance(data, Mapping) or set(data) != {"text", "image"}:
            has = sorted(data) if isinstance(data, Mapping) else type(data).__name__
            raise OutputError(f"output {name!r}: needs 'text' and 'image', got {has}")
        picture = super().encode(name, form, data["image"], context)
        return replace(picture, value=_text(name, data["text"]))


def _text(name: str, data: Any) -> str:
    if isinstance(data, Mapping) and set(data) == {"text"}:
        data = data["text"]
    if not isinstance(data, str):
        raise OutputError(f"output {name!r}: text must be a string, not {type(data).__name__}")
    return data

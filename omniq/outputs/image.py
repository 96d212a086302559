"""Pictures as PNG, WebP or JPEG files that carry how they were made."""

from __future__ import annotations

import io
import json
from typing import Any

from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo

from omniq import __version__
from omniq.outputs.base import (
    EncodedArtifact,
    OutputContext,
    OutputHandler,
    ProcessedOutput,
    rgb_items,
    several,
)
from omniq.settings import get_settings

SOFTWARE = f"omniq {__version__}"
SAVE_OPTIONS: dict[str, dict[str, Any]] = {
    "png": {},
    "webp": {"quality": 90},
    "jpeg": {"quality": 95, "subsampling": 0},
}
# EXIF in a JPEG ends at 64 KiB, and a character may take 12 bytes as escaped JSON.
EXIF_PROMPT_CHARS = 4000
EXIF_COMMENT_BYTES = 60_000


class ImageHandler(OutputHandler):
    """Pixels, uint8 [H, W, 3] RGB, become a picture file; [n, H, W, 3] become n of them.

    PNG files carry text chunks ``prompt``, ``seed``, ``parameters`` (JSON by stage),
    ``pipeline``, ``job_id`` and ``Software``; WebP and JPEG the same as JSON in the EXIF user
    comment. With ``OMNIQ_EMBED_METADATA`` off only the software is named.
    """

    formats = ("png", "webp", "jpeg")

    def encode(self, name: str, form: str, data: Any, context: OutputContext) -> ProcessedOutput:
        """Encode the pictures; ``meta`` has width, height and format."""
        pictures = rgb_items(name, data, "a picture", "H, W, 3")

        def encode(name: str, context: OutputContext, pixels: Any) -> EncodedArtifact:
            file = encoded(Image.fromarray(pixels), form, context)
            meta = {"width": pixels.shape[1], "height": pixels.shape[0], "format": form}
            return EncodedArtifact(name, f"image/{form}", file, meta)

        return several(encode, name, pictures, context)


def encoded(
    picture: Image.Image, form: str, context: OutputContext, quality: int | None = None
) -> bytes:
    """An RGB picture as a file of a format of :class:`ImageHandler`, with its metadata.

    ``quality`` is of WebP and JPEG, 0 to 100.
    """
    file = io.BytesIO()
    options = {**SAVE_OPTIONS[form], **_metadata(form, context)}
    if quality is not None:
        options["quality"] = quality
    picture.save(file, form, **options)
    return file.getvalue()


def facts_of(context: OutputContext) -> dict[str, Any]:
    """What files say about how they were made; nothing with ``OMNIQ_EMBED_METADATA`` off."""
    if not get_settings().embed_metadata:
        return {}
    return {
        "prompt": context.prompt,
        "seed": context.seed,
        "parameters": {stage: dict(p) for stage, p in context.parameters.items()},
        "pipeline": context.pipeline,
        "job_id": context.job_id,
    }


def comment_of(context: OutputContext) -> str:
    """The same and the software as JSON, for files whose muxer signs them itself (FFmpeg's)."""
    return json.dumps({**facts_of(context), "software": SOFTWARE})


def _metadata(form: str, context: OutputContext) -> dict[str, Any]:
    """Arguments of ``Image.save`` that embed the context."""
    facts = facts_of(context)
    if form == "png":
        chunks = PngInfo()
        for key, value in facts.items():
            if value is not None:
                # What is not Latin-1 goes into an iTXt chunk by itself.
                chunks.add_text(key, value if isinstance(value, str) else json.dumps(value))
        chunks.add_text("Software", SOFTWARE)
        return {"pnginfo": chunks}
    return {"exif": exif_of(facts)}


def exif_of(facts: dict[str, Any]) -> Image.Exif:
    """What files say, as EXIF: the software, and the rest as JSON in the user comment.

    A JPEG has room for 64 KiB: a prompt is cut, and parameters that are too long are left out.
    """
    exif = Image.Exif()
    exif[ExifTags.Base.Software] = SOFTWARE
    if facts:
        short = {**facts, "prompt": facts["prompt"][:EXIF_PROMPT_CHARS]}
        comment = json.dumps(short).encode("ascii")
        if len(comment) > EXIF_COMMENT_BYTES:
            comment = json.dumps({**short, "parameters": None}).encode("ascii")
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = b"ASCII\0\0\0" + comment
    return exif

"""Draws a contact sheet of real outputs: python -m tiny_omni.sheet FOLDER OUT.png."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tiny_omni.captioner import write_caption
from tiny_omni.evaluate import GUIDANCE, STEPS, load_pipeline, paint

PROMPTS = (
    "a red circle above a blue square",
    "three golden stars",
    "crimson heart on beige",
    "a big purple ring",
    "tiny green triangle on gray",
    "draw a pink diamond left of a black cross",
    "two emerald boxes, navy background",
    "a star",
    "an orange ball under a violet hoop",
    "Show me a huge yellow plus sign on navy.",
    "a little azure dot to the right of a big red heart",
    "3 black rings in a row on white",
    "large blue rhombus beneath tiny orange star",
    "a heart over a heart",
    "a green cross on top of a yellow circle on a gray background",
    "two pink triangles",
    "an image of a black square",
    "purple star left of purple star on white",
)
_SCALE, _COLUMNS, _GAP, _TEXT = 2, 6, 8, 40


def contact_sheet(folder: Path, prompts: tuple[str, ...], temperature: float) -> Image.Image:
    """A grid of the pictures for `prompts`, each above its prompt."""
    pipeline = load_pipeline(folder)
    captions = [
        write_caption(
            pipeline.text_encoder, pipeline.tokenizer, prompt, temperature=temperature, seed=i
        )
        for i, prompt in enumerate(prompts)
    ]
    rows = [caption.rows for caption in captions]
    pictures = paint(pipeline, rows, list(range(len(prompts))), GUIDANCE, STEPS)
    side = pictures[0].width * _SCALE
    width, height = side + _GAP, side + _TEXT + _GAP
    lines = -(-len(prompts) // _COLUMNS)
    sheet = Image.new("RGB", (_COLUMNS * width + _GAP, lines * height + _GAP), (255, 255, 255))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for i, (prompt, picture) in enumerate(zip(prompts, pictures, strict=True)):
        x, y = _GAP + i % _COLUMNS * width, _GAP + i // _COLUMNS * height
        sheet.paste(picture.resize((side, side), Image.Resampling.LANCZOS), (x, y))
        draw.rectangle((x - 1, y - 1, x + side, y + side), outline=(200, 200, 200))
        text = "\n".join(textwrap.wrap(prompt, 22)[:3])
        draw.multiline_text((x, y + side + 3), text, fill=(40, 40, 40), font=font, spacing=1)
    return sheet


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()
    contact_sheet(args.folder, PROMPTS, args.temperature).save(args.out, optimize=True)


if __name__ == "__main__":
    main()

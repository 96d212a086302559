"""Ask a server for a picture, or for a change of one, by OpenAI's client.

omniq serve black-forest-labs/FLUX.1-dev
python examples/openai_images.py "a red circle above a blue square" --size 1024x768
python examples/openai_images.py "at night" --image picture.png -o night.png
"""

from __future__ import annotations

import argparse
import base64
import io
from pathlib import Path
from typing import Any

import openai
from PIL import Image


def main() -> None:
    """Ask, and write what comes."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument("--image", type=Path, help="a picture to change")
    parser.add_argument("--size", help="WIDTHxHEIGHT; default: the model's own")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("-o", "--output", type=Path, default=Path("picture.png"))
    args = parser.parse_args()

    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key="none")
    asked: dict[str, Any] = {
        "model": args.model or client.models.list().data[0].id,
        "prompt": args.prompt,
        "extra_body": {"seed": args.seed},
        **({"size": args.size} if args.size else {}),
    }
    if args.image:
        made = client.images.edit(**asked, image=args.image)
    else:
        made = client.images.generate(**asked)
    (picture,) = made.data or ()
    data = base64.b64decode(picture.b64_json or "")
    args.output.write_bytes(data)
    print(f"{args.output}: {Image.open(io.BytesIO(data)).size}")


if __name__ == "__main__":
    main()

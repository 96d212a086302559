"""A picture of a served GLM-Image, from a text, and from pictures if any are given.

omniq serve zai-org/GLM-Image
python examples/glm_image.py "A sign that says 'OPEN'" open.png
python examples/glm_image.py "Make it say 'CLOSED'" closed.png --image open.png
"""

from __future__ import annotations

import argparse
import base64
from contextlib import ExitStack
from pathlib import Path

import openai


def main() -> None:
    """Ask for the picture by OpenAI's images routes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt", help="What is to be written in the picture stands in quotes.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--image", type=Path, action="append", default=[])
    parser.add_argument("--size", default="1024x1024", help="Width x height, multiples of 32.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url, api_key="none")
    model = client.models.list().data[0].id
    more = {"seed": args.seed, "num_inference_steps": args.steps}
    if args.image:
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in args.image]
            made = client.images.edit(
                model=model, prompt=args.prompt, image=files, size=args.size, extra_body=more
            )
    else:
        made = client.images.generate(
            model=model, prompt=args.prompt, size=args.size, extra_body=more
        )
    assert made.data is not None, "a picture comes back"
    args.file.write_bytes(base64.b64decode(made.data[0].b64_json or ""))
    print(f"{args.file}: {args.file.stat().st_size} bytes")


if __name__ == "__main__":
    main()

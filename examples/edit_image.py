"""Picture and text to picture: Qwen-Image-Edit and -Plus, FLUX.2; image to image of the others."""

from __future__ import annotations

from pathlib import Path

from common import defaults, diffusion_arguments
from PIL import Image

from omniq import OmniLLM

parser = diffusion_arguments(__doc__, "Qwen/Qwen-Image-Edit", "edited.png")
parser.add_argument("--image", type=Path, help="a picture; without one, a grey square")
parser.add_argument("--prompt", default="make it red")

if __name__ == "__main__":
    args = parser.parse_args()
    shown = args.image or Image.new("RGB", (512, 512), "grey")
    with OmniLLM(args.model, **defaults(args)) as llm:
        (output,) = llm.generate({"prompt": args.prompt, "image": shown}, seed=7)
        output.images[0].save(args.output)
        print(f"{args.output}: {output.images[0].size}")

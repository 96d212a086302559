"""Text (and pictures) to picture: GLM-Image, whose AR model plans what its DiT draws."""

from __future__ import annotations

from pathlib import Path

from common import diffusion_arguments

from omniq import OmniLLM

parser = diffusion_arguments(__doc__, "zai-org/GLM-Image", "picture.png")
parser.add_argument("--image", type=Path, action="append", help="to make the picture of; several")
parser.add_argument("--prompt", default="a sign that says 'OPEN' above a blue door")

if __name__ == "__main__":
    args = parser.parse_args()
    # Both stages plan with the size, so both have it as a default.
    size = {"height": args.height or 1024, "width": args.width or 1024}
    overrides = {
        "ar": {"defaults": size},
        "dit": {"defaults": {**size, "num_inference_steps": args.steps or 50}},
    }
    request = {"prompt": args.prompt, **({"image": args.image} if args.image else {})}
    engine_args = {"dtype": args.dtype}
    with OmniLLM(args.model, engine_args=engine_args, stage_overrides=overrides) as llm:
        (output,) = llm.generate(request, seed=7)
        output.images[0].save(args.output)
        print(f"{args.output}: {output.images[0].size}")

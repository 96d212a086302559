"""Text, or a first frame and text, to video: Wan 2.1 and 2.2."""

from __future__ import annotations

from pathlib import Path

from common import defaults, diffusion_arguments

from omniq import OmniLLM

parser = diffusion_arguments(__doc__, "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "video.mp4")
parser.add_argument("--image", type=Path, help="the first frame, for models that take one")
parser.add_argument("--frames", type=int)
parser.add_argument("--prompt", default="a red circle rolls over a blue square")

if __name__ == "__main__":
    args = parser.parse_args()
    prompt = {"prompt": args.prompt, **({"image": args.image} if args.image else {})}
    with OmniLLM(args.model, **defaults(args, num_frames=args.frames)) as llm:
        (output,) = llm.generate(prompt, seed=7)
        args.output.write_bytes(output.videos[0].data)
        print(f"{args.output}: {len(output.videos[0].data)} bytes")

"""Text to picture: Qwen-Image, Z-Image, FLUX.1, FLUX.2, Stable Diffusion 3."""

from __future__ import annotations

from common import defaults, diffusion_arguments

from omniq import OmniLLM

parser = diffusion_arguments(__doc__, "Tongyi-MAI/Z-Image-Turbo", "picture.png")
parser.add_argument("--prompt", default="a red circle above a blue square")
parser.add_argument("--encoder", choices=("diffusers", "vllm"), default="diffusers")

if __name__ == "__main__":
    args = parser.parse_args()
    with OmniLLM(args.model, encoder=args.encoder, **defaults(args)) as llm:
        (output,) = llm.generate(args.prompt, seed=7)
        output.images[0].save(args.output)
        print(f"{args.output}: {output.images[0].size}")

"""Text to speech: CSM."""

from __future__ import annotations

from common import arguments

from omniq import OmniLLM

parser = arguments(__doc__, "sesame/csm-1b", output="speech.wav")
parser.add_argument("--prompt", default="A red circle above a blue square.")
parser.add_argument("--voice", default="0", help="number of a speaker")
parser.add_argument("--max-tokens", type=int, default=375, help="frames of 80 ms at most")
parser.add_argument("--dtype", default="auto")

if __name__ == "__main__":
    args = parser.parse_args()
    with OmniLLM(args.model, engine_args={"dtype": args.dtype}) as llm:
        request = {"prompt": args.prompt, "voice": args.voice}
        (output,) = llm.generate(request, seed=7, max_tokens=args.max_tokens)
        output.audios[0].save(args.output)
        print(f"{args.output}: {output.stages['codec'].metrics['audio_seconds']:.2f} s")

"""Text to speech: CSM, by one of its voices or by that of a recording."""

from __future__ import annotations

from pathlib import Path

from common import arguments

from omniq import OmniLLM

parser = arguments(__doc__, "sesame/csm-1b", output="speech.wav")
parser.add_argument("--prompt", default="A red circle above a blue square.")
parser.add_argument("--voice", default="0", help="number of a speaker")
parser.add_argument("--ref-audio", type=Path, help="a recording, to speak in its voice")
parser.add_argument("--ref-text", help="what is said in it")
parser.add_argument("--max-tokens", type=int, default=375, help="frames of 80 ms at most")
parser.add_argument("--dtype", default="auto")

if __name__ == "__main__":
    args = parser.parse_args()
    with OmniLLM(args.model, engine_args={"dtype": args.dtype}) as llm:
        given = {"ref_audio": args.ref_audio, "ref_text": args.ref_text}
        request = {"prompt": args.prompt, "voice": args.voice}
        request |= {name: value for name, value in given.items() if value is not None}
        (output,) = llm.generate(request, seed=7, max_tokens=args.max_tokens)
        output.audios[0].save(args.output)
        print(f"{args.output}: {output.stages['codec'].metrics['audio_seconds']:.2f} s")

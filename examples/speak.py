"""Speech of a served model, written to a file while it is made.

omniq serve sesame/csm-1b
python examples/speak.py "Hello there." hello.wav --voice 0
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import openai


def main() -> None:
    """Ask for the speech and say when its first sound came."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text")
    parser.add_argument("file", type=Path, help="The ending says the format: wav, flac, mp3 ...")
    parser.add_argument("--voice", default="0", help="CSM: the number of a speaker.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=1500, help="Frames of 80 ms at most.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.url, api_key="none")
    model = client.models.list().data[0].id
    started, first = time.perf_counter(), 0.0
    with (
        client.audio.speech.with_streaming_response.create(
            model=model,
            voice=args.voice,
            input=args.text,
            response_format=args.file.suffix.removeprefix("."),
            extra_body={"seed": args.seed, "max_tokens": args.max_tokens},
        ) as response,
        args.file.open("wb") as file,
    ):
        for piece in response.iter_bytes(4096):
            first = first or time.perf_counter() - started
            file.write(piece)
    total = time.perf_counter() - started
    print(f"{args.file}: first sound after {first:.2f} s, all after {total:.2f} s")


if __name__ == "__main__":
    main()

"""Talk with an omni model: its text as it is said, its speech as a WAV file while it is spoken.

omniq serve Qwen/Qwen2.5-Omni-7B
python examples/qwen_omni.py "What do you hear?" --sound question.wav --out answer.wav
python examples/qwen_omni.py "What happens here?" --video clip.mp4 --hear
"""

from __future__ import annotations

import argparse
import base64
import time
import wave
from pathlib import Path
from typing import Any

import openai

SAMPLE_RATE = 24_000


def main() -> None:
    """Ask, print, write."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("text")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument("--image", type=Path, help="a picture (PNG, JPEG, WebP)")
    parser.add_argument("--sound", type=Path, help="a WAV file of 16 bits")
    parser.add_argument("--video", type=Path, help="MP4, WebM or Matroska")
    parser.add_argument("--hear", action="store_true", help="the video's sound, too")
    parser.add_argument("--voice", help="one of the model's speakers")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("answer.wav"))
    asked = parser.parse_args()

    client: Any = openai.OpenAI(base_url=f"{asked.url}/v1", api_key="none")
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=asked.model or client.models.list().data[0].id,
        messages=[{"role": "user", "content": content(asked)}],
        modalities=["text", "audio"],
        audio={"format": "pcm16", **({"voice": asked.voice} if asked.voice else {})},
        max_completion_tokens=asked.max_tokens,
        stream=True,
        extra_body={"mm_processor_kwargs": {"use_audio_in_video": True}} if asked.hear else None,
    )
    heard = 0.0
    with wave.open(str(asked.out), "wb") as file:
        file.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
                audio = getattr(choice.delta, "audio", None)
                if audio and audio.data:
                    heard = heard or time.perf_counter() - started
                    file.writeframes(base64.b64decode(audio.data))
        seconds = file.getnframes() / SAMPLE_RATE
    print(f"\n{asked.out}: {seconds:.2f} s of speech, the first after {heard:.2f} s")


def content(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The user's turn in OpenAI's form."""
    parts: list[dict[str, Any]] = []
    if asked.image:
        kind = asked.image.suffix.lstrip(".").lower().replace("jpg", "jpeg")
        data = base64.b64encode(asked.image.read_bytes()).decode()
        url = f"data:image/{kind};base64,{data}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    if asked.sound:
        data = base64.b64encode(asked.sound.read_bytes()).decode()
        parts.append({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})
    if asked.video:
        data = base64.b64encode(asked.video.read_bytes()).decode()
        parts.append({"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}})
    return [*parts, {"type": "text", "text": asked.text}]


if __name__ == "__main__":
    main()

"""The small model that omniq brings: a caption and its picture, on any CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

from omniq import OmniLLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", type=Path, default=Path("tiny-omni.png"))

if __name__ == "__main__":
    args = parser.parse_args()
    with OmniLLM() as llm:
        (output,) = llm.generate("a red circle above a blue square", seed=7)
        print(output.text)
        output.images[0].save(args.output)

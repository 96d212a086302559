"""Text to vectors by an embedding model on vLLM, and how alike they are."""

from __future__ import annotations

import math

from common import arguments

from omniq import OmniLLM

parser = arguments(__doc__, "BAAI/bge-small-en-v1.5")
parser.add_argument("--max-model-len", type=int)

if __name__ == "__main__":
    args = parser.parse_args()
    more = {} if args.max_model_len is None else {"max_model_len": args.max_model_len}
    with OmniLLM(args.model, engine_args={"runner": "pooling", **more}) as llm:
        outputs = llm.generate(["a red circle", "a scarlet disc", "three green stars"])
    first, *others = [output.values["embedding"] for output in outputs]
    for text, other in zip(("a scarlet disc", "three green stars"), others, strict=True):
        print(f"{text}: {math.fsum(a * b for a, b in zip(first, other, strict=True)):.3f}")

"""Text to text: any language model that vLLM or transformers runs."""

from __future__ import annotations

from common import arguments

from omniq import OmniLLM

parser = arguments(__doc__, "HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto")
parser.add_argument("--max-tokens", type=int, default=64)

if __name__ == "__main__":
    args = parser.parse_args()
    questions = ["What is a red circle?", "Name three colours."]
    chats = [{"messages": [{"role": "user", "content": q}]} for q in questions]
    with OmniLLM(args.model, engine=args.engine) as llm:
        for output in llm.generate(chats, max_tokens=args.max_tokens, temperature=0.0):
            print(output.text)

"""A language model alone: one AR stage."""

from __future__ import annotations

from typing import Any, ClassVar

from omniq.engines.registry import vllm_installed
from omniq.resolve.base import BuildOptions, ModelFamily
from omniq.resolve.files import MODEL_INDEX, ModelFiles

#: Requests in flight when ``--max-num-seqs`` says nothing: vLLM's own default on small machines.
MAX_NUM_SEQS = 256
MAX_INPUT = 1 << 31


class LanguageModel(ModelFamily):
    """Any model with a ``config.json`` that names an architecture.

    Inputs: ``prompt`` (as it is), ``messages`` (by the chat template) or ``token_ids``; outputs:
    ``text``, ``finish_reason`` and ``choices``.
    """

    name: ClassVar[str] = "language model"
    description: ClassVar[str] = "text to text, by vLLM or transformers"
    stages: ClassVar[tuple[str, ...]] = ("ar",)

    def matches(self, files: ModelFiles) -> bool:
        """A model of transformers that no family before this one took."""
        return files.json(MODEL_INDEX) is None and bool(files.architectures)

    def build(self, files: ModelFiles, options: BuildOptions) -> dict[str, Any]:
        """One stage ``ar``."""
        args = dict(options.engine_args)
        engine = options.engine
        if engine == "auto":
            engine = "vllm" if vllm_installed() else "transformers"
        stage: dict[str, Any] = {
            "stage_id": "ar",
            "engine_type": "AR",
            "engine": engine,
            "model": files.model,
            "input_modalities": ["text"],
            "output_modalities": ["text"],
            "dtype": args.pop("dtype", "auto"),
            "max_in_flight": args.pop("max_num_seqs", MAX_NUM_SEQS),
            # A prompt is text to go on from; what is to be answered are messages.
            "engine_args": {"chat_template": False, **args},
        }
        inputs = {
            "prompt": {"type": "text", "required": False, "max_length": MAX_INPUT},
            "messages": {"type": "messages", "required": False, "max_length": MAX_INPUT},
            "token_ids": {"type": "token_ids", "required": False, "max_length": MAX_INPUT},
        }
        return {
            "description": f"{files.given}, served by itself.",
            "inputs": inputs,
            "stages": [stage],
            "edges": [{"from": f"input.{name}", "to": f"ar.{name}"} for name in inputs],
            "outputs": {
                "text": {"from": "ar.text", "type": "text"},
                "finish_reason": {"from": "ar.finish_reason", "type": "text"},
                "choices": {"from": "ar.choices", "type": "json"},
            },
        }

"""A language or embedding model alone: one AR stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from omniq.engines.registry import vllm_installed
from omniq.errors import ConfigError
from omniq.resolve.base import BuildOptions, ModelFamily
from omniq.resolve.files import MODEL_INDEX, ModelFiles

#: Requests in flight when ``--max-num-seqs`` says nothing: vLLM's own default on small machines.
MAX_NUM_SEQS = 256
MAX_INPUT = 1 << 31
#: Inputs by name, with their types.
TEXTS = {"prompt": "text", "messages": "messages", "token_ids": "token_ids"}
#: How sentence-transformers marks its models.
SENTENCE_TRANSFORMERS = "modules.json"


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
        """One stage ``ar``; vLLM's ``runner: pooling`` makes any of them an embedding model."""
        if options.engine_args.get("runner") == "pooling":
            return EmbeddingModel().build(files, options)
        engine = options.engine
        if engine == "auto":
            engine = "vllm" if vllm_installed() else "transformers"
        return {
            "description": f"{files.given}, served by itself.",
            "stages": [_stage(files, options, engine, output="text")],
            **conversation("ar"),
        }


class EmbeddingModel(ModelFamily):
    """A model whose answer is a vector, by vLLM's pooling runner.

    Inputs: ``prompt`` or ``token_ids``; output: ``embedding``.
    """

    name: ClassVar[str] = "embedding model"
    description: ClassVar[str] = "text to vector, by vLLM"
    stages: ClassVar[tuple[str, ...]] = ("ar",)

    def matches(self, files: ModelFiles) -> bool:
        """A model of sentence-transformers, or one without a head (``BertModel``)."""
        if files.json(MODEL_INDEX) is not None or not files.architectures:
            return False
        headless = all(name.endswith("Model") for name in files.architectures)
        return headless or files.path(SENTENCE_TRANSFORMERS) is not None

    def build(self, files: ModelFiles, options: BuildOptions) -> dict[str, Any]:
        """One stage ``ar`` with vLLM's pooling runner.

        Raises:
            ConfigError: vLLM is not there, or another engine is asked for.
        """
        if options.engine == "transformers":
            raise ConfigError(
                f"{files.given}: embedding models run on vLLM, not on --engine transformers"
            )
        if not vllm_installed():
            raise ConfigError(
                f"{files.given}: embedding models run on vLLM, which is not installed",
                hint="the extra omniq[vllm] brings it",
            )
        args = {**options.engine_args, "runner": "pooling"}
        names = [name for name in TEXTS if name != "messages"]
        return {
            "description": f"{files.given}, served by itself.",
            "stages": [_stage(files, replace(options, engine_args=args), "vllm", output="pooling")],
            **_inputs(names, "ar"),
            "outputs": {"embedding": {"from": "ar.pooling", "type": "pooling"}},
        }


def _stage(files: ModelFiles, options: BuildOptions, engine: str, output: str) -> dict[str, Any]:
    args = dict(options.engine_args)
    return {
        "stage_id": "ar",
        "engine_type": "AR",
        "engine": engine,
        "model": files.model,
        "input_modalities": ["text"],
        "output_modalities": [output],
        "dtype": args.pop("dtype", "auto"),
        "max_in_flight": args.pop("max_num_seqs", MAX_NUM_SEQS),
        # A prompt is text to go on from; what is to be answered are messages.
        "engine_args": {"chat_template": False, **args},
    }


def conversation(stage: str) -> dict[str, Any]:
    """Inputs, edges and outputs of a pipeline whose AR stage answers what it is told."""
    return {
        **_inputs(TEXTS, stage),
        "outputs": {
            "text": {"from": f"{stage}.text", "type": "text"},
            "finish_reason": {"from": f"{stage}.finish_reason", "type": "text"},
            "choices": {"from": f"{stage}.choices", "type": "json"},
        },
    }


def _inputs(names: Iterable[str], stage: str) -> dict[str, Any]:
    return {
        "inputs": {
            name: {"type": TEXTS[name], "required": False, "max_length": MAX_INPUT}
            for name in names
        },
        "edges": [{"from": f"input.{name}", "to": f"{stage}.{name}"} for name in names],
    }

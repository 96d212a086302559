"""What both benchmarks of language models share: engine arguments, prompts, the pipeline's file."""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import yaml

#: For native vLLM and omniq alike. On the CPU both leave compilation out.
ENGINE_ARGS: dict[str, dict[str, Any]] = {
    "cpu": {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 512 << 20,
        "enable_prefix_caching": False,
    },
    # Both systems are up at the same time: each gets its share of the memory.
    "cuda": {"gpu_memory_utilization": 0.42, "enable_prefix_caching": False},
}
ENVIRONMENT: dict[str, dict[str, str]] = {
    "cpu": {"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    "cuda": {},
}
#: What every vLLM process gets.
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Options that both benchmarks have."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument(
        "--model", type=Path, required=True, help="Folder; tools/smollm2.py makes one."
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of the model.")
    parser.add_argument("--requests", type=int, default=64, help="In flight together.")
    parser.add_argument("--input-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="Of each, interleaved.")
    parser.add_argument(
        "--pause",
        type=float,
        default=2.0,
        help="Seconds of rest before each turn. vLLM polls for a second after its last "
        "request, at the cost of whoever comes next.",
    )
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="More, as JSON.")
    parser.add_argument("--json", type=Path, help="Write all samples there.")
    return parser


def engine_args(given: argparse.Namespace) -> dict[str, Any]:
    """vLLM's engine arguments, the same for both sides."""
    return {
        **ENGINE_ARGS[given.device],
        "max_model_len": given.max_model_len,
        "max_num_seqs": given.requests,
        **given.engine_args,
    }


def set_environment(given: argparse.Namespace) -> None:
    """For this process and all its children, as far as the caller has not."""
    threads = {"OMP_NUM_THREADS": str(given.threads)}
    for name, value in {**QUIET, **ENVIRONMENT[given.device], **threads}.items():
        os.environ.setdefault(name, value)


def prompts(given: argparse.Namespace, round_number: int) -> list[list[int]]:
    """Token ids of each request, others in every round so that no cache can help."""
    draw = random.Random(round_number)
    return [
        [draw.randrange(3, 4000) for _ in range(given.input_tokens)] for _ in range(given.requests)
    ]


def offer_pipelines(given: argparse.Namespace) -> None:
    """Make the pipelines ``bench`` and ``bench-states`` available to this process's children.

    ``bench-states`` hands the hidden states of all generated tokens to the client besides.
    """
    args = engine_args(given)
    stage = {
        "stage_id": "ar",
        "engine_type": "AR",
        "engine": "vllm",
        "model": str(given.model.resolve()),
        "output_modalities": ["text"],
        "max_in_flight": args.pop("max_num_seqs"),
        "engine_args": {"chat_template": False, **args},
    }
    plain = {
        "name": "bench",
        "inputs": {"token_ids": {"type": "token_ids", "max_length": 1 << 20}},
        "stages": [stage],
        "edges": [{"from": "input.token_ids", "to": "ar.token_ids"}],
        "outputs": {"text": {"from": "ar.text", "type": "text"}},
    }
    states = {
        **plain,
        "name": "bench-states",
        "stages": [{**stage, "output_modalities": ["text", "hidden_states"]}],
        "outputs": {
            **plain["outputs"],  # type: ignore[dict-item]
            "states": {"from": "ar.hidden_states", "type": "hidden_states"},
        },
    }
    folder = Path(tempfile.mkdtemp(prefix="omniq-bench-"))
    for pipeline in (plain, states):
        (folder / f"{pipeline['name']}.yaml").write_text(yaml.safe_dump(pipeline))
    os.environ["OMNIQ_PIPELINES"] = json.dumps([str(folder)])

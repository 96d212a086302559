"""64 requests with different parameters, all at once, against vLLM's own offline engine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from engine_helpers import loaded, stage

from omniq.engines.base import NullEmit, StageInput, StageRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm"),
]

#: Each by vLLM's names, as a client would write them. ``logprob_token_ids`` is not among them: in
#: vLLM 0.32 other requests of the same step lose log probabilities by it.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40},
    {"temperature": 0.0, "min_tokens": 12, "max_tokens": 14},
    {"temperature": 0.0, "stop": ["e", "r"]},
    {"temperature": 0.0, "stop": "o", "include_stop_str_in_output": True},
    {"temperature": 0.0, "stop_token_ids": [270, 184], "skip_special_tokens": False},
    {"temperature": 0.0, "bad_words": ["red", "blue"]},
    {"temperature": 0.0, "logit_bias": {"40": 6.5, "41": -100}},
    {"temperature": 0.0, "allowed_token_ids": list(range(30, 60))},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.0, "structured_outputs": {"choice": ["a red circle", "a star"]}},
    {"temperature": 0.0, "structured_outputs": {"regex": "[a-c]{4}"}},
    {
        "temperature": 0.0,
        "structured_outputs": {
            "json": {
                "type": "object",
                "properties": {"x": {"enum": ["a", "b"]}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    {"temperature": 0.0, "structured_outputs": {"grammar": 'root ::= "yes" | "no"'}},
    {
        "temperature": 0.0,
        "ignore_eos": True,
        "repetition_detection": {"max_pattern_size": 2, "min_count": 3},
    },
    {"seed": 1, "temperature": 1.0},
    {"seed": 2, "temperature": 1.5, "top_k": 5},
    {"seed": 3, "temperature": 1.0, "top_p": 0.6},
    {"seed": 4, "temperature": 1.0, "min_p": 0.2},
    {"seed": 5, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "logprobs": 1},
    {"seed": 6, "temperature": 1.0, "n": 3},
    {"seed": 7, "temperature": 1.0, "n": 2, "stop": ["a"], "logprobs": 2},
]
ARGS = {"max_model_len": 192, "max_num_seqs": 32, "max_num_batched_tokens": 64}


def _requests() -> list[tuple[list[int], dict[str, Any]]]:
    made = []
    for i in range(64):
        ids = [5 + (i * 7 + j * 3) % 300 for j in range(6 + i % 40)]
        made.append((ids, {"max_tokens": 20, **KINDS[i % len(KINDS)]}))
    return made


def _native(model: Path) -> list[Any]:
    """vLLM's own results."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    def own(params: dict[str, Any]) -> Any:
        fields = dict(params)
        if "structured_outputs" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        if "repetition_detection" in fields:
            asked = fields["repetition_detection"]
            fields["repetition_detection"] = RepetitionDetectionParams(**asked)
        if "logit_bias" in fields:
            fields["logit_bias"] = {int(k): v for k, v in fields["logit_bias"].items()}
        return SamplingParams(**fields)

    llm = LLM(
        model=str(model / "text_encoder"),
        tokenizer=str(model / "tokenizer"),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        # A seeded request's generator cannot be rewound on the CPU in stock vLLM.
        enable_chunked_prefill=False,
        **{k: v for k, v in ARGS.items() if k != "max_num_batched_tokens"},
    )
    requests = _requests()
    return llm.generate(
        [{"prompt_token_ids": ids} for ids, _ in requests],
        [own(params) for _, params in requests],
        use_tqdm=False,
    )


async def _ours(model: Path) -> list[Any]:
    config = stage(
        model,
        "ar",
        engine="vllm",
        output_modalities=["text"],
        max_in_flight=64,
        engine_args={**ARGS, "in_process": True},
    )
    engine = await loaded(config)
    try:
        return await asyncio.gather(
            *[
                engine.run(
                    StageRequest(f"r{i}", params),
                    {"token_ids": StageInput(ids)},
                    NullEmit(),
                )
                for i, (ids, params) in enumerate(_requests())
            ]
        )
    finally:
        await engine.unload()


def test_mixed_requests_equal_native_ones(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, tokens, reasons to stop, and log probabilities; chunked prefill only in ours."""
    from omniq.engines.vllm import contract

    contract.checked(on_cpu=True)
    monkeypatch.setitem(os.environ, contract.MULTIPROCESSING, "0")
    native = _native(model)
    ours = asyncio.run(_ours(model))
    reasons = set()
    for (ids, params), one, other in zip(_requests(), ours, native, strict=True):
        answers = one.values.get("choices", [one.values])
        tokens = one.tensors["token_ids"]
        assert len(answers) == len(other.outputs) == params.get("n", 1)
        for i, (answer, expected) in enumerate(zip(answers, other.outputs, strict=True)):
            name = str(i) if len(answers) > 1 else "token_ids"
            assert tokens[name].tolist() == list(expected.token_ids), (params, ids)
            assert answer["text"] == expected.text, params
            assert answer["finish_reason"] == expected.finish_reason, params
            assert answer.get("stop_reason") == expected.stop_reason, params
            reasons.add(answer["finish_reason"])
            _same_logprobs(answer.get("logprobs"), expected.logprobs)
        if "prompt_logprobs" in params:
            got = one.values["prompt_logprobs"]
            assert got[0] is None
            for at, expected_at in zip(got[1:], other.prompt_logprobs[1:], strict=True):
                _same_candidates(at, expected_at)
        assert one.values["usage"]["prompt_tokens"] == len(ids)
    assert {"stop", "length"} <= reasons


def _same_logprobs(got: Any, expected: Any) -> None:
    assert (got is None) == (not expected)
    for token, at in zip(got or (), expected or (), strict=True):
        assert token["token_id"] in at
        _same_candidates(token["top_logprobs"], at)


def _same_candidates(got: Any, expected: Any) -> None:
    assert {c["token_id"] for c in got} == set(expected)
    for candidate in got:
        same = expected[candidate["token_id"]]
        assert candidate["logprob"] == pytest.approx(same.logprob, abs=1e-3)
        assert (candidate["rank"], candidate["token"]) == (same.rank, same.decoded_token)

"""A request's parameters as vLLM's ``SamplingParams``, and vLLM's refusals as omniq's errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omniq.config.params import ARParams
from omniq.engines.vllm import contract
from omniq.errors import InvalidRequest

#: Parameters of an AR stage that are not fields of ``SamplingParams``.
NOT_SAMPLING = frozenset(
    {
        *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
        *("lora", "dimensions", "use_activation", "deterministic", "mm_processor_kwargs"),
    }
)
#: vLLM's field for so many tokens at once; versions before 0.32 have it for the whole engine only.
INTERVAL = "stream_interval"
#: Tokens that the front end gets at once of a request whose text nobody reads before it is whole:
#: it learns of the first one, for the time that took, and then of progress.
QUIET_TOKENS = 64
#: Those of pooling stages.
POOLING = frozenset({"lora", "dimensions", "use_activation"})


def sampling_params(
    params: Mapping[str, Any],
    defaults: Mapping[str, Any],
    budget: int,
    *,
    stream: bool = True,
    **more: Any,
) -> Any:
    """vLLM's ``SamplingParams``.

    Args:
        params: the request's validated parameters; None means unset.
        defaults: of the model's generation config, for what is unset.
        budget: new tokens at most; what the context has room for.
        stream: whether each token is wanted as it comes; else many at once.
        more: fields that omniq sets itself.

    Raises:
        InvalidRequest: vLLM refuses one, or does not know it in this version.
    """
    v = contract.names()
    given = {k: x for k, x in params.items() if x is not None and k not in NOT_SAMPLING}
    if "logit_bias" in given:
        given["logit_bias"] = {int(k): float(x) for k, x in given["logit_bias"].items()}
    known = v.SamplingParams.__struct_fields__
    for name in given:
        if name not in known:
            raise refused(name, "the stage's vLLM version does not have it")
    for name in ("dimensions", "use_activation"):
        if params.get(name) is not None:
            raise refused(name, "only stages of pooling models take it")
    if params.get("mm_processor_kwargs"):
        raise refused("mm_processor_kwargs", "only omni models take it")
    if params.get("deterministic") and not v.envs.VLLM_BATCH_INVARIANT:
        raise refused(
            "deterministic",
            "vLLM's results depend on its batch; start the worker with VLLM_BATCH_INVARIANT=1 "
            "where the GPU supports it, or give the stage engine: transformers",
        )
    try:
        if "structured_outputs" in given:
            given["structured_outputs"] = structured_outputs(given["structured_outputs"])
        if "repetition_detection" in given:
            asked = given["repetition_detection"]
            given["repetition_detection"] = v.RepetitionDetectionParams(**asked)
        fields = {**defaults, **given}
        fields["max_tokens"] = min(fields.get("max_tokens") or budget, budget)
        # More than there is room for is as much as there is room for.
        fields["min_tokens"] = min(fields.get("min_tokens") or 0, fields["max_tokens"])
        if not stream and INTERVAL in known:
            fields[INTERVAL] = QUIET_TOKENS
        return v.SamplingParams(**fields, output_kind=v.RequestOutputKind.DELTA, **more)
    except (v.VLLMValidationError, ValueError, TypeError) as exc:
        raise refusal(exc) from exc


def structured_outputs(asked: Mapping[str, Any]) -> Any:
    """vLLM's ``StructuredOutputsParams``.

    Raises:
        InvalidRequest: vLLM refuses them.
    """
    try:
        return contract.names().StructuredOutputsParams(**asked)
    except (ValueError, TypeError) as exc:
        raise refused("structured_outputs", str(exc)) from exc


def pooling_params(params: Mapping[str, Any], task: str) -> Any:
    """vLLM's ``PoolingParams``.

    Raises:
        InvalidRequest: a parameter that pooling has not, or that vLLM refuses.
    """
    # Every job has a seed, drawn where it names none; nothing here is random.
    given = {k: x for k, x in params.items() if x is not None and k != "seed"}
    for name in given:
        if name not in POOLING:
            allowed = ", ".join(sorted(POOLING))
            raise refused(name, f"a pooling stage does not take it; allowed: {allowed}")
    given.pop("lora", None)
    v = contract.names()
    try:
        return v.PoolingParams(task=task, **given)
    except (v.VLLMValidationError, ValueError, TypeError) as exc:
        raise refusal(exc) from exc


def refused(parameter: str, message: str) -> InvalidRequest:
    """The error that names one parameter."""
    field = f"parameters.{parameter}"
    return InvalidRequest(f"{field}: {message}", fields=[{"field": field, "message": message}])


def refusal(exc: Exception, *, prompt: str = "prompt") -> InvalidRequest:
    """What vLLM refused, as omniq's error naming the parameter.

    vLLM names it in ``VLLMValidationError.parameter``, or only in the text; what names none is
    about the prompt, ``input.<prompt>``.
    """
    message = str(exc)
    name = getattr(exc, "parameter", None)
    if name not in ARParams.model_fields:
        words = re.findall(r"[a-z_]+", message)
        name = next((w for w in words if w in ARParams.model_fields and len(w) > 1), None)
    if name is not None:
        return refused(name, message)
    if re.search(r"structured|grammar|schema|regex", message, re.IGNORECASE):
        return refused("structured_outputs", message)
    if message.startswith("n must"):
        return refused("n", message)
    field = f"input.{prompt}"
    return InvalidRequest(f"{field}: {message}", fields=[{"field": field, "message": message}])

"""Picking the next token: the usual controls, reproducible per request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omniq.engines.seeds import seeded_generator
from omniq.errors import EngineError, InvalidRequest

#: Parameters of the chat template, not of sampling.
PROMPT_PARAMS = ("tools", "chat_template_kwargs")
#: What a request may say of tools that are not forced: the engine reads no calls out of its text.
UNFORCED = {"tool_choice": ("auto", "none"), "parallel_tool_calls": (True,)}

# Below this a distribution is its argmax in float32 (vLLM draws the line at the same place).
GREEDY_BELOW = 1e-5
#: What ``generate`` of transformers takes where nobody says anything.
GENERATE_TOP_K = 50


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with every default filled in (vLLM's ``SamplingParams`` defaults)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Sampling:
        """From a request's validated AR parameters; unset and None mean the default.

        Raises:
            InvalidRequest: naming each parameter that this sampler has not.
        """
        known = {
            k: v
            for k, v in params.items()
            if v is not None and k not in PROMPT_PARAMS and v not in UNFORCED.get(k, ())
        }
        if unknown := [k for k in known if k not in cls.__slots__]:
            allowed = ", ".join([*cls.__slots__, *PROMPT_PARAMS])
            message = f"the stage's engine (transformers) does not have it; allowed: {allowed}"
            fields = [{"field": f"parameters.{k}", "message": message} for k in unknown]
            raise InvalidRequest(f"parameters.{unknown[0]}: {message}", fields=fields)
        if "stop" in known:
            stop = known["stop"]
            known["stop"] = (stop,) if isinstance(stop, str) else tuple(s for s in stop if s)
        for name in ("stop_token_ids", "allowed_token_ids"):
            if name in known:
                known[name] = tuple(known[name])
        if "logit_bias" in known:
            known["logit_bias"] = {int(k): float(v) for k, v in known["logit_bias"].items()}
        if "top_k" in known:
            known["top_k"] = max(known["top_k"], 0)
        return cls(**known)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW


def generation_defaults(config: Any, *, sample: bool = True) -> dict[str, Any]:
    """Sampling as transformers' ``generate(do_sample=sample)`` has it by a ``GenerationConfig``."""
    if not sample:
        return {"temperature": 0.0}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {n: v for n in names if (v := getattr(config, n, None)) is not None}
    return {"top_k": GENERATE_TOP_K, **given}


def refuse_parameters(params: Mapping[str, Any], names: Collection[str], reason: str) -> None:
    """Refuse parameters that an engine would not use.

    Raises:
        InvalidRequest: with a field for each that is given.
    """
    given = [name for name in params if name in names and params[name] is not None]
    if given:
        fields = [
            {"field": f"parameters.{n}", "message": f"not for this model: {reason}"} for n in given
        ]
        raise InvalidRequest(f"{given[0]}: {fields[0]['message']}", fields=fields)


class Sampler:
    """Draws one sequence's tokens from its own generator, whatever else runs.

    The generator lives on the CPU, so that a seed means the same on every device.

    Args:
        end_ids: tokens that may not come before ``min_tokens``.
        index: which of the request's ``n`` sequences; its seed is ``seed + index``, as in vLLM.
        generator: drawn from instead of an own one, by samplers that take turns.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        *,
        end_ids: Collection[int] = (),
        index: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        self.sampling = sampling
        self._seen = set(prompt_ids)
        self._made: Counter[int] = Counter()
        self._end_ids = sorted({*end_ids, *sampling.stop_token_ids})
        #: Where the draws come from.
        seed = None if sampling.seed is None else sampling.seed + index
        self.generator = generator or seeded_generator(seed)

    def pick(self, logits: torch.Tensor) -> int:
        """Next token id from ``logits`` [vocab], any float dtype and device.

        Raises:
            EngineError: the logits hold NaN.
            InvalidRequest: a token id of the request is not in the vocabulary.
        """
        scores = logits.detach().to("cpu", torch.float32, copy=True)
        if torch.isnan(scores).any():
            raise EngineError("the model returned NaN logits")
        self._constrain(scores)
        self._penalise(scores)
        token = int(scores.argmax()) if self.sampling.greedy else self._draw(scores)
        self._seen.add(token)
        self._made[token] += 1
        return token

    def logprobs(self, logits: torch.Tensor, token: int) -> list[tuple[int, float, int]]:
        """The likeliest tokens of unchanged ``logits`` [vocab], and ``token`` in any case.

        Returns:
            Token id, natural log of its probability, rank from 1; likeliest first.
        """
        values = logits.detach().to("cpu", torch.float32).log_softmax(-1)
        most = self.sampling.logprobs or 0
        count = values.numel() if most < 0 else min(most, values.numel())
        top = values.topk(count).indices.tolist()
        if token not in top:
            top.append(token)
        return [(i, float(values[i]), int((values > values[i]).sum()) + 1) for i in top]

    def _constrain(self, scores: torch.Tensor) -> None:
        """Allowed tokens, biases and the least length, in place."""
        sampling = self.sampling
        for name, ids in (
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("logit_bias", sampling.logit_bias),
        ):
            if any(i >= scores.numel() for i in ids):
                message = f"token ids must be below {scores.numel()}"
                raise InvalidRequest(
                    f"{name}: {message}",
                    fields=[{"field": f"parameters.{name}", "message": message}],
                )
        if sampling.allowed_token_ids:
            allowed = torch.tensor(sampling.allowed_token_ids)
            kept = scores[allowed]
            scores.fill_(-torch.inf)
            scores[allowed] = kept
        for token, bias in sampling.logit_bias.items():
            scores[token] += min(max(bias, -100.0), 100.0)
        if self._made.total() < sampling.min_tokens:
            scores[[i for i in self._end_ids if i < scores.numel()]] = -torch.inf

    def _penalise(self, scores: torch.Tensor) -> None:
        """CTRL's penalty (Keskar et al. 2019) over prompt and generated tokens, then OpenAI's
        presence and frequency penalties over generated ones, in place.
        """
        penalty = self.sampling.repetition_penalty
        if penalty != 1.0 and self._seen:
            seen = torch.tensor(sorted(self._seen))
            before = scores[seen]
            scores[seen] = torch.where(before < 0, before * penalty, before / penalty)
        presence, frequency = self.sampling.presence_penalty, self.sampling.frequency_penalty
        if (presence or frequency) and self._made:
            made = torch.tensor(list(self._made))
            counts = torch.tensor(list(self._made.values()), dtype=torch.float32)
            scores[made] -= frequency * counts + presence

    def _draw(self, scores: torch.Tensor) -> int:
        scores = scores / self.sampling.temperature
        if self.sampling.min_p > 0.0:
            probabilities = scores.softmax(0)
            scores[probabilities < self.sampling.min_p * probabilities.max()] = -torch.inf
        top_k, top_p = self.sampling.top_k, self.sampling.top_p
        if 0 < top_k < scores.numel():
            scores[scores < scores.topk(top_k).values[-1]] = -torch.inf
        if top_p < 1.0:
            ascending, order = scores.sort()
            dropped = ascending.softmax(0).cumsum(0) <= 1.0 - top_p
            dropped[-1] = False  # the most likely token always stays
            scores[order[dropped]] = -torch.inf
        return int(torch.multinomial(scores.softmax(0), 1, generator=self.generator))

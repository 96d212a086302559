"""Picking the next token: the usual controls, reproducible per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omniq.errors import EngineError, InvalidRequest

#: Parameters of the chat template, not of sampling.
PROMPT_PARAMS = ("tools", "chat_template_kwargs")

# Below this a distribution is its argmax in float32 (vLLM draws the line at the same place).
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with every default filled in (vLLM's ``SamplingParams`` defaults)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    seed: int | None = None

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Sampling:
        """From a request's validated AR parameters; unset and None mean the default.

        Raises:
            InvalidRequest: a parameter that this sampler has not.
        """
        known = {k: v for k, v in params.items() if v is not None and k not in PROMPT_PARAMS}
        if known.get("n") == 1:
            del known["n"]
        if unknown := [k for k in known if k not in cls.__slots__]:
            allowed = ", ".join([*cls.__slots__, *PROMPT_PARAMS])
            message = f"the stage's engine (transformers) does not have it; allowed: {allowed}"
            fields = [{"field": f"parameters.{k}", "message": message} for k in unknown]
            raise InvalidRequest(f"parameters.{unknown[0]}: {message}", fields=fields)
        if "stop" in known:
            stop = [known["stop"]] if isinstance(known["stop"], str) else known["stop"]
            known["stop"] = tuple(s for s in stop if s)
        if "top_k" in known:
            known["top_k"] = max(known["top_k"], 0)
        return cls(**known)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW


class Sampler:
    """Draws one request's tokens from its own generator, whatever else runs.

    The generator lives on the CPU, so that a seed means the same on every device.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int]) -> None:
        self.sampling = sampling
        self._seen = set(prompt_ids)
        self._generator = torch.Generator("cpu")
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def pick(self, logits: torch.Tensor) -> int:
        """Next token id from ``logits`` [vocab], any float dtype and device.

        Raises:
            EngineError: the logits hold NaN.
        """
        scores = logits.detach().to("cpu", torch.float32, copy=True)
        if torch.isnan(scores).any():
            raise EngineError("the model returned NaN logits")
        self._penalise(scores)
        token = int(scores.argmax()) if self.sampling.greedy else self._draw(scores)
        self._seen.add(token)
        return token

    def _penalise(self, scores: torch.Tensor) -> None:
        """CTRL's penalty (Keskar et al. 2019), over prompt and generated tokens, in place."""
        penalty = self.sampling.repetition_penalty
        if penalty == 1.0:
            return
        seen = torch.tensor(sorted(self._seen))
        before = scores[seen]
        scores[seen] = torch.where(before < 0, before * penalty, before / penalty)

    def _draw(self, scores: torch.Tensor) -> int:
        scores = scores / self.sampling.temperature
        top_k, top_p = self.sampling.top_k, self.sampling.top_p
        if 0 < top_k < scores.numel():
            scores[scores < scores.topk(top_k).values[-1]] = -torch.inf
        if top_p < 1.0:
            ascending, order = scores.sort()
            dropped = ascending.softmax(0).cumsum(0) <= 1.0 - top_p
            dropped[-1] = False  # the most likely token always stays
            scores[order[dropped]] = -torch.inf
        return int(torch.multinomial(scores.softmax(0), 1, generator=self._generator))

"""What the three trainings share: a budget, a learning-rate schedule, averaging, graph replay."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Budget:
    """Training ends at whichever comes first: `seconds` of wall time or `steps`."""

    seconds: float
    steps: int | None = None

    def run(self, device: str) -> Iterator[tuple[int, float]]:
        """Yield (step, share of the budget used) until the budget is spent."""
        begin, step, share = time.monotonic(), 0, 0.0
        while share < 1.0:
            yield step, share
            step += 1
            if step % 20 == 0 and device == "cuda":
                torch.cuda.synchronize()  # launches run ahead of the device and of the clock
            share = (time.monotonic() - begin) / self.seconds
            if self.steps is not None:
                share = max(share, step / self.steps)


class Average:
    """An exponential moving average of a model's parameters."""

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        self._live = [p.data for p in model.parameters()]
        self._mean = [p.detach().clone() for p in model.parameters()]
        self._decay = decay

    def update(self, step: int) -> None:
        """Take in the parameters after `step`; early steps are forgotten quickly."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self._mean, self._live, 1 - decay)

    def apply(self) -> None:
        """Overwrite the model's parameters with their average."""
        torch._foreach_copy_(self._live, self._mean)


class Trainer:
    """AdamW over a loss function; on CUDA the whole step is captured once and replayed.

    `loss` draws its own batch on the device and returns (what to minimise, what to report). It
    must not synchronise with the host when `graph` is set.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        loss: Callable[[], tuple[Tensor, Tensor]],
        *,
        device: str,
        lr: float,
        graph: bool = True,
    ) -> None:
        self._parameters = [p for module in modules for p in module.parameters()]
        self._loss, self._peak = loss, lr
        self._lr = torch.tensor(lr, device=device)
        cuda = device == "cuda"
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._lr,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            capturable=cuda,
            fused=cuda,
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._report = torch.zeros((), device=device)
        if cuda and graph:
            self._capture()

    def _eager(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        loss, report = self._loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._report.copy_(report.detach())

    def _capture(self) -> None:
        """Warm up on a side stream and capture one step; on failure steps stay eager."""
        self._lr.fill_(self._peak * 1e-3)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):
                self._eager()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            self._optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                self._eager()
        except RuntimeError as error:
            print(f"  no graph capture ({error}); steps run eagerly", file=sys.stderr, flush=True)
            torch.cuda.synchronize()
            return
        self._graph = graph

    def step(self, step: int, share: float) -> None:
        """One optimisation step at `share` of the budget (warm-up, then a half cosine)."""
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
        self._lr.fill_(self._peak * min(1.0, (step + 1) / 200) * max(decay, 1e-3))
        if self._graph is not None:
            self._graph.replay()
        else:
            self._eager()

    def report(self) -> Tensor:
        """The reported values of the last step (synchronises when read)."""
        return self._report


class Progress:
    """Prints a line every few seconds."""

    def __init__(self, name: str, every: float = 10.0) -> None:
        self._name, self._every = name, every
        self._begin = self._last = time.monotonic()

    def tick(self, step: int, share: float, trainer: Trainer) -> None:
        """Print if the last line is old enough."""
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            value = trainer.report().item()
            self.say(f"step {step} ({share:.0%}) loss {value:.4f}")

    def say(self, text: str) -> None:
        """Print a line with the time since the start of this training."""
        print(f"[{self._name} {time.monotonic() - self._begin:6.1f}s] {text}", flush=True)

"""One request's stock diffusers pipeline, held at its transformer calls.

The pipeline's own ``__call__`` runs in a greenlet. Where it calls its transformer, the greenlet
hands the call out and rests; many requests rest at once on one thread, and whoever drives them
runs their calls together. Nothing of a denoising loop is written anew: timesteps, guidance and
scheduler steps stay the pipeline's.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from greenlet import greenlet

from omniq.engines.diffusion.batch import Call, KeyMaker
from omniq.engines.families.base import Family

Ask = Callable[[list[Call]], list[Any]]
TRANSFORMERS = ("transformer", "transformer_2")


class DenoiseSession:
    """A run of ``work(ask)`` that rests whenever ``work`` calls ``ask``.

    Everything happens on the thread that calls :meth:`begin`, with gradients off there: grad mode
    belongs to the thread, and pipelines that take turns would restore each other's.

    Args:
        work: gets ``ask(calls) -> outputs``, one output for each call.
    """

    def __init__(self, work: Callable[[Ask], Any]) -> None:
        self._work = work
        self._greenlet: Any = None
        self.pending: list[Call] = []
        self.result: Any = None

    @property
    def done(self) -> bool:
        """Whether ``work`` has returned or raised."""
        return self._greenlet is not None and bool(self._greenlet.dead)

    def begin(self) -> None:
        """Run to the first call; raises what ``work`` raises."""
        assert not torch.is_grad_enabled(), "sessions run under torch.no_grad()"
        self._greenlet = greenlet(self._main)
        self._took(self._greenlet.switch())

    def give(self, outputs: Sequence[Any]) -> None:
        """Answer the pending calls and run to the next; raises what ``work`` raises."""
        self._took(self._greenlet.switch(list(outputs)))

    def stop(self, exc: BaseException) -> None:
        """Raise ``exc`` inside ``work`` where it rests; it comes out here unless caught there."""
        self._took(self._greenlet.throw(exc))

    def _took(self, handed: Any) -> None:
        self.pending = []
        if self.done:
            self.result = handed
        else:
            self.pending = handed

    def _main(self) -> Any:
        return self._work(self._ask)

    def _ask(self, calls: list[Call]) -> list[Any]:
        outputs: list[Any] = self._greenlet.parent.switch(calls)
        return outputs


class TransformerCalls:
    """Where one request's transformer calls go out; foresees the second of a guidance pair.

    Pipelines that call the transformer twice a step (``cond``, then ``uncond``) differ between the
    two only in the condition, which stays the same over the steps. From the second step on, both
    go out together, and the second is answered from memory after a check that it is what was
    foreseen.

    Args:
        family: says how calls join and whether pairs come.
        ask: hands calls out.
        pairs: whether to foresee.
    """

    def __init__(self, family: Family, ask: Ask, *, pairs: bool = True) -> None:
        self._keys, self._ask = KeyMaker(family.form), ask
        self._form = family.form
        self._pairs = pairs and family.paired and family.form is not None
        self._partner: Call | None = None
        self._ahead: tuple[Call, Any] | None = None
        self.context = "call"
        #: Calls that the pipeline has made.
        self.made = 0

    def __call__(self, module: Any, kwargs: dict[str, Any]) -> Any:
        """The output for one call: a tensor [rows, ...] or a list of rows."""
        self.made += 1
        call = self._keys.call(module, kwargs, self.context)
        if self._ahead is not None:
            (foreseen, output), self._ahead = self._ahead, None
            if self._is(foreseen, call):
                return output
            self._partner = None  # guidance ended, or something else changed
        calls = [call]
        if self._partner is not None and call.context == "cond":
            calls += self._foresee(call)
        outputs = self._ask(calls)
        if len(calls) > 1:
            self._ahead = (calls[1], outputs[1])
        if self._pairs and call.context == "uncond":
            self._partner = call
        return outputs[0]

    def _foresee(self, call: Call) -> list[Call]:
        partner, form = self._partner, self._form
        assert partner is not None
        assert form is not None
        kwargs = {
            name: partner.kwargs[name] if name in form.condition else value
            for name, value in call.kwargs.items()
        }
        other = self._keys.call(call.module, kwargs, partner.context)
        return [other] if other.key == call.key and partner.module is call.module else []

    def _is(self, foreseen: Call, call: Call) -> bool:
        """Latents are a new tensor after each step, so the same ones mean the same timestep."""
        form = self._form
        assert form is not None
        return (
            call.context == foreseen.context
            and call.module is foreseen.module
            and call.key == foreseen.key
            and all(
                call.kwargs.get(name) is foreseen.kwargs.get(name)
                for name in (form.latents, *form.condition)
                if name not in form.by_text
            )
        )


class TransformerProxy(torch.nn.Module):
    """Looks like the transformer to its pipeline; its calls go to ``calls``."""

    def __init__(self, model: Any, calls: TransformerCalls) -> None:
        super().__init__()
        # Not as a submodule: the proxy owns no weights.
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_calls", calls)
        # Pipelines ask at every step, and the model looks through all its modules for it.
        object.__setattr__(self, "dtype", model.dtype)
        names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        object.__setattr__(self, "_names", names)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any]:
        """As the model's with ``return_dict=False``, which every pipeline asks for."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs, "return_dict": False}
        return (self._calls(self._model, given),)

    @contextlib.contextmanager
    def cache_context(self, name: str, **_: Any) -> Iterator[None]:
        """Names the calls inside; the cache itself is told when a call runs."""
        before, self._calls.context = self._calls.context, name
        try:
            yield
        finally:
            self._calls.context = before

    def _reset_stateful_cache(self, recurse: bool = True) -> None:
        """Pipelines reset all cache state at their end; here it is dropped by request."""


def for_request(pipeline: Any, scheduler: Any, calls: TransformerCalls) -> Any:
    """A copy of ``pipeline`` for one run: own call state and scheduler, proxied transformers."""
    own = copy.copy(pipeline)
    own.__dict__["scheduler"] = copy.deepcopy(scheduler)
    for name in TRANSFORMERS:
        if (model := pipeline.__dict__.get(name)) is not None:
            own.__dict__[name] = TransformerProxy(model, calls)
    return own

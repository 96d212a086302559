"""Calls of a transformer by several requests, joined into one forward and taken apart again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from omniq.engines.families.base import Family


@dataclass(frozen=True, slots=True)
class CallForm:
    """How the arguments of one family's transformer calls join; names not listed must be equal.

    ``rows``: tensors [n, ...] joined along dim 0, equal behind it. ``lists``: lists of n tensors,
    all of one shape. ``ragged``: lists of n tensors of any shape. ``text``: tensors
    [n, tokens, dim], padded with zeros to the longest; :meth:`Family.mask_text` says so to the
    model. ``text_mask``: their mask [n, tokens], nonzero where a token counts, or None for all.
    ``by_text``: arguments that :meth:`Family.mask_text` makes anew when it pads. ``repeated``:
    lists of n equal entries. ``state``: objects that a request keeps from call to call, and what
    says of one whether a call uses it; then it runs alone. ``latents`` names the argument that
    changes with every step, and ``condition`` those in which the two calls of a guidance pair
    differ.
    """

    latents: str
    rows: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    ragged: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    text_mask: str | None = None
    by_text: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    state: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    condition: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of ``module``: keyword arguments for ``rows`` samples, and what it may join.

    Calls with equal ``key`` can run in one forward. ``context`` is the name under which diffusers'
    cache hooks know it (``cond``, ``uncond``).
    """

    module: Any
    kwargs: Mapping[str, Any]
    rows: int
    key: Hashable
    context: str = "call"


@dataclass(slots=True)
class KeyMaker:
    """Keys of one request's calls; remembers the digests of tensors that come again every step."""

    form: CallForm | None
    _alone: object = field(default_factory=object)
    _digests: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)

    def call(self, module: Any, kwargs: Mapping[str, Any], context: str) -> Call:
        """The call with its key; without a form it joins no other."""
        if self.form is None:
            return Call(module, kwargs, 1, (id(module), self._alone), context)
        rows = len(kwargs[self.form.latents])
        parts = [(name, self._part(name, value)) for name, value in sorted(kwargs.items())]
        return Call(module, kwargs, rows, (id(module), *parts), context)

    def _part(self, name: str, value: Any) -> Hashable:
        form = self.form
        assert form is not None, "only calls with a form have parts"
        if value is None or name in form.ragged or name in (form.text_mask, *form.by_text):
            # A missing mask is one that lets all tokens count.
            return "none" if value is None and name != form.text_mask else "any"
        if name in form.state:
            return self._alone if form.state[name](value) else "unused"
        if name in form.rows:
            return (tuple(value.shape[1:]), value.dtype)
        if name in form.text:
            return (value.shape[2], value.dtype)
        if name in (*form.lists, *form.repeated):
            entries = {_entry(v) for v in value}
            return next(iter(entries)) if len(entries) == 1 else self._alone
        return self._equal(value)

    def _equal(self, value: Any) -> Hashable:
        """A key that equal values have."""
        if isinstance(value, torch.Tensor):
            known = self._digests.get(id(value))
            if known is None:
                data = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
                digest = hashlib.sha256(data).hexdigest()
                # The tensor is kept with it: its id cannot be given to another one meanwhile.
                known = self._digests[id(value)] = (value, digest)
            return (tuple(value.shape), value.dtype, known[1])
        if isinstance(value, Mapping):
            return tuple((k, self._equal(v)) for k, v in sorted(value.items()))
        if isinstance(value, list | tuple):
            return tuple(self._equal(v) for v in value)
        return repr(value)


def _entry(value: Any) -> Hashable:
    """A key of one entry of a list: a tensor's shape, or the value."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    return repr(value)


def join(calls: Sequence[Call], family: Family) -> dict[str, Any]:
    """Arguments of one forward for all ``calls``, which have equal keys, in their order.

    A call alone keeps its own arguments untouched.
    """
    if len(calls) == 1:
        return dict(calls[0].kwargs)
    form = family.form
    assert form is not None, "calls without a form are never joined"
    joined = dict(calls[0].kwargs)
    for name in joined:
        values = [c.kwargs[name] for c in calls]
        if values[0] is None:
            continue
        if name in form.rows:
            joined[name] = torch.cat(values)
        elif name in form.lists or name in form.ragged or name in form.repeated:
            joined[name] = [item for value in values for item in value]
    _join_text(calls, joined, family, form)
    return joined


def _join_text(
    calls: Sequence[Call], joined: dict[str, Any], family: Family, form: CallForm
) -> None:
    if not form.text:
        return
    first = form.text[0]
    lengths = [c.kwargs[first].shape[1] for c in calls]
    longest = max(lengths)
    masks = [c.kwargs.get(form.text_mask) if form.text_mask else None for c in calls]
    for name in form.text:
        joined[name] = torch.cat([_padded(c.kwargs[name], longest) for c in calls])
    if min(lengths) == longest and all(m is None for m in masks):
        return
    device = joined[first].device
    mask = torch.zeros(sum(c.rows for c in calls), longest, dtype=torch.bool, device=device)
    row = 0
    for call, length, given in zip(calls, lengths, masks, strict=True):
        mask[row : row + call.rows, :length] = True if given is None else given.bool()
        row += call.rows
    family.mask_text(joined, mask)


def _padded(text: torch.Tensor, length: int) -> torch.Tensor:
    """``text`` [n, tokens, dim] with zeros up to ``length`` tokens."""
    return torch.nn.functional.pad(text, (0, 0, 0, length - text.shape[1]))


def split(output: Any, calls: Sequence[Call]) -> list[Any]:
    """Each call's share of a forward's output (a tensor [rows, ...] or a list of rows)."""
    shares, row = [], 0
    for call in calls:
        shares.append(output[row : row + call.rows])
        row += call.rows
    return shares


def rows_of(call: Call, form: CallForm) -> list[Call]:
    """The call as one call for each of its rows."""
    sliced = {*form.rows, *form.lists, *form.ragged, *form.repeated, *form.text, form.text_mask}
    return [
        Call(
            call.module,
            {
                name: value[row : row + 1] if name in sliced and value is not None else value
                for name, value in call.kwargs.items()
            },
            1,
            call.key,
            call.context,
        )
        for row in range(call.rows)
    ]


def joined_rows(shares: Sequence[Any]) -> Any:
    """The outputs of :func:`rows_of` as the whole call's output."""
    if isinstance(shares[0], torch.Tensor):
        return torch.cat(list(shares))
    return [item for share in shares for item in share]

"""The flow of Qwen2.5-Omni's token2wav: codes and noise to a spectrogram, stretch after stretch.

The DiT's attention stays within blocks of frames (published: 24), but for a few layers that also
look at the block before (0 and 20 of 22) or at the one behind (10). So all that an evaluation of
the DiT needs of what is before a stretch are keys and values of one block in the layers that look
back; :class:`Past` keeps them, for each evaluation of the solver. Frames are computed by blocks,
with one key more to each where a layer looks, and never by the square of an utterance's length.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from omniq.engines.base import Cancelled

#: How often the Runge-Kutta solver evaluates the DiT in each interval.
EVALUATIONS = 4


@dataclass(frozen=True, slots=True)
class Flow:
    """Parameters of one utterance."""

    cond: torch.Tensor
    """[1, d]."""
    voice: torch.Tensor
    """[2, d]: the encoded reference of the voice, and that of none."""
    num_steps: int
    guidance_scale: float
    sway_coefficient: float

    @property
    def rows(self) -> int:
        """With the codes and the speaker, and where guidance is wanted also without."""
        return 2 if self.guidance_scale >= 1e-5 else 1

    @property
    def evaluations(self) -> int:
        """Of the DiT, for each stretch."""
        return EVALUATIONS * (self.num_steps - 1)


class Past:
    """What a stretch has to know of the block before it.

    Keys and values of that block in each evaluation of the solver and each layer that looks back,
    28 MB for the published sizes, ten steps and guidance. Each stretch writes its own in place of
    those it reads, so that an utterance takes no more the longer it is; one that failed midway
    leaves neither.
    """

    def __init__(self) -> None:
        self.states: torch.Tensor | None = None
        """float32, see :meth:`shape`; None: there is no such block."""

    @staticmethod
    def shape(dit: Any, flow: Flow) -> tuple[int, ...]:
        """[evaluations, layers, keys and values, rows, heads, block, head_dim]."""
        layers = sum(layer.look_backward_block > 0 for layer in dit.transformer_blocks)
        attention = dit.transformer_blocks[0].attn
        head_dim = attention.inner_dim // attention.heads
        sizes = flow.evaluations, layers, 2, flow.rows, attention.heads, dit.block_size, head_dim
        return tuple(map(int, sizes))

    @classmethod
    def nbytes(cls, dit: Any, flow: Flow) -> int:
        """How much memory it takes."""
        return 4 * math.prod(cls.shape(dit, flow))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Frames of one utterance that are computed at once."""

    codes: torch.Tensor
    """int64 [n]."""
    noise: torch.Tensor
    """[frames, mel]."""
    flow: Flow
    begin: int = 0
    """Frames before it: whole blocks."""
    past: Past | None = None
    """Of the block before, where it was kept; None: nothing is looked at, and nothing kept."""
    keep: int = 0
    """Frames before the next stretch; that block is kept. 0: none."""
    cancel: threading.Event = field(default_factory=threading.Event)
    """Set when nobody wants it any more; looked at in each evaluation."""


@dataclass(frozen=True, slots=True)
class _Sight:
    """What the frames of each block see in the layers of one kind.

    ``blocks``: int64 [blocks, seen], None if it is only the block itself. ``mask``: bool [blocks,
    1, 1, keys], None if all keys are there.
    """

    blocks: torch.Tensor | None
    mask: torch.Tensor | None


class _Layout:
    """Where the blocks of several stretches stand: those of all stretches behind each other, with
    the codes, then in the same order without. The last of a stretch is filled up with zeros.
    """

    def __init__(self, stretches: Sequence[Stretch], block: int, device: str) -> None:
        self.block, self.device = block, device
        self.stretches = stretches
        self.rows = stretches[0].flow.rows
        self.counts = [-(-len(stretch.noise) // block) for stretch in stretches]
        self.blocks = sum(self.counts)
        self.read = [s.past.states for s in stretches if s.past and s.past.states is not None]
        self._lay()

    def _lay(self) -> None:
        kept = self.rows * self.blocks  # behind all blocks: those that were kept
        before: list[int] = []
        lengths: list[int] = []
        for row in range(self.rows):
            old = kept + row
            for stretch, count in zip(self.stretches, self.counts, strict=True):
                first = len(lengths)
                known = stretch.past is not None and stretch.past.states is not None
                before += [old if known else -1, *range(first, first + count - 1)]
                old += self.rows if known else 0
                lengths += [self.block] * (count - 1)
                lengths.append(len(stretch.noise) - (count - 1) * self.block)
        lengths += [self.block] * (self.rows * len(self.read))
        after = [-1] * kept
        for i, other in enumerate(before):
            if 0 <= other < kept:
                after[other] = i
        self.sights = {
            (back, ahead): self._sight([before] * back, [after] * ahead, lengths)
            for back in (False, True)
            for ahead in (False, True)
        }

    def _sight(
        self, before: Sequence[list[int]], after: Sequence[list[int]], lengths: list[int]
    ) -> _Sight:
        own = list(range(self.rows * self.blocks))
        seen = list(zip(*before, own, *after, strict=True))
        there = [[lengths[i] if i >= 0 else 0 for i in row] for row in seen]
        mask = None
        if any(length < self.block for row in there for length in row):
            frames = torch.arange(self.block) < torch.tensor(there)[:, :, None]
            mask = frames.flatten(1)[:, None, None].to(self.device)
        if not before and not after:
            return _Sight(None, mask)
        blocks = torch.tensor([[i if i >= 0 else j for i in row] for j, row in enumerate(seen)])
        return _Sight(blocks.to(self.device), mask)

    def filled(self, frames: Sequence[torch.Tensor]) -> torch.Tensor:
        """[blocks, block, d] of one row of each stretch: [frames, d]."""
        parts = [
            F.pad(part, (0, 0, 0, count * self.block - len(part)))
            for part, count in zip(frames, self.counts, strict=True)
        ]
        return torch.cat(parts).unflatten(0, (self.blocks, self.block))

    def parts(self, made: torch.Tensor) -> list[torch.Tensor]:
        """What :meth:`filled` was given."""
        return [
            part.flatten(0, 1)[: len(stretch.noise)]
            for stretch, part in zip(self.stretches, made.split(self.counts), strict=True)
        ]

    def positions(self) -> torch.Tensor:
        """int64 [rows * blocks, block]: of each frame in its utterance."""
        own = torch.arange(self.block, device=self.device)
        begins = [
            stretch.begin + i * self.block
            for stretch, count in zip(self.stretches, self.counts, strict=True)
            for i in range(count)
        ]
        return torch.tensor(begins * self.rows, device=self.device)[:, None] + own

    def kept(self) -> list[tuple[Past, list[int]]]:
        """Whose states are to be kept, and where they stand, row by row."""
        found, first = [], 0
        for stretch, count in zip(self.stretches, self.counts, strict=True):
            if stretch.past is not None and stretch.keep:
                at = first + (stretch.keep - stretch.begin) // self.block - 1
                assert first <= at < first + count, "it is a block of this stretch"
                found.append((stretch.past, [row * self.blocks + at for row in range(self.rows)]))
            first += count
        return found


class _Evaluation:
    """The DiT with and without the codes, as the solver asks for it."""

    def __init__(self, dit: Any, stretches: Sequence[Stretch]) -> None:
        self._dit, self._stretches = dit, stretches
        device = str(stretches[0].noise.device)
        self.layout = layout = _Layout(stretches, int(dit.block_size), device)
        self._rows = layout.rows
        self._looking = [layer.look_backward_block > 0 for layer in dit.transformer_blocks]
        self._number = 0
        flows = [stretch.flow for stretch in stretches]
        lengths = [len(stretch.noise) for stretch in stretches]
        conditions = []
        for row in range(self._rows):
            codes = [s.codes if row == 0 else torch.zeros_like(s.codes) for s in stretches]
            parts = [
                torch.cat(
                    [
                        flow.voice[row].expand(length, -1),
                        dit.text_embed(c[None])[0],
                        (flow.cond if row == 0 else torch.zeros_like(flow.cond)).expand(length, -1),
                    ],
                    dim=-1,
                )
                for flow, c, length in zip(flows, codes, lengths, strict=True)
            ]
            conditions.append(layout.filled(parts))
        self._conditions = torch.cat(conditions)
        scales = [flow.guidance_scale for flow in flows]
        self._scales = torch.tensor(scales, device=device).repeat_interleave(
            torch.tensor(layout.counts, device=device)
        )[:, None, None]
        self._turns = dit.rotary_embed(self._conditions, layout.positions())
        self._kept = layout.kept()
        for past, _ in self._kept:
            if past.states is None:
                past.states = self._conditions.new_empty(Past.shape(dit, flows[0]))

    def __call__(self, at: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The velocity [blocks, block, mel] of ``state`` at time ``at``."""
        if all(stretch.cancel.is_set() for stretch in self._stretches):
            raise Cancelled("nobody wants this run's outcome")
        dit = self._dit
        time = dit.time_embed(at[None])
        states = torch.cat([state] * self._rows)
        hidden = dit.input_embed.proj(torch.cat([states, self._conditions], dim=-1))
        looked = 0
        for layer, looks in zip(dit.transformer_blocks, self._looking, strict=True):
            hidden = self._layer(layer, hidden, time, looked if looks else None)
            looked += looks
        made: torch.Tensor = dit.proj_out(dit.norm_out(hidden, time))
        self._number += 1
        if self._rows == 1:
            return made
        with_codes, without = made.chunk(2)
        return with_codes + (with_codes - without) * self._scales

    def _layer(
        self, layer: Any, hidden: torch.Tensor, time: torch.Tensor, looked: int | None
    ) -> torch.Tensor:
        """``DiTDecoderLayer.forward``; ``looked``: its number among those that look back."""
        norm, gate_msa, shift_mlp, scale_mlp, gate_mlp = layer.attn_norm(hidden, emb=time)
        hidden = hidden + gate_msa[:, None] * self._attention(layer, norm, looked)
        norm = layer.ff_norm(hidden) * (1 + scale_mlp[:, None]) + shift_mlp[:, None]
        made: torch.Tensor = hidden + gate_mlp[:, None] * layer.ff(norm)
        return made

    def _attention(self, layer: Any, norm: torch.Tensor, looked: int | None) -> torch.Tensor:
        """``DiTAttention.forward`` by blocks."""
        from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (  # noqa: PLC0415
            apply_rotary_pos_emb,
            deinterleave_head_dim,
        )

        attn, sight = layer.attn, self.layout.sights[looked is not None, layer.look_ahead_block > 0]
        query, key, value = (
            linear(norm).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for linear in (attn.to_q, attn.to_k, attn.to_v)
        )
        # As the model was trained: only the first head is rotated.
        query[:, :1], key[:, :1] = apply_rotary_pos_emb(
            deinterleave_head_dim(query[:, :1]), deinterleave_head_dim(key[:, :1]), *self._turns
        )
        keys, values = key, value
        if looked is not None and self.layout.read:
            old = [states[self._number, looked] for states in self.layout.read]
            keys = torch.cat([key, *(states[0] for states in old)])
            values = torch.cat([value, *(states[1] for states in old)])
        if sight.blocks is not None:
            keys, values = (
                known[sight.blocks].transpose(1, 2).flatten(2, 3) for known in (keys, values)
            )
        seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=sight.mask)
        if looked is not None:
            for past, rows in self._kept:
                assert past.states is not None, "there is room"
                past.states[self._number, looked, 0] = key[rows]
                past.states[self._number, looked, 1] = value[rows]
        made: torch.Tensor = attn.to_out[0](seen.transpose(1, 2).flatten(2))
        return made


def integrate(dit: Any, stretches: Sequence[Stretch]) -> list[torch.Tensor]:
    """The spectrogram [frames, mel] of each stretch.

    ``Qwen2_5OmniToken2WavDiTModel.sample`` from given noise, in which a stretch goes on where the
    one before it has ended.

    Args:
        dit: the model, without its encoder of voices.
        stretches: on the model's device; of equal ``num_steps``, ``sway_coefficient`` and ``rows``.

    Raises:
        Cancelled: nobody wants any of them any more.
    """
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (  # noqa: PLC0415
        RungeKutta4ODESolver,
    )

    flow = stretches[0].flow
    velocity = _Evaluation(dit, stretches)
    noise = velocity.layout.filled([stretch.noise for stretch in stretches])
    times = torch.linspace(0, 1, flow.num_steps, device=noise.device, dtype=noise.dtype)
    times += flow.sway_coefficient * (torch.cos(torch.pi / 2 * times) - 1 + times)
    made = RungeKutta4ODESolver(velocity, noise).integrate(times)[-1]
    return velocity.layout.parts(made)

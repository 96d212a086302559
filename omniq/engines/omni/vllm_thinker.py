"""The thinker of an omni model on vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from omniq.config import Modality
from omniq.engines.ar_vllm import VLLMAREngine
from omniq.engines.base import Emit, StageOutput
from omniq.engines.loading import part_folder, whole_arg
from omniq.engines.omni import reply
from omniq.engines.omni.families import family_of
from omniq.engines.vllm.arguments import OwnArgs
from omniq.engines.vllm.chunks import Chunks
from omniq.engines.vllm.hidden_states import StateOptions, States
from omniq.engines.vllm.outputs import Generation
from omniq.errors import ConfigError, EngineError

#: Engine arguments of :class:`VLLMAREngine` that make something else of it than a thinker.
NOT_A_THINKERS = ("hidden_states", "text_encoder", "runner")


class VLLMThinkerEngine(VLLMAREngine):
    """:class:`VLLMAREngine` for the thinker of an omni model.

    One more output, where the stage's output modalities contain ``hidden_states``: ``reply``
    (:mod:`omniq.engines.omni.reply`) of the first answer, as a whole and by chunks of
    ``stream_tokens`` tokens (default 1). ``hidden_states`` ([tokens, hidden]) and ``token_ids`` are
    the first answer's. Prompts are then computed whole, whatever vLLM's prefix cache holds of them.
    """

    name = "omni-thinker-vllm"

    def _arguments(self) -> tuple[OwnArgs, dict[str, Any]]:
        where = f"stage {self.stage.stage_id!r}"
        if wrong := [name for name in NOT_A_THINKERS if name in self.stage.engine_args]:
            raise ConfigError(f"{where}: engine_args.{wrong[0]}: engine {self.name!r} has none")
        folder = part_folder(self.stage)
        layer = family_of(folder).prompt_layer(folder)
        own, given = super()._arguments()
        more: dict[str, Any] = {"stream_tokens": whole_arg(self.stage, "stream_tokens", 1)}
        if Modality.HIDDEN_STATES in self.stage.output_modalities:
            # Several are the prompt's and the answer's.
            layers = -1 if layer is None else (layer, -1)
            more["hidden_states"] = StateOptions(positions="all", layers=layers, places=True)
        return own.model_copy(update=more), given

    def _chunks(self, request_id: str, generation: Generation, emit: Emit) -> Chunks:
        return _ReplyChunks(self._collector, self._options, request_id, generation, emit)

    def _output(self, generation: Generation, states: Mapping[int, States] | None) -> StageOutput:
        made = super()._output(generation, states)
        if states is not None and self._options is not None:
            count = len(generation.sequences[0].tokens)
            whole = _reply(generation, states[0], self._options, 0, count)
            made.tensors = {reply.NAME: whole, **{n: {n: whole[n]} for n in reply.TOKENS}}
        return made


class _ReplyChunks(Chunks):
    """The first answer for the talker, while it grows."""

    async def _hand_on(self, start: int, stop: int, last: bool) -> None:
        if self._collector is None or self._options is None:
            return
        states = self._collector.states(self._id)
        tensors = _reply(self._generation, states, self._options, start, stop)
        await self._emit.achunk(reply.NAME, tensors=tensors, last=last)


def _reply(
    generation: Generation, states: States, options: StateOptions, start: int, stop: int
) -> dict[str, torch.Tensor]:
    """Tokens ``start`` up to ``stop`` of the first answer, with the prompt before the first.

    Raises:
        EngineError: states are missing.
    """
    prompt = None
    if start == 0:
        found = states.prompt
        if found is None or len(found) != generation.prompt_tokens:
            got = "none" if found is None else len(found)
            raise EngineError(
                f"vLLM gave {got} hidden states for {generation.prompt_tokens} prompt tokens"
            )
        ids = torch.tensor(generation.prompt_ids, dtype=torch.int64)
        prompt = reply.ThinkerPrompt(ids, options.placed(found), _layer(options, found, 0))
    rows = states.rows[start:stop]
    if len(rows) < stop - start:
        raise EngineError(f"vLLM gave {len(rows)} hidden states for {stop - start} tokens")
    ids = torch.tensor(generation.sequences[0].tokens[start:stop], dtype=torch.int64)
    return reply.tensors_of(ids, _layer(options, torch.cat(rows), -1), prompt)


def _layer(options: StateOptions, rows: torch.Tensor, which: int) -> torch.Tensor:
    """[n, hidden]: one of the layers that ``rows`` have."""
    shaped = options.shaped(rows)
    return shaped if shaped.ndim == 2 else shaped[:, which].contiguous()

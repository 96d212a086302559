"""The thinker of an omni model on vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch

from omniq.config import Modality
from omniq.engines.ar_vllm import VLLMAREngine
from omniq.engines.base import Emit, StageInput, StageOutput
from omniq.engines.loading import loading, part_folder, whole_arg
from omniq.engines.omni import reply
from omniq.engines.omni.families import family_of
from omniq.engines.omni.prompts import (
    Conversation,
    check_room,
    has_media,
    heard,
    read_conversation,
)
from omniq.engines.omni.videos import PARAMETER, VideoReader
from omniq.engines.text import check_messages
from omniq.engines.vllm import media
from omniq.engines.vllm.arguments import OwnArgs
from omniq.engines.vllm.chunks import Chunks
from omniq.engines.vllm.hidden_states import StateOptions, States
from omniq.engines.vllm.outputs import Generation
from omniq.engines.vllm.requests import Prompt
from omniq.engines.vllm.sampling import refused
from omniq.errors import ConfigError, EngineError

#: Engine arguments of :class:`VLLMAREngine` that make something else of it than a thinker.
NOT_A_THINKERS = ("hidden_states", "text_encoder", "runner")
#: How far a whole number may be from one that was computed.
WHOLE = 1e-6


class VLLMThinkerEngine(VLLMAREngine):
    """:class:`VLLMAREngine` for the thinker of an omni model.

    One more output, where the stage's output modalities contain ``hidden_states``: ``reply``
    (:mod:`omniq.engines.omni.reply`) of the first answer, as a whole and by chunks of
    ``stream_tokens`` tokens (default 1). ``hidden_states`` ([tokens, hidden]) and ``token_ids`` are
    the first answer's. Prompts are then computed whole, whatever vLLM's prefix cache holds of them.

    One more parameter: ``mm_processor_kwargs``, about videos
    (:class:`omniq.config.params.MediaOptions`), without ``use_audio_in_video``, and of Qwen3-Omni
    with rates only that place every frame at a whole number.
    """

    name = "omni-thinker-vllm"

    async def load(self) -> None:
        """As :class:`VLLMAREngine`."""
        self._decoding = asyncio.Lock()
        await super().load()

    def _start(self) -> None:
        folder = part_folder(self.stage)
        family = family_of(folder)
        self._places = family.places_a_second(folder)
        with loading(self.stage, folder):
            self._processor = resolve_name(family.processor).from_pretrained(folder)
        super()._start()

    async def _prompt(self, inputs: Mapping[str, StageInput], params: Mapping[str, Any]) -> Prompt:
        if (params.get(PARAMETER) or {}).get("use_audio_in_video"):
            raise refused(
                PARAMETER,
                "use_audio_in_video: with the thinker on vLLM the sound of videos is not heard; "
                "on transformers it is",
            )
        if not has_media(inputs):
            return await super()._prompt(inputs, params)
        if "messages" in inputs:
            messages: Any = inputs["messages"].value
            check_messages(messages, "messages")
            self._reader.check_media("messages", media.counts(messages))
        # Beside the model thread, one request's at a time: as on transformers.
        async with self._decoding:
            videos = VideoReader(self._processor.video_processor, params)
            said = await read_conversation(inputs, videos)
            if said is None:
                return await super()._prompt(inputs, params)
            return await self.in_thread(self._encoded, said, params)

    def _encoded(self, said: Conversation, params: Mapping[str, Any]) -> Prompt:
        more = None
        if videos := [frames for frames, _ in said.media.get("video", ())]:
            check_room(self._processor, videos, said.field, self._limits.context)
            self._check_places(videos, said)
            # vLLM does not learn of it from the frames, and would place them by its default.
            more = {"fps": said.fps}
        found = dict(said.media)
        if sounds := found.get("audio"):  # vLLM's own resampler is an extra, and another one
            rate = float(self._processor.feature_extractor.sampling_rate)
            made = heard(self._processor, sounds, said.field)
            found["audio"] = [(samples, rate) for samples in made]
        return self._reader.said(said.field, said.messages, found, params, more)

    def _check_places(self, videos: list[np.ndarray], said: Conversation) -> None:
        """vLLM rounds places down, and so gives another answer where the model has parts of one."""
        reader = self._processor.video_processor
        if self._places is None or all(len(v) <= reader.temporal_patch_size for v in videos):
            return
        step = self._places * reader.temporal_patch_size / said.fps
        if abs(step - round(step)) > WHOLE:
            raise media.bad(
                said.field,
                f"its videos at {said.fps:g} frames a second are {step:g} places a step, and vLLM "
                f"has whole ones only; take them at another rate ({PARAMETER}: fps), as 1 or 2, or "
                "with the thinker on transformers",
            )

    def _sampling(
        self, prompt: Prompt, params: Mapping[str, Any], parser: Any, *, stream: bool
    ) -> Any:
        sampling = {name: value for name, value in params.items() if name != PARAMETER}
        return super()._sampling(prompt, sampling, parser, stream=stream)

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

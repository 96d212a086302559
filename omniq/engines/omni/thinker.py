"""The thinker of an omni model: text, pictures, sound and video in; text and states out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from omniq.engines.ar_transformers import (
    ENGINE_ARGS,
    Generation,
    Prompt,
    TransformersAREngine,
)
from omniq.engines.base import Emit, StageInput, StageOutput
from omniq.engines.loading import part_folder, whole_arg
from omniq.engines.omni import reply
from omniq.engines.omni.families import family_of
from omniq.engines.omni.prompts import (
    SOUND_IN_VIDEO,
    Conversation,
    MediaPrompts,
    has_media,
    read_conversation,
)
from omniq.engines.omni.videos import PARAMETER
from omniq.engines.omni.weights import load_part
from omniq.engines.rows import hand_on
from omniq.errors import ConfigError


class ThinkerEngine(TransformersAREngine):
    """:class:`TransformersAREngine` for the thinker of an omni model.

    More inputs: pictures, sound and videos within ``messages`` (``image_url``, ``input_audio``,
    ``audio_url``, ``video_url``), or ``image``, ``audio`` and ``video`` beside ``prompt``. One more
    parameter: ``mm_processor_kwargs``, about videos (:class:`omniq.config.params.MediaOptions`).
    One more output, where the stage's output modalities contain ``hidden_states``: ``reply``
    (:mod:`omniq.engines.omni.reply`) of the first answer, as a whole and by chunks of
    ``stream_tokens`` tokens (default 1).
    """

    name = "omni-thinker"
    arguments: ClassVar[frozenset[str]] = ENGINE_ARGS | {"stream_tokens"}

    async def load(self) -> None:
        """As :class:`TransformersAREngine`."""
        self._decoding = asyncio.Lock()
        await super().load()

    def _load(self) -> None:
        self._every = whole_arg(self.stage, "stream_tokens", 1)
        super()._load()
        self._prompts = MediaPrompts(part_folder(self.stage), self._encoder, self._family.processor)

    def _load_model(self, folder: Path, options: Mapping[str, Any]) -> Any:
        self._family = family_of(folder)
        model = load_part(resolve_name(self._family.thinker), folder, "thinker", **options)
        model.lm_head.register_forward_pre_hook(self._before_head)
        self._states: torch.Tensor | None = None
        self._layer_states: torch.Tensor | None = None
        self._layer = self._family.prompt_layer(folder)
        if self._layer is not None:
            layers = model.model.layers
            if not 0 < self._layer < len(layers):
                raise ConfigError(
                    f"{folder}: the talker wants layer {self._layer} of a thinker of {len(layers)}"
                )
            layers[self._layer - 1].register_forward_hook(self._behind_layer)
        return model

    def _behind_layer(self, module: Any, arguments: Any, output: Any) -> None:
        """Keep the hidden states [rows, n, hidden] that the talker wants of the prompt."""
        self._layer_states = output[0] if isinstance(output, tuple) else output

    def _before_head(self, module: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        """Keep the last hidden states [rows, n, hidden]; logits are made of the last one only."""
        self._states = arguments[0]
        return (arguments[0][:, -1:],)

    async def _prompt(self, inputs: Mapping[str, StageInput], params: Mapping[str, Any]) -> Prompt:
        # Beside the model thread: a video may take half a minute. One request's media at a time:
        # frames are large.
        async with self._decoding if has_media(inputs) else nullcontext():
            said = await read_conversation(inputs, self._prompts.videos(params))
            return await self.in_thread(self._encoded, said, inputs, params)

    def _encoded(
        self,
        said: Conversation | None,
        inputs: Mapping[str, StageInput],
        params: Mapping[str, Any],
    ) -> Prompt:
        ids, media = self._prompts.encoded(said, inputs, params, self._context)
        # transformers computes them on the CPU from Python lists.
        tensor = torch.tensor([ids])
        lengths = media.get("feature_attention_mask")
        positions, shift = self._model.get_rope_index(
            tensor,
            image_grid_thw=media.get("image_grid_thw"),
            video_grid_thw=media.get("video_grid_thw"),
            attention_mask=torch.ones_like(tensor),
            use_audio_in_video=media.get(SOUND_IN_VIDEO, False),
            audio_seqlens=None if lengths is None else lengths.sum(-1),
            second_per_grids=media.get("video_second_per_grid"),
        )
        tensors = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in media.items()
        }
        more = {**tensors, "position_ids": positions.to(self.device)}
        return Prompt(ids, more, shift[0].item())

    def _forward(self, ids: torch.Tensor, cache: Any, **more: Any) -> Any:
        positions = more.pop("position_ids")
        if positions.ndim == 2:  # of text: the same along time, height and width
            positions = positions.expand(3, *positions.shape)
        out = self._model(
            input_ids=ids, past_key_values=cache, use_cache=True, position_ids=positions, **more
        )
        states, self._states = self._states, None
        assert states is not None, "the head was asked"
        return SimpleNamespace(logits=out.logits, hidden_states=(states,))

    def _prompt_done(self, generation: Generation, out: Any) -> None:
        if self._want_hidden:
            states = out.hidden_states[-1] if self._layer is None else self._layer_states
            assert states is not None, "the layer was passed"
            generation.prompt_states = states[0].to("cpu", copy=True)

    def _generation(self, prompt: Prompt, params: Mapping[str, Any], emit: Emit) -> Generation:
        sampling = {name: value for name, value in params.items() if name != PARAMETER}
        return super()._generation(prompt, sampling, emit)

    async def _follow(self, generation: Generation) -> None:
        """Hand on what is said, up to the end."""
        if not self._want_hidden:
            await generation.done
            return
        # Tokens come from the model thread: states are there before them.
        tokens, send = generation.sequences[0].tokens, partial(self._send, generation)
        await hand_on(generation, lambda: len(tokens), self._every, send)

    async def _send(self, generation: Generation, start: int, stop: int, last: bool) -> None:
        tensors = self._reply(generation, start, stop)
        await generation.emit.achunk(reply.NAME, tensors=tensors, last=last)

    def _reply(self, generation: Generation, start: int, stop: int) -> dict[str, torch.Tensor]:
        answer = generation.sequences[0]
        states = generation.prompt_states
        assert states is not None, "they come with the first token"
        rows = answer.rows[start:stop]
        prompt = None
        if start == 0:
            positions = generation.prompt.more["position_ids"][:, 0].to("cpu", copy=True)
            ids = torch.tensor(generation.prompt.ids, dtype=torch.int64)
            prompt = reply.ThinkerPrompt(ids, positions, states)
        return reply.tensors_of(
            torch.tensor(answer.tokens[start:stop], dtype=torch.int64),
            torch.cat(rows) if rows else states[:0],
            prompt,
        )

    def _output(self, generation: Generation) -> StageOutput:
        output = super()._output(generation)
        if self._want_hidden:
            count = len(generation.sequences[0].tokens)
            output.tensors[reply.NAME] = self._reply(generation, 0, count)
        return output

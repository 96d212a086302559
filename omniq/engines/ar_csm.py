"""AR engine of CSM: text to frames of codec codes, handed on while more are made."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omniq.engines.base import Emit, Engine, NullEmit, StageInput, StageOutput, StageRequest
from omniq.engines.families.csm import codes_of, conversation, ends, is_sound, portions
from omniq.engines.faults import engine_faults
from omniq.engines.inputs import refuse_input, tensor_input, text_input
from omniq.engines.loading import (
    check_engine_args,
    loading,
    part_folder,
    torch_dtype,
    whole_arg,
)
from omniq.engines.sampling import Sampler, Sampling, generation_defaults, refuse_parameters
from omniq.engines.stepping import Generation, Past, StepLoop
from omniq.errors import ConfigError

ENGINE_ARGS = frozenset({"attn_implementation", "chunk_frames", "voices"})
#: Of text, or of one vocabulary: a frame has a code of each of several codebooks.
MEANINGLESS = (
    *("n", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "logit_bias"),
    *("allowed_token_ids", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
)
DEFAULT_VOICE = "0"
#: Frames that go on together: at 12.5 frames a second, 0.32 s of sound.
CHUNK_FRAMES = 4
WARMUP_FRAMES = 2


@dataclass(eq=False, slots=True, kw_only=True)
class _Speech(Generation):
    """One text being said."""

    inputs: Mapping[str, Any]
    budget: int
    first: Sampler
    others: Sampler
    emit: Emit
    frames: list[list[int]] = field(default_factory=list)
    #: Frames that are decoded: all, or all but an end mark.
    sound: int = 0
    finish_reason: str | None = None
    started: float = field(default_factory=time.perf_counter)
    first_frame: float = 0.0


class CsmAREngine(Engine):
    """Speech by ``CsmForConditionalGeneration``: the backbone makes the first code of a frame, its
    depth decoder the others; one forward pass of the backbone a step for all requests in flight,
    and one of the depth decoder a code.

    Inputs: ``prompt`` (text); ``voice`` (text: the speaker's number, or one of the names in
    ``voices``; default 0);
    ``ref_audio`` (float32 [samples] at the codec's rate) with ``ref_text``, to speak in
    the voice of a recording. Output ``codes``: int64 [frames, codebooks], in chunks of
    ``chunk_frames`` while more are made; and the value ``finish_reason``, ``stop`` or ``length``.

    Parameters: of sampling, for all codes of a frame; those that a request leaves open are as
    ``generate`` has them of the model's generation config, for backbone and depth decoder each.
    ``max_tokens`` counts frames. A seed gives the same codes as ``generate`` behind
    ``torch.manual_seed``.

    Engine arguments: ``chunk_frames`` (default 4), ``voices`` (names of speakers, to their
    numbers), ``attn_implementation``.
    """

    name = "csm"

    async def load(self) -> None:
        """Load weights and processor.

        Raises:
            ConfigError: the folder holds no CSM, or an engine argument is wrong.
        """
        await self.in_thread(self._load)
        self._loop: StepLoop[_Speech] = StepLoop(self, self)

    def _load(self) -> None:
        from transformers import (  # noqa: PLC0415 - slow import
            AutoProcessor,
            CsmForConditionalGeneration,
        )

        args = check_engine_args(self.stage, ENGINE_ARGS)
        self._chunk = whole_arg(self.stage, "chunk_frames", CHUNK_FRAMES)
        args.pop("chunk_frames", None)
        self._voices = args.pop("voices", {})
        numbers = self._voices.values() if isinstance(self._voices, dict) else [None]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ConfigError(
                f"stage {self.stage.stage_id!r}: engine_args.voices: must map names to numbers of "
                f"speakers from 0, is {self._voices!r}"
            )
        folder = part_folder(self.stage)
        with loading(self.stage, folder):
            self._processor: Any = AutoProcessor.from_pretrained(folder)
            model = CsmForConditionalGeneration.from_pretrained(
                folder, dtype=torch_dtype(self.stage), **args
            )
        with engine_faults(f"loading {folder}"):
            self._model: Any = model.to(self.device).eval()
        config, own = model.config, model.generation_config
        self._codebooks, self._end = int(config.num_codebooks), config.codebook_eos_token_id
        self._context = int(config.max_position_embeddings)
        self._most = own.max_new_tokens
        self._first = generation_defaults(own, sample=own.do_sample)
        depth = model.depth_decoder.generation_config
        self._others = generation_defaults(depth, sample=depth.do_sample)

    async def warmup(self) -> None:
        """Say the beginning of a word."""
        request = StageRequest("warmup", {"max_tokens": WARMUP_FRAMES, "seed": 0})
        await self.run(request, {"prompt": StageInput("a")}, NullEmit())

    async def run(
        self, request: StageRequest, inputs: Mapping[str, StageInput], emit: Emit
    ) -> StageOutput:
        """Speak until an end frame, ``max_tokens`` frames or the context's end."""
        speech = await self.in_thread(self._read, request.params, inputs, emit)
        making = asyncio.create_task(self._loop.run(speech))
        try:
            await self._hand_on(speech, making, emit)
        finally:
            making.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await making
        codes = codes_of(speech.frames[: speech.sound], self._codebooks)
        return StageOutput(
            values={"finish_reason": speech.finish_reason},
            tensors={"codes": {"codes": codes}},
            metrics={
                "prompt_tokens": int(speech.inputs["input_ids"].shape[1]),
                "completion_tokens": len(speech.frames),
                "first_token_seconds": speech.first_frame,
                "generation_seconds": time.perf_counter() - speech.started,
            },
        )

    async def _hand_on(self, speech: _Speech, making: asyncio.Task[None], emit: Emit) -> None:
        """Send frames as they come; a slow reader holds up nobody, they wait here meanwhile."""
        sent = 0
        while True:
            stepped = asyncio.create_task(speech.news.wait())
            try:
                await asyncio.wait({making, stepped}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stepped.cancel()
            speech.news.clear()
            if final := making.done():
                await making  # it may have failed
            for begin, end in portions(speech.sound, sent, self._chunk, final=final):
                codes = codes_of(speech.frames[begin:end], self._codebooks)
                await emit.achunk("codes", tensors={"codes": codes})
                sent = end
            if final:
                return

    async def unload(self) -> None:
        """Free the model."""
        await self._loop.close()
        await super().unload()
        self._model = None

    # -- one request -------------------------------------------------------------------------

    def _read(
        self, params: Mapping[str, Any], inputs: Mapping[str, StageInput], emit: Emit
    ) -> _Speech:
        """The request as the processor gives it to the model."""
        given = {name: value for name, value in params.items() if value is not None}
        deterministic = bool(given.pop("deterministic", False))
        refuse_parameters(given, MEANINGLESS, "it makes frames of codes, not text")
        most = given.pop("max_tokens", self._most)
        first = Sampling.from_params({**self._first, **given})
        others = Sampling.from_params({**self._others, **given})
        text = text_input(inputs, "prompt")
        voice = text_input(inputs, "voice") if "voice" in inputs else DEFAULT_VOICE
        voice = str(self._voices.get(voice, voice))
        if not (voice.isascii() and voice.isdecimal()):
            named = "".join(f", {name}" for name in self._voices)
            refuse_input("voice", f"must be a speaker's number: 0, 1 ...{named}; is {voice!r}")
        reference = _reference(inputs)
        messages = conversation(text, voice, reference)
        with engine_faults(f"stage {self.stage.stage_id!r}"):
            made = self._processor.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_tensors="pt"
            ).to(self.device, self._model.dtype)
        room = self._context - int(made["input_ids"].shape[1])
        if room < 1:
            lacks = f"leave room in {self._context} positions, lacks {1 - room}"
            if reference is not None:
                refuse_input("ref_audio", f"must, with ref_text and prompt, {lacks}")
            refuse_input("prompt", f"must {lacks}")
        first_sampler = Sampler(first, [])
        return _Speech(
            deterministic=deterministic,
            inputs=made,
            budget=min(room if most is None else most, room),
            first=first_sampler,
            others=Sampler(others, [], generator=first_sampler.generator),
            emit=emit,
        )

    # -- steps, on the model thread ------------------------------------------------------------

    def prefill(self, generation: _Speech) -> tuple[Any, int]:
        """The text (and the recording), and the first frame."""
        from transformers import DynamicCache  # noqa: PLC0415 - slow import, done by load

        cache = DynamicCache(config=self._model.config)
        self._forward([generation], past_key_values=cache, **generation.inputs)
        generation.first_frame = time.perf_counter() - generation.started
        return cache, int(generation.inputs["input_ids"].shape[1])

    def decode(self, generations: Sequence[_Speech], past: Past) -> None:
        """One more frame for each."""
        frames = torch.tensor([[g.frames[-1]] for g in generations], device=self.device)
        self._forward(
            generations,
            input_ids=frames,
            past_key_values=past.cache,
            attention_mask=past.attention_mask,
            position_ids=past.positions,
        )

    def _forward(self, generations: Sequence[_Speech], **inputs: Any) -> None:
        out = self._model(**inputs, use_cache=True, logits_to_keep=1, output_hidden_states=True)
        firsts = [g.pick(g.first, out.logits[row, -1]) for row, g in enumerate(generations)]
        hidden = out.hidden_states[-1][:, -1]
        for generation, frame in zip(
            generations, self._frames(generations, firsts, hidden), strict=True
        ):
            self._take(generation, frame)

    def _frames(
        self, generations: Sequence[_Speech], firsts: list[int], hidden: torch.Tensor
    ) -> list[list[int]]:
        """The frames that begin with ``firsts``; ``hidden`` [rows, size] is the backbone's."""
        from transformers import DynamicCache  # noqa: PLC0415 - slow import, done by load

        depth = self._model.depth_decoder
        cache = DynamicCache(config=depth.config)
        frames = [[code] for code in firsts]
        # The backbone's state takes the place of the code before the first.
        codes = torch.tensor([[0, code] for code in firsts], device=self.device)
        more: dict[str, Any] = {"backbone_last_hidden_state": hidden}
        for _ in range(self._codebooks - 1):
            out = depth(
                input_ids=codes, past_key_values=cache, use_cache=True, logits_to_keep=1, **more
            )
            for row, (generation, frame) in enumerate(zip(generations, frames, strict=True)):
                frame.append(generation.pick(generation.others, out.logits[row, -1]))
            codes, more = torch.tensor([[f[-1]] for f in frames], device=self.device), {}
        return frames

    def _take(self, generation: _Speech, frame: list[int]) -> None:
        if generation.fault is not None:
            return
        generation.frames.append(frame)
        generation.sound += is_sound(frame, self._end)
        if ends(frame, self._end):
            generation.finish_reason = "stop"
        elif len(generation.frames) >= generation.budget:
            generation.finish_reason = "length"
        generation.finished = generation.finish_reason is not None
        generation.emit.progress(len(generation.frames), generation.budget)


def _reference(inputs: Mapping[str, StageInput]) -> tuple[str, Any] | None:
    """Words and samples of a recording, if the request brings one."""
    given = [name for name in ("ref_audio", "ref_text") if name in inputs]
    if not given:
        return None
    words, samples = text_input(inputs, "ref_text"), tensor_input(inputs, "ref_audio")
    if samples.ndim != 1 or not len(samples):
        refuse_input("ref_audio", f"must be [samples], is {list(samples.shape)}")
    return words, samples.float().cpu().numpy()

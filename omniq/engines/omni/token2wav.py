"""Qwen2.5-Omni's token2wav: codes to a mel spectrogram by flow matching, to sound by BigVGAN."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from omniq.config import OmniStageConfig
from omniq.engines.base import Cancelled, NullEmit, StageInput, StageRequest
from omniq.engines.faults import engine_faults
from omniq.engines.inputs import refuse_input
from omniq.engines.loading import check_engine_args, loading, part_folder, whole_arg
from omniq.engines.omni.flow import Flow, Past, Stretch, integrate
from omniq.engines.omni.speakers import Speakers
from omniq.engines.omni.vocoder import Utterance, VocoderEngine
from omniq.engines.omni.weights import part_of
from omniq.engines.omni.windows import Overlap, Sizes, Window, Windows
from omniq.engines.seeds import seeded_generator
from omniq.errors import ConfigError, InvalidRequest

NUM_STEPS, GUIDANCE_SCALE, SWAY_COEFFICIENT = 10, 0.5, -1.0
#: Of Qwen's own streaming code: blocks of the DiT's attention in a window and behind it, and frames
#: of the vocoder's overlap.
BLOCKS, BLOCKS_BEHIND, OVERLAP = 3, 1, 20
#: Of the first window. A shorter one is heard sooner, but its sound ends long before the next.
FIRST_BLOCKS = BLOCKS
SAMPLE_RATE = 24_000
WARMUP_CODES = 4
#: Most that is kept for a stream (:class:`~omniq.engines.omni.flow.Past`).
PAST_BYTES = 256 * 2**20


class Token2WavEngine(VocoderEngine):
    """Speech codes to a waveform.

    Input ``codes``: int64 [n], whole or by chunks. Output: tensor ``audio``, float32 [samples] in
    -1..1 at 24 kHz. Parameters: ``speaker``, ``seed`` (of the noise that the flow starts from),
    ``num_steps``, ``guidance_scale``, ``sway_coefficient``.

    A request that nobody streams is decoded as a whole, as transformers does it. For one that is
    streamed, codes are decoded by windows while they come: ``window_blocks`` blocks of the DiT's
    attention (24 frames of 10 ms each) at once, the first time ``first_blocks``, with
    ``future_blocks`` behind them; sound of the last ``overlap`` frames waits for what follows.
    Every frame starts from the noise that it has in the whole run. What a window has to know of the
    frames before it is kept (:class:`~omniq.engines.omni.flow.Past`). Each evaluation of the solver
    looks a block further ahead than the one before, so the windows are an approximation; an
    utterance of one window is exact.

    Engine arguments: ``first_blocks``, ``window_blocks``, ``future_blocks``, ``overlap``.
    """

    name = "omni-token2wav"
    sample_rate = SAMPLE_RATE

    def __init__(self, stage: OmniStageConfig, device: str = "cpu") -> None:
        super().__init__(stage, device)
        self.waiting: dict[_Utterance, None] = {}
        """Streams of which a window can be decoded, in the order of their asking."""

    async def load(self) -> None:
        """Load DiT, vocoder and voices.

        Raises:
            ConfigError: folder or engine arguments are wrong.
        """
        await self.in_thread(self._load)

    def _load(self) -> None:
        from transformers import (  # noqa: PLC0415 - slow import
            Qwen2_5OmniConfig,
            Qwen2_5OmniToken2WavModel,
        )

        defaults = {
            "first_blocks": FIRST_BLOCKS,
            "window_blocks": BLOCKS,
            "future_blocks": BLOCKS_BEHIND,
            "overlap": OVERLAP,
        }
        check_engine_args(self.stage, defaults)
        least = {"first_blocks": 1, "window_blocks": 1}
        args = {
            name: whole_arg(self.stage, name, value, least=least.get(name, 0))
            for name, value in defaults.items()
        }
        if self.stage.dtype not in ("auto", "float32"):
            raise ConfigError(
                f"stage {self.stage.stage_id!r}: token2wav computes in float32, not in "
                f"{self.stage.dtype}"
            )
        folder = part_folder(self.stage)
        with loading(self.stage, folder):
            config = Qwen2_5OmniConfig.from_pretrained(folder).token2wav_config
            config._attn_implementation = "sdpa"
            model = Qwen2_5OmniToken2WavModel(config).float().eval()
            model.load_state_dict(part_of(folder, "token2wav."))
            self._speakers = Speakers.of_qwen2_5(folder)
        with engine_faults(f"loading {folder}"):
            model = model.to(self.device)
        self._dit: Any = model.code2wav_dit_model
        self._timbres = self._take_voices()
        self._vocoder: Any = model.code2wav_bigvgan_model
        block = int(self._dit.block_size)
        self.sizes = Sizes(
            first=args["first_blocks"] * block,
            chunk=args["window_blocks"] * block,
            future=args["future_blocks"] * block,
            overlap=args["overlap"],
        )
        self.repeats = int(self._dit.repeats)
        self.mel_size = int(self._dit.mel_dim)
        self.most_frames = int(self._dit.config.max_position_embeddings)
        self.hop = math.prod(int(rate) for rate in self._vocoder.config.upsample_rates)
        self.silence = self.hop * self.repeats

    async def warmup(self) -> None:
        """Decode a few codes."""
        codes = StageInput(tensors={"codes": torch.zeros(WARMUP_CODES, dtype=torch.int64)})
        await self.run(StageRequest("warmup", {"num_steps": 2}), {"codes": codes}, NullEmit())

    def utterance(self, request: StageRequest) -> Utterance:
        """See :class:`VocoderEngine`."""
        return _Utterance(self, request)

    async def unload(self) -> None:
        """Free the models."""
        await super().unload()
        self._dit = self._vocoder = None

    # -- on the model thread -----------------------------------------------------------------

    @torch.no_grad()
    def _take_voices(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """``cond`` and ``voice`` of :class:`Flow` for each speaker.

        The model encodes its speaker's reference anew in each evaluation, 36 times a window; here
        that is done once, and its encoder goes.
        """
        encoder = self._dit.input_embed.spk_encoder
        self._dit.input_embed.spk_encoder = torch.nn.Identity()
        timbres = {}
        for name in self._speakers.names:
            cond, mel = (value.to(self.device) for value in self._speakers.timbre(name))
            timbres[name] = cond, encoder(torch.cat([mel, torch.zeros_like(mel)]))
        return timbres

    def flow_of(self, params: Mapping[str, Any]) -> Flow:
        """A request's parameters, defaults filled in.

        Raises:
            InvalidRequest: there is no such voice.
        """
        given = {k: v for k, v in params.items() if v is not None}
        cond, voice = self._timbres[self._speakers.named(given.get("speaker"))]
        return Flow(
            cond,
            voice,
            int(given.get("num_steps", NUM_STEPS)),
            float(given.get("guidance_scale", GUIDANCE_SCALE)),
            float(given.get("sway_coefficient", SWAY_COEFFICIENT)),
        )

    def check_past(self, flow: Flow) -> None:
        """Whether a stream of these parameters keeps little enough.

        Raises:
            InvalidRequest: it does not.
        """
        size = Past.nbytes(self._dit, flow)
        if size > PAST_BYTES:
            most = 1 + (flow.num_steps - 1) * PAST_BYTES // size
            message = f"must be at most {most} for a stream, is {flow.num_steps}"
            raise InvalidRequest(
                f"parameters.num_steps: {message}",
                fields=[{"field": "parameters.num_steps", "message": message}],
            )

    def known(self, codes: torch.Tensor) -> torch.Tensor:
        """``codes`` on the device; the talker's vocabulary is larger than the codebook, and Qwen's
        code takes 0 for the rest.
        """
        codes = codes.to(self.device)
        return codes.masked_fill(codes >= self._dit.text_embed.codec_embed.num_embeddings, 0)

    @torch.no_grad()
    def decode(self, first: _Utterance) -> None:
        """The next window of ``first``, and at once that of each stream that waits for the model
        thread and whose flow takes the same steps. What fails is the fault of all of them.
        """
        others = [other for other in list(self.waiting) if other.joins(first)]
        batch, begun = [first, *others], time.perf_counter()
        try:
            with engine_faults(f"stage {self.stage.stage_id!r}"):
                mels = integrate(self._dit, [utterance.stretch() for utterance in batch])
                for utterance, mel in zip(batch, mels, strict=True):
                    utterance.take(mel.cpu())
        except Exception as exc:
            for other in others:
                other.fault = exc
            raise
        share = (time.perf_counter() - begun) / len(batch)
        for other in others:
            other.borrowed += share
            first.borrowed -= share

    @torch.no_grad()
    def sound(self, mel: torch.Tensor) -> torch.Tensor:
        """float32 [frames * hop] of a spectrogram [frames, mel]."""
        with engine_faults(f"stage {self.stage.stage_id!r}"):
            waveform: torch.Tensor = self._vocoder(mel.T[None].to(self.device))
            return waveform.reshape(-1).float().cpu()


class _Utterance(Utterance):
    """Codes to spectrogram to sound, window after window.

    While it waits for the model thread, another's turn may decode its next window.
    """

    def __init__(self, engine: Token2WavEngine, request: StageRequest) -> None:
        super().__init__(1)
        self._engine, self._flow = engine, engine.flow_of(request.params)
        self._windows = Windows(engine.sizes)
        self._overlap = Overlap(engine.sizes.overlap)
        self._stream = request.stream
        self._past: Past | None = None
        if request.stream:
            engine.check_past(self._flow)
            self._past = Past()
        # Frame by frame it gives the same numbers as all at once.
        self._noise: torch.Tensor | None = None
        self._generator = seeded_generator(request.params.get("seed"))
        self._mel: torch.Tensor | None = None
        self._todo: deque[Window] = deque()
        self._decoded: deque[Window] = deque()
        self.fault: Exception | None = None
        """What the turn that decoded its window failed with."""

    def push(self, codes: torch.Tensor) -> None:
        """See :class:`Utterance`; the windows of a stream can be decoded from now on."""
        super().push(codes)
        if self._stream:
            self._add(self._windows, ended=False)

    def sounds(self, *, ended: bool) -> Iterator[torch.Tensor] | None:
        """See :class:`Utterance`."""
        if ended and self._stream:
            self._add(self._windows, ended=True)
        elif ended:  # all at once
            most = self._engine.most_frames // self._engine.repeats
            if len(self.codes) > most:
                refuse_input("codes", f"must be at most {most} at once, are {len(self.codes)}")
            self._add(Windows(Sizes(max(self._frames, 1), 0, 0)), ended=True)
        if not ended and not self._todo and not self._decoded:
            return None
        return self._said(self._frames if ended else None)

    @property
    def _frames(self) -> int:
        return len(self.codes) * self._engine.repeats

    def _add(self, windows: Windows, *, ended: bool) -> None:
        self._todo += windows.ready(self._frames, ended=ended)
        if self._todo and self._stream:
            self._engine.waiting[self] = None

    def close(self) -> None:
        """See :class:`Utterance`."""
        super().close()
        self._engine.waiting.pop(self, None)
        self._past = None

    # -- on the model thread -----------------------------------------------------------------

    def _said(self, end: int | None) -> Iterator[torch.Tensor]:
        """The sound of each window; ``end``: the last frame, None if more will come."""
        while self._todo or self._decoded:
            if not self._decoded:
                self._check_wanted()
                self._engine.decode(self)
            self._check_wanted()
            window = self._decoded.popleft()
            yield from self._sound(window.end, ended=window.end == end)
        if end is not None:  # where no window was left
            yield from self._sound(end, ended=True)

    def _check_wanted(self) -> None:
        if self.cancel.is_set():
            raise Cancelled("nobody wants this run's outcome")
        if self.fault is not None:
            raise self.fault

    def joins(self, other: _Utterance) -> bool:
        """Whether the next window may be decoded in a turn of ``other``: one at a time, as who
        does not take what was made for it gets no more.
        """
        mine, its = self._flow, other._flow
        return (
            self is not other
            and other._stream
            and bool(self._todo)
            and not self._decoded
            and not self.cancel.is_set()
            and self.fault is None
            and (mine.num_steps, mine.sway_coefficient, mine.rows)
            == (its.num_steps, its.sway_coefficient, its.rows)
        )

    def stretch(self) -> Stretch:
        """The next window."""
        engine, window = self._engine, self._todo[0]
        codes = self.codes[window.begin // engine.repeats : window.stop // engine.repeats]
        noise = self._noise_to(window.stop)[window.begin :]
        return Stretch(
            engine.known(codes), noise.to(engine.device), self._flow, window.begin,
            self._past, 0 if window.rest else window.end, self.cancel,
        )  # fmt: skip

    def take(self, mel: torch.Tensor) -> None:
        """The spectrogram [frames, mel] of :meth:`stretch`."""
        window = self._todo.popleft()
        if not self._todo:
            self._engine.waiting.pop(self, None)
        new = mel[: window.end - window.begin]
        self._mel = new if self._mel is None else torch.cat([self._mel, new])
        self._decoded.append(window)

    def _sound(self, known: int, *, ended: bool) -> Iterator[torch.Tensor]:
        """What ``known`` frames of the spectrogram give that has not been heard."""
        part = self._overlap.ready(known, ended=ended)
        if part is not None and self._mel is not None:
            wave = self._engine.sound(self._mel[part.start : part.stop])
            begin, end = ((at - part.start) * self._engine.hop for at in (part.begin, part.end))
            yield wave[begin:end].clone()

    def _noise_to(self, frames: int) -> torch.Tensor:
        """float32 [frames, mel]; what was drawn before stays."""
        have = 0 if self._noise is None else len(self._noise)
        if frames > have:
            more = torch.randn(frames - have, self._engine.mel_size, generator=self._generator)
            self._noise = more if self._noise is None else torch.cat([self._noise, more])
        assert self._noise is not None, "there are frames"
        return self._noise[:frames]
